"""Requests whose client has left and may send them again.

A client that loses patience closes its connection and sends the same body once more. Its first
copy holds a place in the queue, or is half computed. So it stays for `resend_s`, and the same
request takes it over:

    running --its client leaves--> left --the same request comes--> running, for the new client
                                    \\__ resend_s __> stopped

The new client first gets what the first one was sent. "The same" is the tenant, the path, the hints
(and so the session) and each byte of the body.
"""

import time
from collections.abc import Callable
from typing import Protocol

import xxhash

from sgl_ext.balancer.http.request_head import RequestHead
from sgl_ext.supervision import Failed, Guard

MOST_LEFT = 256
MAX_SENT_BYTES = 256 * 1024
"""What a copy may have sent so that it can be taken over."""
# Headers that decide on the answer besides the hints.
_DECIDING = (b"anthropic-version", b"anthropic-beta", b"accept", b"x-sgl-ext-context")


def copy_key(head: RequestHead, body: bytes | bytearray) -> bytes:
    """Equal for two copies of a request."""
    hints = "".join(f"\n{name}: {value}" for name, value in sorted(head.hints.items()))
    found = xxhash.xxh3_128(f"{head.method}\n{head.tenant}{hints}\n".encode())
    found.update(head.target)
    for name in _DECIDING:
        found.update(b"\n%b" % head.fields.get(name, b""))
    found.update(b"\n\n")
    found.update(body)
    return found.digest()


class Copy(Protocol):
    """A request without a client.

    can_be_taken: whether all that was sent of its answer is still there.
    """

    @property
    def can_be_taken(self) -> bool: ...
    def stop(self) -> None: ...


class Resends:
    """The requests of one process whose clients have left: at most MOST_LEFT, one of each key.

    resend_s: how long one waits for its client; 0: it stops at once.
    """

    def __init__(
        self, failed: Failed, resend_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.resend_s = resend_s
        self.clock = clock
        self._guard = Guard("resends", failed)
        # In the order in which their clients left.
        self._left: dict[bytes, tuple[float, Copy]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def leave(self, key: bytes, copy: Copy) -> None:
        """The client of a copy has left. An earlier copy stops, and so does the one that waits
        longest if there are too many."""
        earlier = self._left.pop(key, None)
        if earlier is None and len(self._left) >= MOST_LEFT:
            earlier = self._left.pop(next(iter(self._left)))
        self._left[key] = self.clock(), copy
        if earlier is not None:
            self._stop(earlier[1])

    def take(self, key: bytes) -> Copy | None:
        """The copy with this key, which has a client again; None if there is none."""
        if not self._left or (found := self._left.get(key)) is None or not found[1].can_be_taken:
            return None
        del self._left[key]
        return found[1]

    def forget(self, key: bytes, copy: Copy) -> None:
        """A copy has ended without an answer that another client could get. A second call does
        nothing."""
        if (found := self._left.get(key)) is not None and found[1] is copy:
            del self._left[key]

    def sweep(self) -> None:
        """Stops the copies that nobody has taken over in time. Call it periodically."""
        now_s = self.clock()
        for key, (left_s, copy) in tuple(self._left.items()):
            if now_s - left_s >= self.resend_s or not copy.can_be_taken:
                del self._left[key]
                self._stop(copy)

    def close(self) -> None:
        """Stops all."""
        left, self._left = self._left, {}
        for _, copy in left.values():
            self._stop(copy)

    def _stop(self, copy: Copy) -> None:
        with self._guard:
            copy.stop()


class NoClient:
    """Stands for the client of a copy while it has none: what it gets is dropped."""

    paused = False

    def answer(self, status: int, reason: bytes, lines: bytes, body: bytes) -> None: ...
    def start_stream(self, status: int, reason: bytes, lines: bytes, data: bytes = b"") -> None: ...
    def write(self, data: bytes) -> None: ...
    def end_stream(self) -> None: ...

    def keep_awake(self) -> bool:
        return True


NO_CLIENT = NoClient()
