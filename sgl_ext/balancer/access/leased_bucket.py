"""A process's part of a limit that several balancers share: tokens leased from the store in slices.

    a request ── take ──> leased tokens <── a second's worth at a time ── the bucket in the store

A request takes leased tokens and waits for nothing. Only when they do not suffice, it waits for a
lease. What an idle tenant has left is put back within seconds, so that others get it. While the
store fails, the process takes its share of the limit: an equal part of what the balancers last had.
`now_s` is passed in and must not decrease.
"""

import asyncio
from collections.abc import Callable

from scheduler.token_bucket import Bucket
from sgl_ext.balancer.store.shared_state import Lease, SharedState

_MINUTE_S = 60.0
SLICE_S = 1.0
"""The part of a minute's tokens that are leased at once."""


class LeasedBucket:
    """One limit of one tenant. `wait_s` and `take` are those of a `Bucket`."""

    def __init__(self, name: str, per_minute: float, now_s: float) -> None:
        self._name = name
        self.per_minute = per_minute
        self._level = 0.0  # below 0: tokens that were used and not leased
        self._shared_level = per_minute  # when the store last said it
        self._seen_s = now_s
        self._used = False
        self._share: Bucket | None = None  # while the store fails
        self._used_alone = 0.0
        self._leasing = asyncio.Lock()

    def wait_s(self, cost: float, now_s: float) -> float:
        """Seconds until `cost` may be taken if nothing else is; 0: now."""
        if self._share is not None:
            return self._share.wait_s(cost, now_s)
        if self._level >= cost:
            return 0.0
        lacks = min(cost, self.per_minute) - self._shared_now(now_s) - self._level
        # More may be there than was seen: others put back what they do not use.
        return max(lacks / self.per_minute * _MINUTE_S, SLICE_S)

    def take(self, cost: float, now_s: float) -> None:
        """Takes `cost` whether or not it is there; a negative cost is put back."""
        self._used = True
        if self._share is not None:
            self._share.take(cost, now_s)
            self._used_alone += cost
        else:
            self._level -= cost

    def resize(self, per_minute: float, now_s: float) -> None:
        """Changes the limit. What was taken stays taken."""
        if self._share is not None:
            part = self._share.per_minute / self.per_minute
            self._share.resize(per_minute * part, now_s)
        self._shared_level = min(self._shared_level, per_minute)
        self.per_minute = per_minute

    def needs_lease(self, cost: float, now_s: float) -> bool:
        """Whether a lease is needed first. None is for a request that would be rejected all the
        same, so a tenant over its limit costs the store nothing."""
        if self._share is not None or self._level >= cost:
            return False
        return self._shared_now(now_s) + self._level >= min(cost, self.per_minute)

    async def lease(self, cost: float, state: SharedState, clock: Callable[[], float]) -> None:
        """Leases what `cost` lacks, and a slice on top. Raises StoreFailed."""
        async with self._leasing:
            now_s = clock()  # others may have waited before
            if not self.needs_lease(cost, now_s):  # another request has leased a slice
                return
            await self._ask(state, now_s, need=cost, extra=self._slice)

    async def settle(self, state: SharedState, now_s: float) -> None:
        """Pays debts, and puts back what was not used since the last call, or is more than a
        slice. Call it every second. Raises StoreFailed."""
        spare = self._level - (self._slice if self._used else 0.0)
        self._used = False
        if self._share is None and (self._level < 0 or spare > 0):
            async with self._leasing:
                await self._ask(state, now_s, keep=self._level - max(spare, 0.0))

    def part(self, balancers: int, now_s: float) -> None:
        """From now on this process takes its share of the limit, without the store."""
        if self._share is None:
            share = self.per_minute / balancers
            self._share = Bucket(share, now_s)
            there = self._shared_now(now_s) / balancers + self._level
            self._share.take(share - min(there, share), now_s)
            self._level = self._used_alone = 0.0

    async def rejoin(self, state: SharedState, now_s: float) -> None:
        """Leases again, and charges the limit with what was used meanwhile. Raises StoreFailed."""
        if self._share is not None:
            # What has flowed in since is not charged.
            lacks = self._share.per_minute - self._share.level(now_s)
            await state.lease(
                Lease(self._name, self.per_minute, take=max(min(self._used_alone, lacks), 0.0))
            )
            self._share, self._shared_level, self._seen_s = None, self.per_minute, now_s

    @property
    def _slice(self) -> float:
        return self.per_minute * SLICE_S / _MINUTE_S

    async def _ask(
        self,
        state: SharedState,
        now_s: float,
        need: float = 0.0,
        extra: float = 0.0,
        keep: float = 0.0,
    ) -> None:
        """Puts back all but `keep`, and leases. The level may change meanwhile."""
        back = self._level - max(keep, 0.0)
        self._level -= back
        try:
            got = await state.lease(Lease(self._name, self.per_minute, -back, need, extra))
        except BaseException:
            self._level += back
            raise
        self._level += got.tokens
        self._shared_level, self._seen_s = got.level, now_s

    def _shared_now(self, now_s: float) -> float:
        """The most that the store can have: others may have taken of it."""
        filled = (now_s - self._seen_s) / _MINUTE_S * self.per_minute
        return min(self._shared_level + filled, self.per_minute)
