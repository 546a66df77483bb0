"""Where requests wait before they are placed: for a trial, for memory, and for a worker's capacity.

    Trials --> [wait for a trial] --> AgentGate --> [wait for memory] --> AdmissionQueue
                                                 placed <-- [wait for capacity] <--+

In the admission queue requests wait while no worker has capacity for them. Capacity is what engines
report (`scheduler.capacity`), within `--max-in-flight` in any case. The
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
worker's memory (`AgentGate`). Requests that are held back are no part of the queue, and hold up
nothing. They are sent on in the same order. `scheduler.agent_admission` decides for each worker
that a request may go to: the one that has its conversation, or all. What agents use is counted as
attempts begin and end (`scheduler.working_set`). A worker that reports no memory holds
nothing back. In a large fleet a new agent looks at some workers at a time, in turn.

Requests that may have ended an engine wait before both, until each is sent again alone. There
`scheduler.suspects` decides, and only while some request is suspected.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Protocol

import xxhash

from scheduler import suspects
from scheduler.agent_admission import Demand, Pool, agents_that_fit, has_time, is_sent
from scheduler.order import Entry, OrderedQueue, Served, Waiting, due_at, step, window_of
from scheduler.suspects import AGAIN, LIMIT, REFUSED, REFUSED_S, Suspects
from scheduler.working_set import LIMIT as MOST_AGENTS
from scheduler.working_set import WorkingSet
from sgl_ext.balancer.metrics.registry import BANDS, Metrics, band
from sgl_ext.balancer.routing.prefixes import HeldBySlot
from sgl_ext.balancer.routing.router import Router, allowed
from sgl_ext.balancer.routing.routing_request import RoutingRequest
from sgl_ext.balancer.routing.worker import DECODE, PREFILL, Attempt, ServedRequest, Worker
from sgl_ext.protocols.errors import BalancerError, no_engine

log = logging.getLogger(__name__)


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


class QueuedRequest(ServedRequest, Protocol):
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
        add_part = self.metrics.add_part
        add_part(self.metrics.queued_requests, self.__len__)
        add_part(self.metrics.held_requests, self._held.__len__)
        for label in BANDS:
            waiting = self.metrics.queued_by_priority.labels(label)
            add_part(waiting, partial(self._waiting_in, label))
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

    def agents(self) -> dict[str, int]:
        """How many agents count with memory (`there`), and how many more like them fit (`fit`)."""
        return {"there": self._gate.there(), "fit": self._gate.fit()}

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
        return self._place(request, now_s, now_s, may_hold=True)

    def _hold(self, request: QueuedRequest, now_s: float) -> bool:
        """Holds a request back if its agent does not fit. A retry is not held back, nor any while
        too many wait."""
        routing = request.routing
        if not self._gate.hold_s or request.tried or not self._gate.holds(routing, 0.0, now_s):
            return False
        if len(self) >= self.limit:
            return False
        self._gate.held_back(routing)
        self._held.add(request, self._waiting(routing, now_s))
        return True

    def _waiting(self, routing: RoutingRequest, arrived_s: float) -> Waiting:
        cost_tokens = self.router.uncached_tokens(routing) + routing.output_tokens
        due_s = due_at(arrived_s, routing.due_s)
        return Waiting(routing.priority, arrived_s, cost_tokens, routing.tenant, due_s)

    def _place(
        self, request: QueuedRequest, arrived_s: float, now_s: float, *, may_hold: bool = False
    ) -> bool:
        if may_hold and self._hold(request, now_s):
            return False
        routing = request.routing
        if not (self._queue.entries and routing.runs):
            attempt = self.router.place(routing, request.tried, request, waits_for_home=True)
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
        attempt = self.router.place_at_hand(routing, request.tried, request)
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
        if self._held.entries:
            self._release()
        self._admit_queued()

    def _admit_queued(self) -> None:
        while self._queue.entries and self._admit_first():
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
            attempt = self.router.place(
                routing, request.tried, request, waits_for_home=may_be_passed
            )
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


MOST_COMPARED = 32


class AgentGate:
    """hold_s: how long a request is held back at most; 0: never."""

    def __init__(self, router: Router, hold_s: float) -> None:
        self._router = router
        self._next = 0
        self.change(hold_s)

    def __len__(self) -> int:
        """How many agents it knows."""
        return len(self._router.attempts.working_set or ())

    def there(self) -> int:
        """How many agents count with memory."""
        working_set = self._router.attempts.working_set
        return 0 if working_set is None else working_set.counted()

    def fit(self) -> int:
        """How many more agents like those have room in the engines that are ready."""
        working_set, there = self._router.attempts.working_set, self.there()
        free, used_tokens = [], 0
        for worker in self._router.workers.all:
            if worker.ready and worker.role != DECODE:
                used = 0 if working_set is None else working_set.used(worker.slot, 0).total()
                free.append(worker.pool_tokens - used)
                used_tokens += used
        return agents_that_fit(free, used_tokens, there)

    def change(self, hold_s: float) -> None:
        """Changes how long a request is held back. What agents use is counted while it is not 0."""
        self.hold_s = hold_s
        attempts = self._router.attempts
        if not hold_s:
            attempts.working_set = None
        elif attempts.working_set is None:
            attempts.working_set = WorkingSet()

    def holds(self, routing: RoutingRequest, waited_s: float, now_s: float) -> bool:
        """Whether a request is held back."""
        working_set = self._router.attempts.working_set
        if working_set is None or routing.agent is None or not routing.runs:
            return False
        held: HeldBySlot | None = None
        workers = self._workers(routing)
        for worker in workers:
            if worker.pool_tokens <= 0 or self._has_time(worker, now_s):
                return False
            if held is None:
                working_set.expire(now_s)
                held = self._router.prefixes.lookup(routing.chain)
            pool = self._pool(routing, worker, working_set)
            demand = self._demand(routing, worker, held, working_set)
            if is_sent(demand, pool, waited_s, self.hold_s, self._router.tenants.weights):
                return False
        return bool(workers)

    def held_back(self, routing: RoutingRequest) -> None:
        """A request is held back from now on."""
        working_set = self._router.attempts.working_set
        if working_set is not None and routing.agent is not None:
            working_set.waits(routing.agent)

    def home(self, routing: RoutingRequest) -> int | None:
        """The slot of the worker that has a request's session."""
        sessions = self._router.attempts.sessions
        home = None if routing.session is None else sessions.home(routing.session)
        return None if home is None else home[0]

    def _workers(self, routing: RoutingRequest) -> list[Worker]:
        """Where a request may go: where its session is, or else anywhere."""
        workers, home = self._router.workers, self.home(routing)
        worker = None if home is None else workers.at_slot(home)
        if worker is not None and worker.is_available:
            is_able = routing.only is None or worker.url in routing.only
            return [worker] if is_able and worker.role != DECODE else []
        found = allowed(workers.all, routing.only)
        found = [w for w in found if w.is_available and w.role != DECODE]
        if len(found) <= MOST_COMPARED:
            return found
        begin = self._next = (self._next + MOST_COMPARED) % len(found)
        return [*islice((*found[begin:], *found[:begin]), MOST_COMPARED)]

    @staticmethod
    def _has_time(worker: Worker, now_s: float) -> bool:
        in_flight = worker.in_flight + worker.peer_load.in_flight
        pending_tokens = worker.total_pending_tokens(now_s)
        return has_time(in_flight, pending_tokens, worker.pace.share(now_s))

    def _pool(self, routing: RoutingRequest, worker: Worker, working_set: WorkingSet) -> Pool:
        slot, agent = worker.slot, routing.agent or 0
        return Pool(
            worker.pool_tokens,
            working_set.used(slot, agent),
            working_set.less_important(slot, routing.tenant, routing.priority, agent),
            working_set.awaited(slot, agent),
        )

    def _demand(
        self,
        routing: RoutingRequest,
        worker: Worker,
        by_slot: HeldBySlot,
        working_set: WorkingSet,
    ) -> Demand:
        held, prefixes = by_slot.of(worker), self._router.prefixes
        tokens = prefixes.prompt_tokens(routing.chain, held, routing.prompt_tokens)
        held_tokens = held.expected_tokens + held.slower_tokens
        own_tokens = working_set.own_tokens(routing.agent or 0, tokens, held_tokens)
        return Demand(routing.tenant, tokens, held_tokens, own_tokens)


_TRIAL_RETRY_AFTER_S = 5


class Suspect(Protocol):
    """A request that may wait here.

    fingerprint: of its tenant and its prompt; "" if it has none. waits_since_s: since when it
    waits; None if it has not waited.
    """

    routing: RoutingRequest
    waits_since_s: float | None

    @property
    def fingerprint(self) -> str: ...
    def release(self, *, on_trial: bool) -> None: ...
    def refuse(self, error: BalancerError) -> None: ...
    def rejected(self, error: BalancerError) -> None: ...


def fingerprint_of(tenant: str, routing: RoutingRequest, body: bytes | bytearray) -> str:
    """What a request has in common with one that its client sends again: the tenant, and the text
    of its prompt, or else its body. "" if it has neither."""
    hashes = routing.chain.hashes
    if not hashes and not body:
        return ""
    found = xxhash.xxh3_128(tenant.encode())
    found.update(b"\xffp%x" % hashes[-1] if hashes else b"\xffb")
    if not hashes:
        found.update(body)
    return found.hexdigest()


def refused() -> BalancerError:
    """A request that ended two engines. A client that repeats it would end others."""
    message = (
        "Two engines ended while they ran this request, so it is not sent to another one. The same "
        f"prompt is refused for {REFUSED_S:g} s."
    )
    return BalancerError(HTTPStatus.BAD_REQUEST, message, code="request_ends_engines")


@dataclass(eq=False)
class Trials:
    """The requests of one balancer process that wait for a trial.

    timeout_s: how long a request may wait.
    _several_s: when there were last several engines, in whatever state.
    """

    router: Router
    timeout_s: Callable[[], float]
    _waiting: dict[Suspect, None] = field(default_factory=dict, init=False)
    _is_sweeping: bool = field(default=False, init=False)
    _several_s: float = field(default=float("-inf"), init=False)

    def __post_init__(self) -> None:
        self._suspects: Suspects = self.router.suspects
        self._suspects.judged = self._judged
        metrics = self.router.metrics
        metrics.tables.add("suspects", self._suspects.__len__, lambda: LIMIT)
        metrics.add_part(metrics.requests_on_trial, self._waiting.__len__)
        self.router.workers.on_leave.insert(0, self._ended)
        self.router.workers.on_found.append(self._lives)
        self.router.on_capacity.append(self._try_waiting)

    def _judged(self, result: str) -> None:
        self.router.metrics.suspect_requests.counts[(result,)] += 1
        if result == "convicted":
            log.error("a request ended two engines; its prompt is refused for %g s", REFUSED_S)

    def admits(self, request: Suspect) -> bool:
        """Whether a request may be placed now. Otherwise it is refused, or waits here."""
        if not self._suspects.cases:
            return True
        now_s = self.router.clock()
        standing = self._suspects.standing(request.fingerprint, now_s)
        if standing is AGAIN:
            return True
        if standing is REFUSED:
            self._refuse(request)
        else:
            self._wait(request, now_s)
        return False

    def refuses(self, request: Suspect) -> bool:
        """Whether a request is not sent again, as it was lost on trial."""
        return self._suspects.is_caught(request.fingerprint, self.router.clock())

    def _wait(self, request: Suspect, now_s: float) -> None:
        if request.waits_since_s is None:
            request.waits_since_s = now_s
        self._waiting[request] = None

    def _refuse(self, request: Suspect) -> None:
        self.router.metrics.suspect_requests.counts["refused",] += 1
        request.refuse(refused())

    def remove(self, request: Suspect) -> None:
        """A request waits no longer, and is not placed; does nothing if it does not wait."""
        self._waiting.pop(request, None)
        if self._suspects.cases:
            self._suspects.gives_up(request.fingerprint)

    # What happens to those that were placed.

    def may_send(self, request: Suspect, attempt: Attempt) -> bool:
        """Whether a request whose trial has begun may still be sent. Otherwise it waits again: an
        engine may have ended while it was in the admission queue."""
        now_s, since_s = self.router.clock(), request.waits_since_s
        waited_s = 0.0 if since_s is None else now_s - since_s
        self._suspects.gives_up(request.fingerprint)
        if self._may_begin(request, waited_s):
            self._suspects.begin(request.fingerprint)
            return True
        self._wait(request, now_s)
        return False

    def sent(self, request: Suspect, attempt: Attempt) -> None:
        """A request on trial was sent."""
        request.waits_since_s = None
        self._suspects.sent(request.fingerprint, attempt.answerer.id, self.router.clock())

    def lost(self, request: Suspect, worker: Worker, sent_s: float) -> None:
        """A request was lost at a worker that ended, or that hangs."""
        name, now_s = request.fingerprint, self.router.clock()
        if name and not _is_stopped(worker):
            self._suspects.lost(name, worker.id, sent_s, worker.stopped_s(now_s), now_s)

    def left(self, request: Suspect, worker: Worker, sent_s: float) -> None:
        """The client of a request left before the answer was complete."""
        if name := request.fingerprint:
            self._suspects.left(name, worker.id, sent_s)

    def answered(self, request: Suspect) -> None:
        """A request was answered in full."""
        if self._suspects.cases:
            self._suspects.answered(request.fingerprint)
            self._try_waiting()

    def _ended(self, worker: Worker) -> None:
        if not _is_stopped(worker):
            now_s = self.router.clock()
            self._suspects.ended(worker.id, worker.stopped_s(now_s), now_s)

    def _lives(self, worker: Worker, probed_s: float) -> None:
        if self._suspects.cases:
            self._suspects.lives(worker.id, probed_s)
            self._try_waiting()

    # Those that wait.

    def sweep(self) -> None:
        """Clears the suspect whose trial has lasted for long enough, and lets the next one begin.
        Call it periodically."""
        now_s = self.router.clock()
        if _left_of(self.router.workers.all):
            self._several_s = now_s
        self._suspects.pass_time(now_s, self._heard_s)
        self._try_waiting()

    def _heard_s(self, name: str) -> float | None:
        worker = self.router.workers.find(name)
        return worker.last_heard_s if worker is not None and worker.sends_events else None

    def _try_waiting(self) -> None:
        if self._is_sweeping or not self._waiting:
            return
        self._is_sweeping = True
        try:
            now_s = self.router.clock()
            for request in tuple(self._waiting):
                if request in self._waiting:
                    self._try(request, now_s)
        finally:
            self._is_sweeping = False

    def _try(self, request: Suspect, now_s: float) -> None:
        standing = self._suspects.standing(request.fingerprint, now_s)
        since_s = request.waits_since_s
        waited_s = 0.0 if since_s is None else now_s - since_s
        if standing is REFUSED:
            del self._waiting[request]
            self._refuse(request)
        elif standing is AGAIN:
            del self._waiting[request]
            request.waits_since_s = None
            request.release(on_trial=False)
        elif not self.router.may_wait(request.routing.only):
            del self._waiting[request]
            request.rejected(no_engine())
        elif waited_s >= self.timeout_s():
            del self._waiting[request]
            message = "An engine ended while it ran this request, and no other one could try it."
            error = BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message, _TRIAL_RETRY_AFTER_S)
            request.rejected(error)
        elif self._may_begin(request, waited_s):
            del self._waiting[request]
            self._suspects.begin(request.fingerprint)
            request.release(on_trial=True)

    def _may_begin(self, request: Suspect, waited_s: float) -> bool:
        others = self._others(request.routing)
        return self._suspects.may_begin(request.fingerprint, waited_s, others)

    def _others(self, routing: RoutingRequest) -> int:
        """How many engines would be left to answer requests if one ended, whichever that is. 1 if
        there have been no others for long: to wait for them would be in vain."""
        now_s, workers = self.router.clock(), self.router.workers.all
        if now_s - self._several_s >= suspects.LAST_WAIT_S:
            return 1
        able = [w for w in allowed(workers, routing.only) if w.is_available]
        return _left_of(w for w in able if not self._suspects.has_ended(w.id, now_s))


def _left_of(workers: Iterable[Worker]) -> int:
    """How many of these engines, or of their pairs, are left if one ends, with all its ranks."""
    roles = Counter({worker.url: worker.role for worker in workers}.values())
    return max(roles[""] + min(roles[PREFILL], roles[DECODE]) - 1, 0)


def _is_stopped(worker: Worker) -> bool:
    """Whether it was stopped from outside: no request does that."""
    return worker.is_hung and worker.hung_s is None
