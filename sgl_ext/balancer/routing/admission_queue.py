"""The door: requests wait before it while no worker has room for them, and pass it in order.

Room is what engines report (`scheduler.capacity`), and `--max-in-flight` in any case. The order is
the engines' own (`scheduler.order`): priority that rises with waiting, tenants in turns, the
cheapest first. If too many wait, the last of that order is turned away.

Whose turn it is can still be without a place: the worker that its session stays on is full
while another has room, or its prompt is too long for what memory is free. Then those behind it
may pass, for HOME_WAIT_S from its first turn. After that it goes to any worker that has room;
and while none has enough, nobody passes who is not more important. To wait a little for the
data rather than move it is delay scheduling (Zaharia et al., 2010): where every engine is full,
some request ends somewhere all the time, and whoever took the first room that comes would leave
its cache behind. Two seconds are what it takes to compute 40,000 tokens again, at 20,000 a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from scheduler.admission_queue import Entry, OrderedQueue
from scheduler.order import Served, Waiting, step
from sgl_ext.balancer.metrics.registry import Metrics, band
from sgl_ext.balancer.routing.attempt import Attempt, RoutingRequest
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.workers import Worker
from sgl_ext.protocols.errors import BalancerError, no_engine

HOME_WAIT_S = 2.0
_RETRY_AFTER_S = 5
# So many are looked at each time that there may be room.
_MOST_TRIED = 32
# And so many of them may give way after their prompts were looked up, which takes time.
_MOST_PASSED = 8
# The line may be longer by one in so many, until all that are too many are turned away at
# once: to find out who is the last, everybody has to be put in order.
_OVERFLOW = 64


class QueuedRequest(Protocol):
    """Whoever wants a request placed: told once, at once or later."""

    routing: RoutingRequest
    tried: set[Worker]

    def placed(self, attempt: Attempt) -> None: ...
    def refused(self, error: BalancerError) -> None: ...


class AdmissionQueue:
    """At most `limit` callers wait, but for a moment, and none longer than `timeout_s`."""

    def __init__(
        self,
        router: Router,
        metrics: Metrics,
        limit: int,
        timeout_s: float,
        aging_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._metrics = metrics
        self._limit = limit
        self._timeout_s = timeout_s
        self._aging_s = aging_s
        self._clock = clock
        self._served = Served()
        self._queue: OrderedQueue[QueuedRequest] = OrderedQueue(
            aging_s, self._served, router.tenants.weights
        )
        metrics.queued_requests.set_function(self._queue.__len__)
        router.on_capacity(self.open)

    @property
    def waiting(self) -> int:
        """How many callers wait."""
        return len(self._queue)

    def place(self, caller: QueuedRequest) -> bool:
        """Places the caller's request now if it is its turn and a worker has room.

        False if the caller has to wait.
        """
        routing = caller.routing
        if not (self._queue and routing.runs):
            attempt = self._router.place(routing, caller.tried, waits_for_home=True)
            if attempt is not None:
                caller.placed(attempt)
                return True
        if not self._router.any_available():
            caller.refused(no_engine())
            return True
        now_s = self._clock()
        self._queue.add(caller, Waiting(routing.priority, now_s, _cost(routing), routing.tenant))
        if self._router.has_capacity_for(routing, caller.tried):
            self.open()
        if len(self._queue) > self._limit + self._limit // _OVERFLOW:
            self._turn_away_too_many(now_s)
        return caller not in self._queue

    def leave(self, caller: QueuedRequest) -> None:
        """The caller does not wait any more; nothing happens if it did not."""
        self._queue.remove(caller)

    def open(self) -> None:
        """There may be room: lets in whom there is room for."""
        while self._queue and self._let_in():
            pass

    def sweep(self) -> None:
        """Refuses those who have waited too long, or all if no worker is left. Run it often."""
        self.open()
        now_s = self._clock()
        if len(self._queue) > self._limit:
            self._turn_away_too_many(now_s)
        nobody = bool(self._queue) and not self._router.any_available()
        for place in self._queue:
            caller = place.item
            if caller is None:
                continue
            if nobody:
                self._queue.remove(caller)
                caller.refused(no_engine())
            elif place.waiting.arrived_s + self._timeout_s <= now_s:
                self._queue.remove(caller)
                self._turn_away(caller, f"None had room for {self._timeout_s:g} s.")

    def _let_in(self) -> bool:
        """Lets in whom there is room for of the first; whether that was anybody."""
        now_s = self._clock()
        anybody, passed = False, 0
        closed_to: float = float("-inf")  # no worker has room for this priority, or a lower one
        for place in self._queue.head(_MOST_TRIED, now_s):
            caller = place.item
            if caller is None:  # left while others were let in
                continue
            routing = caller.routing
            is_usual = routing.runs and not caller.tried  # every worker will do for it
            if is_usual and routing.priority <= closed_to:
                continue
            if not self._router.has_capacity_for(routing, caller.tried):
                closed_to = routing.priority if is_usual else closed_to
                continue
            waits = place.passed_over_s is not None and now_s - place.passed_over_s < HOME_WAIT_S
            if waits and not self._router.has_capacity_for(routing, caller.tried, at_home=True):
                continue
            if place.passed_over_s is None:
                place.passed_over_s = now_s
            gives_way = now_s - place.passed_over_s < HOME_WAIT_S
            attempt = self._router.place(routing, caller.tried, waits_for_home=gives_way)
            if attempt is not None:
                self._pass(place, caller, attempt, now_s)
                anybody = True
            elif is_usual and not gives_way:
                closed_to = routing.priority
            elif (passed := passed + 1) == _MOST_PASSED:
                break
        return anybody

    def _pass(
        self, place: Entry[QueuedRequest], caller: QueuedRequest, attempt: Attempt, now_s: float
    ) -> None:
        self._queue.remove(caller)
        routing, waited_s = caller.routing, now_s - place.waiting.arrived_s
        self._served.add(routing.tenant, _cost(routing), now_s)
        self._metrics.priority_queue_s.observe(band(routing.priority), waited_s)
        if step(routing.priority, waited_s, self._aging_s) > routing.priority:
            self._metrics.promotions.inc()
        caller.placed(attempt)

    def _turn_away_too_many(self, now_s: float) -> None:
        for place in self._queue.sort(now_s)[self._limit :]:
            if (caller := place.item) is not None:
                self._queue.remove(caller)
                self._turn_away(caller, f"{self._limit} requests wait already.")

    def _turn_away(self, caller: QueuedRequest, why: str) -> None:
        self._metrics.requests_rejected.inc()
        message = f"All engines are busy. {why}"
        caller.refused(BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message, _RETRY_AFTER_S))


def _cost(routing: RoutingRequest) -> int:
    return routing.prompt_tokens + routing.output_tokens
