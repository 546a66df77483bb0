"""The balancer's router as a policy of `bench/sim/virtual_time.py`: its placement, its index, its
sessions and its account of load, on the simulation's clock.

There is no admission queue, so each request is placed at once, but in `AdmittingRouter`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from operator import sub
from random import Random

from bench.lib.fleet import router_of
from bench.sim.engine import Engine
from bench.sim.segments import Line, apply_line
from bench.trace.calls import Call
from radix.index import PrefixIndex
from sgl_ext.balancer.routing.admission import AdmissionQueue
from sgl_ext.balancer.routing.routing_request import RoutingRequest
from sgl_ext.balancer.routing.worker import Attempt, Worker
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.reading.client import session_key
from sgl_ext.wire.peers import Load

SESSION_HEADER = "x-session-id"
SHARED_S = 0.1
"""Messages through a store that balancers share take no longer."""


class OurRouter:
    """A router of so many workers. Without `events` they publish nothing, and it knows only what
    it sent to them. learns: how fast they are.

    decisions_us: the processor's time for each decision.
    """

    def __init__(self, workers: int, *, events: bool = True, learns: bool = True) -> None:
        self._now_s = 0.0
        self.router = router_of(workers, clock=lambda: self._now_s)
        self.router.attempts.speeds.learns = learns
        self.decisions_us: list[float] = []
        index = self.router.prefixes.written
        assert index is not None, "this process writes its index"
        self.index: PrefixIndex = index
        self._events = events
        for worker in self.router.workers.all:
            worker.publishes = events
        self._attempts: dict[tuple[int, int], Attempt] = {}

    def share(self, index: PrefixIndex) -> None:
        """Looks up in the index of another router, which gets the same events."""
        self.index = self.router.prefixes.index = self.router.prefixes.written = index

    def __call__(self, call: Call, engines: Sequence[Engine], now: float) -> int:
        self._now_s = now
        routing = self.routing_of(call)
        began_ns = time.thread_time_ns()
        attempt = self.router.place(routing, set())
        self.decisions_us.append((time.thread_time_ns() - began_ns) / 1000)
        assert attempt is not None, "engines report no capacity"
        self._attempts[call.agent, call.turn] = attempt
        return attempt.worker.slot

    def routing_of(self, call: Call) -> RoutingRequest:
        """What it reads in a call."""
        chain = call.chain
        headers = {SESSION_HEADER: call.session} if call.session else {}
        return RoutingRequest(
            chain,
            session_key(headers, {}, chain),
            chain.hashes[0],
            self.router.prefixes.estimate_tokens(chain.ends[-1]),
        )

    def attempt(self, call: Call) -> Attempt:
        """The attempt at a call that is under way."""
        return self._attempts[call.agent, call.turn]

    def hear_of(self, attempt: Attempt, now: float) -> None:
        """Another balancer has placed a request."""
        self._now_s = now
        routing, prefix = attempt.routing, attempt.in_flight_prefix
        self.router.attempts.record_of_peer(
            self.router.workers.all[attempt.worker.slot],
            None if routing.is_final else routing.session,
            () if prefix is None else prefix.segments,
            routing.prompt_tokens,
            attempt.uncached_tokens,
        )

    def waits(self, call: Call, submit: Callable[[], None]) -> bool:
        """Whether the call waits for a prefix that is being computed; `submit` ends the wait."""
        follows = self._attempts[call.agent, call.turn].follows
        if follows is not None:
            follows.followers.append(submit)
        return follows is not None

    def first_byte(self, call: Call, worker: int, now: float) -> None:
        self._now_s = now
        self.router.attempts.prefill_done(self._attempts[call.agent, call.turn])

    def end(self, call: Call, worker: int, now: float) -> None:
        self._now_s = now
        attempt = self._attempts.pop((call.agent, call.turn))
        self.router.attempts.succeed(attempt, call.output_tokens)

    def event(self, worker: int, line: Line, now: float) -> None:
        if self._events:
            apply_line(self.index, worker, line)
            self.hear(worker, line, now)

    def hear(self, worker: int, line: Line, now: float) -> None:
        """Applies what a line says beside the index."""
        self._now_s = now
        in_flight = self.router.prefixes.in_flight
        if line.cleared:
            in_flight.forget_computed(worker)
        for segment in line.removed:
            in_flight.forget_segment(worker, segment)
        if in_flight.expects(worker):
            for stored in line.stored:
                in_flight.confirm(worker, stored.segment)
        held_by = self.router.workers.all[worker]
        held_by.apply_load(self.report_of(line), now)
        self.router.attempts.confirm(held_by)
        self.router.load_reported(held_by)

    def report_of(self, line: Line) -> dict[str, int]:
        """What an engine reports of its load."""
        return {"pending_tokens": int(line.load.pending_tokens)}

    def leave(self, worker: int, now: float) -> None:
        self.router.workers.all[worker].draining = True

    def join(self, worker: int, now: float) -> None:
        """As a balancer that finds the engine started again: what it held is gone."""
        self._now_s = now
        returned = self.router.workers.all[worker]
        self.router.workers.mark(returned, ready=False)
        returned.draining = False
        self.router.workers.mark(returned, ready=True)
        returned.publishes = self._events


class _Queued:
    """A call in the admission queue."""

    def __init__(self, routing: RoutingRequest, placed: Callable[[Attempt], None]) -> None:
        self.routing = routing
        self.tried: set[Worker] = set()
        self.placed = placed

    def rejected(self, error: BalancerError) -> None:
        raise AssertionError(error.message)


class AdmittingRouter(OurRouter):
    """With the admission queue. Engines report their memory, so that agents can be held back for
    at most `hold_s`, but as many requests as there are may be in flight."""

    def __init__(self, workers: int, *, hold_s: float = 0.0) -> None:
        super().__init__(workers)
        clock = self.router.clock
        self.queue = AdmissionQueue(
            self.router, self.router.metrics, 10**6, math.inf, hold_s=hold_s, clock=clock
        )

    def queues(self, call: Call, place: Callable[[int], None]) -> bool:
        """Puts a call into the queue, which places it now or later."""

        def placed(attempt: Attempt) -> None:
            self._attempts[call.agent, call.turn] = attempt
            place(attempt.worker.slot)

        self.queue.place(_Queued(self.routing_of(call), placed))
        return True

    def tick(self, now: float) -> None:
        self._now_s = now
        self.queue.sweep()

    def report_of(self, line: Line) -> dict[str, int]:
        load = line.load
        return super().report_of(line) | {
            "capacity_tokens": load.capacity_tokens,
            "prefill_tokens": load.prefill_tokens,
            "prefill_ms": round(1000 * load.prefill_s),
            "host_capacity_tokens": load.host_capacity_tokens,
        }


class OurRouters:
    """Balancers in front of the same engines. Each call comes to one of them by chance.

    shares: whether they share a store, through which each learns the others' placements and loads
        within SHARED_S. Without one they know of each other's requests only what engines publish.
    """

    def __init__(self, workers: int, balancers: int, *, shares: bool = True) -> None:
        self.balancers = [OurRouter(workers) for _ in range(balancers)]
        self.index = self.balancers[0].index
        self._shares = shares
        self._placed: deque[tuple[float, OurRouter, Attempt]] = deque()
        self._loads_s = 0.0
        self._loaded: set[int] = set()
        for balancer in self.balancers:
            balancer.share(self.index)  # they would all hold the same
        self._random = Random(1)
        self._of: dict[tuple[int, int], OurRouter] = {}

    @property
    def decisions_us(self) -> list[float]:
        return [us for balancer in self.balancers for us in balancer.decisions_us]

    def __call__(self, call: Call, engines: Sequence[Engine], now: float) -> int:
        balancer = self._of[call.agent, call.turn] = self._random.choice(self.balancers)
        if self._shares:
            self._tell(now)
        worker = balancer(call, engines, now)
        if self._shares:
            self._placed.append((now, balancer, balancer.attempt(call)))
        return worker

    def _tell(self, now: float) -> None:
        """The messages between balancers that have arrived by now."""
        while self._placed and self._placed[0][0] + SHARED_S <= now:
            _, sender, attempt = self._placed.popleft()
            for balancer in self.balancers:
                if balancer is not sender:
                    balancer.hear_of(attempt, now)
        if now - self._loads_s >= SHARED_S:
            self._loads_s = now
            self._add_up(now)

    def _add_up(self, now: float) -> None:
        """Each balancer's view of what the others have at workers, as it is now."""
        everyone = [balancer.router.workers.all for balancer in self.balancers]
        loaded = {w.slot for workers in everyone for w in workers if w.in_flight}
        for slot in loaded | self._loaded:
            loads = [workers[slot].load for workers in everyone]
            total = [*map(sum, zip(*loads, strict=True))]
            for balancer, own in zip(self.balancers, loads, strict=True):
                worker = balancer.router.workers.all[slot]
                worker.peer_load = Load(*map(sub, total, own))
                balancer.router.fleet.load_changed(worker, now)
        self._loaded = loaded

    def waits(self, call: Call, submit: Callable[[], None]) -> bool:
        return self._of[call.agent, call.turn].waits(call, submit)

    def first_byte(self, call: Call, worker: int, now: float) -> None:
        self._of[call.agent, call.turn].first_byte(call, worker, now)

    def end(self, call: Call, worker: int, now: float) -> None:
        self._of.pop((call.agent, call.turn)).end(call, worker, now)

    def event(self, worker: int, line: Line, now: float) -> None:
        apply_line(self.index, worker, line)
        for balancer in self.balancers:
            balancer.hear(worker, line, now)

    def leave(self, worker: int, now: float) -> None:
        for balancer in self.balancers:
            balancer.leave(worker, now)

    def join(self, worker: int, now: float) -> None:
        for balancer in self.balancers:
            balancer.join(worker, now)
