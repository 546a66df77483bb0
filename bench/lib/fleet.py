"""A balancer's router over a fleet of any size, without processes: to time its decisions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.prefixes import Prefixes
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.routing_request import RoutingRequest
from sgl_ext.balancer.routing.workers import Workers
from sgl_ext.membership.sources import STATIC, StaticList
from sgl_ext.reading.segments import Chain

_BYTES_PER_TOKEN = 4


def router_of(
    workers: int,
    *,
    limit_segments: int = 1_000_000,
    clock: Callable[[], float] = time.monotonic,
) -> Router:
    """A router whose workers are ready and publish what they hold; worker n has slot n."""
    metrics = Metrics()
    fleet = Workers(metrics, clock)
    fleet.apply(STATIC, StaticList(f"http://worker-{n}" for n in range(workers)).members)
    for worker in fleet.all:
        fleet.mark(worker, ready=True)
        worker.publishes = True
    prefixes = Prefixes(limit_segments=limit_segments)
    return Router(fleet, metrics, clock=clock, prefixes=prefixes)


def routing_of(chain: Sequence[int], head_segments: int, segment_tokens: int) -> RoutingRequest:
    """A turn of a conversation that begins after the head, without a session header."""
    ends = range(
        segment_tokens * _BYTES_PER_TOKEN,
        (len(chain) + 1) * segment_tokens * _BYTES_PER_TOKEN,
        segment_tokens * _BYTES_PER_TOKEN,
    )
    read = Chain(tuple(chain), tuple(ends), session=chain[head_segments])
    return RoutingRequest(read, None, chain[head_segments - 1], len(chain) * segment_tokens)
