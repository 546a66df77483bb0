"""A request as routing sees it, and one attempt to serve it on a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from radix.in_flight_prefixes import InFlightPrefix
from scheduler.placement import Placement
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.requests.segments import Chain


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What routing needs to know of a request.

    prefix: breaks ties; equal for requests that share a beginning.
    runs: whether the engine's scheduler runs it, so that it needs capacity there.
    warms: whether it is prefilled ahead, when the engine is idle: it is no load, and no request
        waits for its prefix.
    """

    chain: Chain
    session: int | None
    prefix: int
    prompt_tokens: int
    is_final: bool = False
    priority: int = 0
    output_tokens: int = 0
    tenant: str = ""
    runs: bool = True
    warms: bool = False


NO_ROUTING = RoutingRequest(Chain(), None, 0, 0, runs=False)


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt to serve a request on one worker.

    predicted_tokens: prompt tokens that the worker held when the attempt began.
    expected_tokens: the same, with those that it was about to hold.
    uncached_tokens: prompt tokens that the worker still has to compute for it.
    running_tokens: what the attempt counts with in the worker's `running`.
    follows: the attempt that computes a prefix this one waits for; `followers` wait for this one.
    abandon: called with a reason when the worker will not answer.
    """

    routing: RoutingRequest
    worker: Worker
    placement: Placement
    predicted_tokens: int = 0
    expected_tokens: int = 0
    uncached_tokens: int = 0
    running_tokens: int = 0
    decoding: bool = False
    in_flight_prefix: InFlightPrefix | None = None
    follows: Attempt | None = None
    followers: list[Callable[[], None]] = field(default_factory=list)
    abandon: Callable[[str], None] = lambda reason: None
