"""Rate limits: how many requests and tokens a tenant may use in a minute.

On arrival a request is charged with the estimated tokens of its prompt and the output that it
claims. When its answer is complete, the charge is replaced by the real cost: the prompt tokens that
were computed and the output tokens. If the answer reports no usage or is cut, it is replaced by the
prompt and what was streamed so far. Requests that compute nothing are charged as requests without
tokens.

Each of several balancer processes enforces an equal share of every limit, because the kernel
spreads the connections over them.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple

from scheduler.token_bucket import Bucket
from sgl_ext.balancer.access.authentication import KeyFileReloader
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.protocols.errors import BalancerError


class Charge(NamedTuple):
    """The tokens that a request was charged with on arrival."""

    tenant: str
    tokens: int


@dataclass(eq=False)
class RateLimits:
    """The limits of a key file, shared by `processes`. Without a key file there are none."""

    key_file: KeyFileReloader | None
    metrics: Metrics
    processes: int = 1
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._buckets: dict[tuple[str, str], Bucket] = {}
        if self.key_file is None:
            return
        self._requests = self.metrics.counter(
            "tenant_requests{tenant}", "Requests admitted within the tenant's rate limits."
        )
        self._limited = self.metrics.counter(
            "tenant_rate_limited{tenant,limit}",
            "Requests rejected because the tenant was over a rate limit.",
        )
        self._tokens = self.metrics.counter(
            "tenant_tokens{tenant}",
            "Tokens charged to the tenant: prompt tokens that were computed, and output tokens.",
        )

    def charges(self, tenant: str) -> bool:
        """Whether the key file has the tenant, so that its requests are charged."""
        return self.key_file is not None and tenant in self.key_file.keys.tenants

    def admit(self, tenant: str, tokens: int) -> Charge | None:
        """Charges a request with its prompt tokens; None if the key file does not have the tenant.

        Raises BalancerError 429 if the tenant is over a limit.
        """
        if self.key_file is None or not self.charges(tenant):
            return None
        allowance, now_s = self.key_file.keys.allowance(tenant), self.clock()
        buckets = []
        for kind, limit, cost in (
            ("requests", allowance.requests_per_minute, 1),
            ("tokens", allowance.tokens_per_minute, tokens),
        ):
            if limit is None or not cost:
                continue
            bucket = self._bucket(tenant, kind, limit, now_s)
            wait_s = bucket.wait_s(cost, now_s)
            if wait_s > 0:
                self._limited.counts[tenant, kind] += 1
                message = f"This tenant's limit of {limit:g} {kind} per minute is reached."
                retry_after_s = max(math.ceil(wait_s), 1)
                raise BalancerError(HTTPStatus.TOO_MANY_REQUESTS, message, retry_after_s)
            buckets.append((bucket, cost))
        for bucket, cost in buckets:
            bucket.take(cost, now_s)
        self._requests.counts[(tenant,)] += 1
        return Charge(tenant, tokens)

    def settle(self, charge: Charge | None, tokens: int | None) -> None:
        """Replaces a charge by the tokens that the request cost; None if its cost is unknown."""
        if charge is None:
            return
        cost = charge.tokens if tokens is None else tokens
        self._tokens.counts[(charge.tenant,)] += cost
        bucket = self._buckets.get((charge.tenant, "tokens"))
        if bucket is not None:
            bucket.take(cost - charge.tokens, self.clock())

    def _bucket(self, tenant: str, kind: str, limit: float, now_s: float) -> Bucket:
        share = limit / self.processes
        bucket = self._buckets.get((tenant, kind))
        if bucket is None:
            bucket = self._buckets[tenant, kind] = Bucket(share, now_s)
        bucket.resize(share, now_s)
        return bucket
