"""The memory of a process for bodies and answers, as one account.

    hold = account.hold(tenant)     of one request; it holds nothing yet
    hold.take_up_to(size)           False, and nothing changes, if the account has no room
    hold.set(size)                  what is held now; an answer cannot be refused any more
    hold.release()                  the request has ended

A tenant with a name holds at most half of the account, so that it cannot lock out the others.

Invariant: `used` is the sum of all holds, so it is 0 when every request has ended.
"""

import ctypes
from collections.abc import Callable


class ByteAccount:
    """At most `limit_bytes`, except for answers. `rejected` is called for each refusal."""

    def __init__(self, limit_bytes: int, rejected: Callable[[], None] = lambda: None) -> None:
        self.limit_bytes = limit_bytes
        self.used = 0
        self.by_tenant: dict[str, int] = {}
        self._rejected = rejected

    def hold(self, tenant: str) -> "Hold":
        """A hold on nothing yet. `tenant` is \"\" for clients that name none."""
        return Hold(self, tenant)

    def has_room(self, tenant: str, more: int) -> bool:
        """Whether a request of the tenant may hold `more` bytes than now. A refusal is counted."""
        limit = self.limit_bytes
        fits = self.used + more <= limit and (
            not tenant or self.by_tenant.get(tenant, 0) + more <= limit // 2
        )
        if not fits:
            self._rejected()
        return fits


class Hold:
    """The bytes that one request holds. `size` is their number."""

    __slots__ = ("_account", "_tenant", "size")

    def __init__(self, account: ByteAccount, tenant: str) -> None:
        self._account = account
        self._tenant = tenant
        self.size = 0

    def take_up_to(self, size: int) -> bool:
        """Holds `size` bytes if the account has room for them, or if they are no more than now."""
        account, more = self._account, size - self.size
        # Usually the tenant has no name, and there is room.
        is_asked = more > 0 and (self._tenant or account.used + more > account.limit_bytes)
        if is_asked and not account.has_room(self._tenant, more):
            return False
        self._add(more)
        return True

    def set(self, size: int) -> bool:
        """Holds `size` bytes. False if that is more than the whole account."""
        if size != self.size:
            self._add(size - self.size)
        return size <= self._account.limit_bytes

    def release(self) -> None:
        """Holds nothing. A second call changes nothing."""
        if self.size:
            self._add(-self.size)

    def _add(self, more: int) -> None:
        account, tenant = self._account, self._tenant
        self.size += more
        account.used += more
        if tenant:
            held = account.by_tenant.get(tenant, 0) + more
            if held:
                account.by_tenant[tenant] = held
            else:
                account.by_tenant.pop(tenant, None)


# From <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Smaller buffers, which most bodies need, are used again without a call of the system.
_SMALL_BYTES = 1024 * 1024
_KEPT_BYTES = 16 * 1024 * 1024


def return_freed_memory() -> None:
    """Lets the process give the memory of large buffers back to the system when they are freed.

    With glibc's defaults, each large buffer raises the limits below which freed memory stays here:
    up to 64 MB. Does nothing where the C library has no such settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _SMALL_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
