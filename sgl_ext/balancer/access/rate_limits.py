"""How many requests and tokens each tenant has in a minute.

A request is charged at the door with the tokens that its prompt is thought to have, and when
its answer is complete with what it really cost instead: prompt tokens that were computed, and
the answer's. One whose answer does not tell remains charged as it was thought to be.

With several balancer processes each has its part of every limit, as the kernel spreads the
connections over them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple

from scheduler.token_bucket import Bucket
from sgl_ext.balancer.access.keyring import Keyring
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.protocols.errors import BalancerError


class Charge(NamedTuple):
    """What a request was charged with at the door."""

    tenant: str
    tokens: int


class Limits:
    """The limits of a file of keys; without one there are none. `processes`: share them."""

    def __init__(
        self,
        keyring: Keyring | None,
        metrics: Metrics,
        processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keyring = keyring
        self._processes = processes
        self._clock = clock
        self._buckets: dict[tuple[str, str], Bucket] = {}
        if keyring is None:
            return
        self._requests = metrics.counter(
            "tenant_requests", "Requests admitted within the tenant's rate limits.", "tenant"
        )
        self._limited = metrics.counter(
            "tenant_rate_limited",
            "Requests rejected because the tenant was over a rate limit.",
            "tenant",
            "limit",
        )
        self._tokens = metrics.counter(
            "tenant_tokens",
            "Tokens charged to the tenant: prompt tokens that were computed, and output tokens.",
            "tenant",
        )

    def admit(self, tenant: str, tokens: int) -> Charge | None:
        """Charges a request of so many prompt tokens. Raises BalancerError 429 if it is too many.

        None for a tenant that the file does not know.
        """
        if self._keyring is None or tenant not in self._keyring.file.tenants:
            return None
        allowance, now_s = self._keyring.file.allowance(tenant), self._clock()
        routing = [
            ("requests", allowance.requests_per_minute, 1),
            ("tokens", allowance.tokens_per_minute, tokens),
        ]
        buckets = []
        for kind, limit, cost in routing:
            if limit is None or not cost:
                continue
            bucket = self._bucket(tenant, kind, limit, now_s)
            wait_s = bucket.wait_s(cost, now_s)
            if wait_s > 0:
                self._limited.counts[tenant, kind] += 1
                raise _over(kind, limit, wait_s)
            buckets.append((bucket, cost))
        for bucket, cost in buckets:
            bucket.take(cost, now_s)
        self._requests.counts[(tenant,)] += 1
        return Charge(tenant, tokens)

    def settle(self, charge: Charge | None, tokens: int | None) -> None:
        """A request has ended that cost so many tokens; None: that is not known."""
        if charge is None:
            return
        cost = charge.tokens if tokens is None else tokens
        self._tokens.counts[(charge.tenant,)] += cost
        bucket = self._buckets.get((charge.tenant, "tokens"))
        if bucket is not None:
            bucket.take(cost - charge.tokens, self._clock())

    def _bucket(self, tenant: str, kind: str, limit: float, now_s: float) -> Bucket:
        share = limit / self._processes
        bucket = self._buckets.get((tenant, kind))
        if bucket is None:
            bucket = self._buckets[tenant, kind] = Bucket(share, now_s)
        elif bucket.per_minute != share:
            bucket.resize(share, now_s)
        return bucket


def _over(kind: str, limit: float, wait_s: float) -> BalancerError:
    message = f"This tenant has {limit:g} {kind} a minute, and they are used up."
    return BalancerError(HTTPStatus.TOO_MANY_REQUESTS, message, max(math.ceil(wait_s), 1))
