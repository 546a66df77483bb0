"""The admission queue: requests wait here while no worker has capacity for them.

Capacity is what engines report (`scheduler.capacity`), within `--max-in-flight` in any case. The
order is the engines' own (`scheduler.order`): priority and age, tenants in turn, the cheapest
first. If too many requests wait, the last of that order is rejected.

The first request in order may still find no worker: the worker of its session has no capacity
while another one has, or its prompt is too long for the free memory. Then later requests may pass
it for HOME_WAIT_S from its first turn. After that it goes to any worker with capacity, and while
there is none, only more important requests of its tenant pass it, and those of other tenants. A
request larger than its tenant's part of an engine's memory might then never fit. So it may hold up
all tenants' requests that are not more important, for RESERVE_S, once in RESERVE_EVERY_S for each
tenant. Waiting a little for the data rather than moving it is delay scheduling (Zaharia et al.,
2010): where every engine is full, a request ends somewhere all the time, and a request that took
the first free slot would leave its cache behind. Two seconds are the time to compute
40,000 tokens again at 20,000 tokens/s.

Before that, with `hold_s`, a request is held back while the agents of its worker need all of the
worker's memory (`agent_gate`). Requests that are held back are no part of the queue, and hold up
nothing. They are sent on in the same order.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Protocol

from scheduler.order import Entry, OrderedQueue, Served, Waiting, step, window_of
from scheduler.working_set import LIMIT as MOST_AGENTS
from sgl_ext.balancer.metrics.registry import BANDS, Metrics, band
from sgl_ext.balancer.routing.agent_gate import AgentGate
from sgl_ext.balancer.routing.attempts import Attempt, RoutingRequest
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.protocols.errors import BalancerError, no_engine

HOME_WAIT_S = 2.0
RESERVE_S = 10.0
RESERVE_EVERY_S = 60.0
_RETRY_AFTER_S = 5
_ALL = "\n"  # in place of a tenant, whose name is printable: every tenant
_NONE = float("-inf")
# How many entries are tried each time that there may be capacity.
_MOST_TRIED = 32
# How many of them may be passed over after their prompts were looked up, which takes time.
_MOST_PASSED_OVER = 8
# How many held requests are looked at. Few of them are compared: one for each tenant and worker.
_MOST_HELD_TRIED = 256
# The queue may exceed its limit by one in so many before the excess is rejected: finding the last
# entries takes a full sort.
_OVERFLOW = 64


class QueuedRequest(Protocol):
    """A request to be placed. `placed` or `rejected` is called once, at once or later."""

    routing: RoutingRequest
    tried: set[Worker]

    def placed(self, attempt: Attempt) -> None: ...
    def rejected(self, error: BalancerError) -> None: ...


@dataclass(eq=False)
class AdmissionQueue:
    """Holds about `limit` requests at most, and none for longer than `timeout_s`.

    hold_s: how long requests are held back so that agents fit into memory, but half of `timeout_s`
        at most; 0: never.
    """

    router: Router
    metrics: Metrics
    limit: int
    timeout_s: float
    aging_s: float = 0.0
    hold_s: float = 0.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._served = Served()
        self._reserved_s: dict[str, float] = {}  # when a tenant began to hold others up
        self._queue: OrderedQueue[QueuedRequest] = OrderedQueue(
            self.aging_s, self._served, self.router.tenants.weights, self._window_of
        )
        self._gate = AgentGate(self.router, min(self.hold_s, self.timeout_s / 2))
        self._held: OrderedQueue[QueuedRequest] = OrderedQueue(
            self.aging_s, self._served, self.router.tenants.weights
        )
        self.metrics.queued_requests.set_function(self.__len__)
        self.metrics.held_requests.set_function(self._held.__len__)
        for label in BANDS:
            waiting = self.metrics.queued_by_priority.labels(label)
            waiting.set_function(partial(self._waiting_in, label))
        add_table = self.metrics.tables.add
        add_table("admission_queue", self.__len__, lambda: self.limit)
        add_table("agents", self._gate.__len__, lambda: MOST_AGENTS)
        add_table("served_tenants", self._served.__len__, lambda: self._served.limit)
        self.router.on_capacity.append(self.admit)

    def change(self, limit: int, timeout_s: float, aging_s: float, hold_s: float = 0.0) -> None:
        """Changes the settings, also for requests that wait: the next sweep rejects the excess."""
        self.limit, self.timeout_s = limit, timeout_s
        self.aging_s = self._queue.aging_s = self._held.aging_s = aging_s
        self._gate.change(min(hold_s, timeout_s / 2))

    def __len__(self) -> int:
        return len(self._queue) + len(self._held)

    @property
    def window_s(self) -> float:
        """How long a window was when the queue was last put in order."""
        return self._queue.window_s

    def _window_of(self, waiting_tokens: int) -> float:
        """How long a window is while so much waits, and what is held back: so long that a request
        in turn for its age is placed in time."""
        held = (entry.item for entry in self._held)
        waiting_tokens += sum(request.routing.prompt_tokens for request in held if request)
        window_s = window_of(self.router.compute_s(waiting_tokens), self.aging_s)
        return min(window_s, self.timeout_s / 2)

    def place(self, request: QueuedRequest) -> bool:
        """Places or rejects a request now, or queues it. False if it is queued."""
        now_s = self.clock()
        return not self._hold(request, now_s) and self._place(request, now_s, now_s)

    def _hold(self, request: QueuedRequest, now_s: float) -> bool:
        """Holds a request back if its agent does not fit. A retry is not held back, nor any while
        too many wait."""
        routing = request.routing
        if not self._gate.hold_s or request.tried or len(self) >= self.limit:
            return False
        if not self._gate.holds(routing, 0.0, now_s):
            return False
        self._gate.held_back(routing)
        self._held.add(request, self._waiting(routing, now_s))
        return True

    def _waiting(self, routing: RoutingRequest, arrived_s: float) -> Waiting:
        cost_tokens = self.router.uncached_tokens(routing) + routing.output_tokens
        return Waiting(routing.priority, arrived_s, cost_tokens, routing.tenant)

    def _place(self, request: QueuedRequest, arrived_s: float, now_s: float) -> bool:
        routing = request.routing
        if not (self._queue and routing.runs):
            attempt = self.router.place(routing, request.tried, waits_for_home=True)
        elif routing.priority >= self._queue.highest_priority:
            attempt = self._pass_queue(request, now_s)
        else:
            attempt = None
        if attempt is not None:
            request.placed(attempt)
            return True
        if not self.router.may_wait(routing.only):
            request.rejected(no_engine())
            return True
        self._queue.add(request, self._waiting(routing, arrived_s))
        if self.router.has_capacity_for(routing, request.tried):
            self._admit_queued()
        if len(self._queue) > self.limit + self.limit // _OVERFLOW:
            self._reject_excess(now_s)
        return request not in self._queue

    def _pass_queue(self, request: QueuedRequest, now_s: float) -> Attempt | None:
        """Begins the attempt of a request whose prompt is at hand, if it is. Others wait, so it
        counts for its tenant."""
        routing = request.routing
        attempt = self.router.place_at_hand(routing, request.tried)
        if attempt is not None:
            cost_tokens = attempt.uncached_tokens + routing.output_tokens
            self._served.add(routing.tenant, cost_tokens, now_s)
        return attempt

    def by_priority(self) -> dict[int, int]:
        """How many requests of each priority wait."""
        return Counter(entry.waiting.priority for entry in (*self._queue, *self._held))

    def _waiting_in(self, label: str) -> int:
        """How many requests of a band of priorities wait."""
        return sum(count for each, count in self.by_priority().items() if band(each) == label)

    def remove(self, request: QueuedRequest) -> None:
        """Removes a request; does nothing if it is not queued."""
        self._queue.remove(request)
        self._held.remove(request)

    def admit(self) -> None:
        """Places the queued requests for which there is capacity."""
        if self._held:
            self._release()
        self._admit_queued()

    def _admit_queued(self) -> None:
        while self._queue and self._admit_first():
            pass

    def _release(self) -> None:
        """Sends on the held requests whose agents fit now, in order. None passes another one of its
        tenant that waits for the same worker."""
        now_s = self.clock()
        full: set[tuple[str, int | None]] = set()
        looked_at: set[str] = set()
        while head := self._held.head(_MOST_HELD_TRIED, now_s, looked_at):
            for entry in head:
                if (request := entry.item) is None:  # removed while others were sent
                    continue
                routing, waited_s = request.routing, now_s - entry.waiting.arrived_s
                key = routing.tenant, self._gate.home(routing)
                if key in full:
                    continue
                if self._gate.holds(routing, waited_s, now_s):
                    full.add(key)
                else:
                    self._send_on(entry, request, now_s)
            looked_at |= {entry.waiting.tenant for entry in head}

    def _send_on(self, entry: Entry[QueuedRequest], request: QueuedRequest, now_s: float) -> None:
        self._held.remove(request)
        waited_s = now_s - entry.waiting.arrived_s
        self.metrics.held_s.observe(band(entry.waiting.priority), waited_s)
        self._place(request, entry.waiting.arrived_s, now_s)

    def sweep(self) -> None:
        """Rejects requests that have waited too long, and all if no worker is left nor expected.
        Call it periodically."""
        self.admit()
        now_s = self.clock()
        for entry in self._held:
            if (held := entry.item) is None:
                continue
            if now_s - entry.waiting.arrived_s >= self._gate.hold_s:
                self._send_on(entry, held, now_s)
        for tenant, began_s in tuple(self._reserved_s.items()):
            if now_s - began_s >= RESERVE_EVERY_S:
                del self._reserved_s[tenant]
        if len(self._queue) > self.limit:
            self._reject_excess(now_s)
        if not self._queue:
            self._queue.sort(now_s)  # its window does not outlast it
        is_futile = bool(self._queue) and not self.router.may_wait()
        for entry in self._queue:
            request = entry.item
            if request is None:
                continue
            only = request.routing.only
            if is_futile or (only is not None and not self.router.may_wait(only)):
                self._queue.remove(request)
                request.rejected(no_engine())
            elif entry.waiting.arrived_s + self.timeout_s <= now_s:
                self._reject(request, f"None had capacity for {self.timeout_s:g} s.")

    def _admit_first(self) -> bool:
        """Places requests from the head of the queue; whether any was placed. If none was, it
        tries those behind the tenants for which no worker has capacity."""
        full: dict[str, float] = {}
        tried = -1
        while len(full) > tried and _ALL not in full and self._queue.tenants - full.keys():
            tried = len(full)
            if self._admit_head(full):
                return True
        return False

    def _admit_head(self, full: dict[str, float]) -> bool:
        """Places requests from the head of the queue; whether any was placed.

        full: for each tenant the highest priority for which no worker has capacity, which is added
            to; its requests are skipped.
        """
        now_s = self.clock()
        any_placed, passed_over = False, 0
        for entry in self._queue.head(_MOST_TRIED, now_s, frozenset(full)):
            request = entry.item
            if request is None:  # removed while others were placed
                continue
            routing = request.routing
            takes_any_worker = routing.runs and not request.tried and routing.only is None
            tenant, priority = routing.tenant, routing.priority
            if takes_any_worker and any(priority <= full.get(key, _NONE) for key in (tenant, _ALL)):
                continue
            if not self.router.has_capacity_for(routing, request.tried):
                if takes_any_worker:
                    full[tenant] = max(full.get(tenant, _NONE), priority)
                continue
            if entry.passed_over_s is None:
                entry.passed_over_s = now_s
            elif now_s - entry.passed_over_s < HOME_WAIT_S and not self.router.has_capacity_for(
                routing, request.tried, at_home=True
            ):
                continue
            may_be_passed = now_s - entry.passed_over_s < HOME_WAIT_S
            attempt = self.router.place(routing, request.tried, waits_for_home=may_be_passed)
            if attempt is not None:
                self._placed(entry, request, attempt, now_s)
                any_placed = True
            elif takes_any_worker and not may_be_passed:
                key = _ALL if self._reserves(request, now_s) else tenant
                full[key] = max(full.get(key, _NONE), priority)
            elif (passed_over := passed_over + 1) == _MOST_PASSED_OVER:
                full[tenant] = max(full.get(tenant, _NONE), priority)
                break
        return any_placed

    def _reserves(self, request: QueuedRequest, now_s: float) -> bool:
        """Whether a request that does not fit may hold up those of other tenants: it might never
        fit beside them. A smaller one only waits for what its own tenant has in flight."""
        if not self.router.exceeds_part(request.routing, request.tried):
            return False
        tenant = request.routing.tenant
        began_s = self._reserved_s.setdefault(tenant, now_s)
        if now_s - began_s >= RESERVE_EVERY_S:
            began_s = self._reserved_s[tenant] = now_s
        return now_s - began_s < RESERVE_S

    def _placed(
        self, entry: Entry[QueuedRequest], request: QueuedRequest, attempt: Attempt, now_s: float
    ) -> None:
        self._queue.remove(request)
        routing, waited_s = request.routing, now_s - entry.waiting.arrived_s
        self._served.add(routing.tenant, entry.waiting.cost_tokens, now_s)
        self.metrics.priority_queue_s.observe(band(routing.priority), waited_s)
        if step(routing.priority, waited_s, self.aging_s) > routing.priority:
            self.metrics.promotions.inc()
        request.placed(attempt)

    def _reject_excess(self, now_s: float) -> None:
        for entry in self._queue.sort(now_s)[self.limit :]:
            if (request := entry.item) is not None:
                self._reject(request, f"{self.limit} requests wait already.")

    def _reject(self, request: QueuedRequest, why: str) -> None:
        self._queue.remove(request)
        self.metrics.requests_rejected.inc()
        state = "busy" if self.router.any_available() else "restarting"
        message = f"All engines are {state}. {why}"
        request.rejected(BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message, _RETRY_AFTER_S))
