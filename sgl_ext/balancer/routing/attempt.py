"""A request on its way to a worker: what placing it needs to know, and each try of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radix.in_flight_prefixes import InFlightPrefix
from scheduler.placement import Placement
from sgl_ext.balancer.routing.workers import Worker
from sgl_ext.requests.segments import Chain


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A request as far as placing it is concerned.

    runs: whether it needs room: a scheduler has to run it.
    warms: whether it is computed when nothing else is: it is no load, and nobody waits for it.
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


class Attempt:
    """One try of one request on one worker. `give_up` ends it for a reason of the worker's.

    Of its prompt the worker held `predicted_tokens`, and was about to hold `expected_tokens`.
    Until it ends it counts there with `running_tokens`.
    """

    __slots__ = (
        "decoding",
        "expected_tokens",
        "followers",
        "follows",
        "in_flight_prefix",
        "placed_s",
        "placement",
        "predicted_tokens",
        "routing",
        "running_tokens",
        "uncached_tokens",
        "worker",
        "worker_failed",
    )

    def __init__(
        self, routing: RoutingRequest, worker: Worker, placement: Placement, placed_s: float
    ) -> None:
        self.routing = routing
        self.worker = worker
        self.placement = placement
        self.placed_s = placed_s
        self.predicted_tokens = 0
        self.expected_tokens = 0
        self.uncached_tokens = 0
        self.running_tokens = 0
        self.decoding = False
        self.in_flight_prefix: InFlightPrefix | None = None
        self.follows: Attempt | None = None
        self.followers: list[Callable[[], None]] = []
        self.worker_failed: Callable[[str], None] = lambda reason: None
