"""Rate limits: how many requests and tokens a tenant may use in a minute, of all models together
and of each that the key file names.

On arrival a request is charged with the estimated tokens of its prompt and the output that it
claims. When its answer is complete, the charge is replaced by the real cost: the prompt tokens that
were computed and the output tokens. If the answer reports no usage or is cut, it is replaced by the
prompt and what was streamed so far. Requests that compute nothing are charged as requests without
tokens.

Each of several balancer processes enforces an equal share of every limit, because the kernel
spreads the connections over them. With a store that balancers share they lease parts of the limit
from it instead (`LeasedBucket`), and enforce an equal share only while the store fails.

A `LeasedBucket` is a process's part of a limit that several balancers share:

    a request ── take ──> leased tokens <── a second's worth at a time ── the bucket in the store

A request takes leased tokens and waits for nothing. Only when they do not suffice, it waits for a
lease. What an idle tenant has left is put back within seconds, so that others get it. While the
store fails, the process takes its share of the limit: an equal part of what the balancers last had.
`now_s` is passed in and must not decrease.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple

from scheduler.token_bucket import Bucket
from sgl_ext.balancer.access.authentication import KeyFileReloader
from sgl_ext.balancer.access.usage import UsageLedger
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.documents import StoreFailed
from sgl_ext.balancer.store.shared_state import Lease, SharedState
from sgl_ext.key_file import Allowance, ApiKey, KeyFile
from sgl_ext.limits.at_once import RequestsAtOnce
from sgl_ext.protocols.errors import BalancerError

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


log = logging.getLogger(__name__)


class Charge(NamedTuple):
    """The tokens that a request was charged with on arrival. model: that answers it."""

    tenant: str
    tokens: int
    key: ApiKey | None = None
    model: str = ""


class _Limit(NamedTuple):
    """kind: requests or tokens. model: of what it answers; "": of all requests."""

    kind: str
    per_minute: float
    model: str = ""

    @property
    def label(self) -> str:
        return _label(self.kind, self.model)


def _label(kind: str, model: str) -> str:
    return f"{kind} of {model}" if model else kind


@dataclass(eq=False)
class RateLimits:
    """The limits of a key file. Without a key file there are none.

    processes: those of this balancer.
    state: what balancers share, if there is a store for that.
    usage: of keys by month. at_once: their requests that run.
    """

    key_file: KeyFileReloader | None
    metrics: Metrics
    processes: int = 1
    clock: Callable[[], float] = time.monotonic
    state: SharedState | None = None
    usage: UsageLedger = field(default_factory=UsageLedger)
    at_once: RequestsAtOnce = field(default_factory=RequestsAtOnce)

    def __post_init__(self) -> None:
        self._buckets: dict[tuple[str, str], Bucket | LeasedBucket] = {}
        self._id = os.urandom(8).hex()
        self._balancers = self.processes
        self._is_alone = False
        self.show()

    def show(self) -> None:
        """Puts the limits into the metrics. Call it when the key file has changed."""
        self.metrics.tenant_limit.clear()
        keys = KeyFile() if self.key_file is None else self.key_file.keys
        for tenant in keys.tenants:
            allowance = keys.allowance(tenant)
            for limit in (
                each for of in ("", *allowance.models) for each in _limits(allowance, of)
            ):
                self.metrics.tenant_limit.labels(tenant, limit.label).set(limit.per_minute)

    def charges(self, tenant: str, key: ApiKey | None = None) -> bool:
        """Whether the key file has the tenant or the request's key, so that it is charged."""
        is_known = self.key_file is not None and tenant in self.key_file.keys.tenants
        return is_known or key is not None

    def admit(
        self, tenant: str, tokens: int, key: ApiKey | None = None, model: str = ""
    ) -> Charge | None:
        """Charges a request with its prompt tokens; None if the key file does not have the tenant.

        Raises BalancerError 429 if the tenant or the key is over a limit, and 402 if the key's
        budget is used up.
        """
        if self.key_file is None or not self.charges(tenant, key):
            return None
        now_s = self.clock()
        buckets = []
        for limit, bucket, cost in self._charged(tenant, tokens, now_s, model):
            wait_s = bucket.wait_s(cost, now_s)
            if wait_s > 0:
                self.metrics.tenant_rate_limited.counts[tenant, limit.label] += 1
                of = f" for the model {limit.model}" if limit.model else ""
                amount = f"{limit.per_minute:g} {limit.kind} per minute"
                message = f"This tenant's limit of {amount}{of} is reached."
                retry_after_s = max(math.ceil(wait_s), 1)
                raise BalancerError(HTTPStatus.TOO_MANY_REQUESTS, message, retry_after_s)
            buckets.append((bucket, cost))
        if key is not None:
            self._enter(key, tokens, model)
        for bucket, cost in buckets:
            bucket.take(cost, now_s)
        if self.charges(tenant):
            self.metrics.tenant_requests.counts[(tenant,)] += 1
        return Charge(tenant, tokens, key, model)

    def _enter(self, key: ApiKey, tokens: int, model: str) -> None:
        """Raises BalancerError if the key has as many requests as it may, now or in this month."""
        rejected = self.metrics.tenant_rate_limited.counts
        try:
            self.usage.require_budget(key)
        except BalancerError:
            rejected[key.tenant, "budget"] += 1
            raise
        limit = key.requests_at_once
        if limit is not None and not self.at_once.enter(key.name, limit):
            rejected[key.tenant, "at once"] += 1
            message = f"This key's limit of {limit} requests at once is reached."
            raise BalancerError(HTTPStatus.TOO_MANY_REQUESTS, message, 1)
        self.usage.begin(key, tokens, model)

    def leave(self, charge: Charge | None) -> None:
        """The request does not run any more, or its client has left. Call it once."""
        if charge is not None and charge.key is not None:
            self.usage.end(charge.key, charge.tokens)
            if charge.key.requests_at_once is not None:
                self.at_once.leave(charge.key.name)

    def settle(self, charge: Charge | None, tokens: int | None) -> None:
        """Replaces a charge by the tokens that the request cost; None if its cost is unknown."""
        if charge is None:
            return
        cost = charge.tokens if tokens is None else tokens
        if charge.key is not None:
            self.usage.count(charge.key, 0, cost, charge.model)
        if self.charges(charge.tenant):
            self.metrics.tenant_tokens.counts[(charge.tenant,)] += cost
        for label in {"tokens", _label("tokens", charge.model)}:
            if (bucket := self._buckets.get((charge.tenant, label))) is not None:
                bucket.take(cost - charge.tokens, self.clock())

    def lease(
        self, tenant: str, tokens: int, model: str = ""
    ) -> Coroutine[None, None, None] | None:
        """What to await before `admit`, None if that can be called at once. It leases what the
        request lacks, and raises nothing. Call this again after it."""
        if self.state is None or self._is_alone or not self.charges(tenant):
            return None
        now_s = self.clock()
        short = [
            (bucket, cost)
            for _, bucket, cost in self._charged(tenant, tokens, now_s, model)
            if isinstance(bucket, LeasedBucket) and bucket.needs_lease(cost, now_s)
        ]
        return self._lease(self.state, short) if short else None

    async def _lease(self, state: SharedState, short: list[tuple[LeasedBucket, int]]) -> None:
        try:
            for bucket, cost in short:
                await bucket.lease(cost, state, self.clock)
        except StoreFailed:
            self._part()

    async def sync(self) -> None:
        """Puts back what was leased and not used, and notes which balancers there are. Call it
        every second."""
        if self.state is None or self.key_file is None:
            return
        leased = [b for b in self._buckets.values() if isinstance(b, LeasedBucket)]
        try:
            self._balancers = max(await self.state.count_present(self._id), 1)
            if self._is_alone:
                for bucket in leased:
                    await bucket.rejoin(self.state, self.clock())
                self._is_alone = False
                log.warning("the tenants' limits are shared with other balancers again")
            await asyncio.gather(*(b.settle(self.state, self.clock()) for b in leased))
        except StoreFailed:
            self._part()

    def _part(self) -> None:
        """From now on this process enforces its share, until the store works again."""
        if not self._is_alone:
            log.error(
                "the store of the tenants' limits fails: this process enforces 1/%d of each",
                self._balancers,
            )
            self.metrics.limit_outages.inc()
        self._is_alone = True
        for bucket in self._buckets.values():
            if isinstance(bucket, LeasedBucket):
                bucket.part(self._balancers, self.clock())

    def _charged(
        self, tenant: str, tokens: int, now_s: float, model: str
    ) -> Iterator[tuple[_Limit, Bucket | LeasedBucket, int]]:
        """The limits that a request is charged for, each with its bucket and cost."""
        assert self.key_file is not None, "the tenant is one of the key file's"
        allowance = self.key_file.keys.allowance(tenant)
        limits = _limits(allowance)
        if model in allowance.models:
            limits += _limits(allowance, model)
        for limit in limits:
            if cost := 1 if limit.kind == "requests" else tokens:
                yield limit, self._bucket(tenant, limit, now_s), cost

    def _bucket(self, tenant: str, limit: _Limit, now_s: float) -> Bucket | LeasedBucket:
        name = tenant, limit.label
        bucket, per_minute = self._buckets.get(name), limit.per_minute
        share = per_minute if self.state is not None else per_minute / self.processes
        if bucket is None:
            if self.state is None:
                bucket = Bucket(share, now_s)
            else:
                of = f"/{limit.model}" if limit.model else ""
                bucket = LeasedBucket(f"{limit.kind}{of} {tenant}", per_minute, now_s)
                if self._is_alone:
                    bucket.part(self._balancers, now_s)
            self._buckets[name] = bucket
        bucket.resize(share, now_s)
        return bucket


def _limits(allowance: Allowance, model: str = "") -> list[_Limit]:
    """A tenant's limits of all requests, or of those that a model answers."""
    of = allowance.models[model] if model else allowance
    found = ("requests", of.requests_per_minute), ("tokens", of.tokens_per_minute)
    return [_Limit(kind, limit, model) for kind, limit in found if limit is not None]
