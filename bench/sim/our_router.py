"""The balancer's router as a policy of `bench/sim/virtual_time.py`: its placement, its index, its
sessions and its account of load, on the simulation's clock.

There is no admission queue: engines report no capacity, so each request is placed at once.
"""

from __future__ import annotations

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
from sgl_ext.balancer.routing.attempts import Attempt, RoutingRequest
from sgl_ext.balancer.routing.worker import Load
from sgl_ext.requests.session import session_key

SESSION_HEADER = "x-session-id"
SHARED_S = 0.1
"""Messages through a store that balancers share take no longer."""


class OurRouter:
    """A router of so many workers. Without `events` they publish nothing, and it knows only what
    it sent to them.

    decisions_us: the processor's time for each decision.
    """

    def __init__(self, workers: int, *, events: bool = True) -> None:
        self._now_s = 0.0
        self.router = router_of(workers, clock=lambda: self._now_s)
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
        chain = call.chain
        headers = {SESSION_HEADER: call.session} if call.session else {}
        routing = RoutingRequest(
            chain,
            session_key(headers, {}, chain),
            chain.hashes[0],
            self.router.prefixes.estimate_tokens(chain.ends[-1]),
        )
        began_ns = time.thread_time_ns()
        attempt = self.router.place(routing, set())
        self.decisions_us.append((time.thread_time_ns() - began_ns) / 1000)
        assert attempt is not None, "engines report no capacity"
        self._attempts[call.agent, call.turn] = attempt
        return attempt.worker.slot

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
        self.router.attempts.succeed(self._attempts.pop((call.agent, call.turn)))

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
        held_by.apply_load({"pending_tokens": int(line.load.pending_tokens)}, now)
        self.router.attempts.confirm(held_by)
        self.router.load_reported(held_by)

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
