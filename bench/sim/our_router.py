"""The balancer's router as a policy of `bench/sim/virtual_time.py`: its placement, its index, its
sessions and its account of load, on the simulation's clock.

There is no admission queue: engines report no capacity, so each request is placed at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random

from bench.lib.fleet import router_of
from bench.sim.engine import Engine
from bench.sim.segments import Line, apply_line
from bench.trace.calls import Call
from radix.index import PrefixIndex
from sgl_ext.balancer.routing.attempts import Attempt, RoutingRequest
from sgl_ext.requests.session import session_key

SESSION_HEADER = "x-session-id"


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
    """Balancers that share nothing but the engines. Each call comes to one of them by chance, so
    each knows the others' requests only by what the engines publish."""

    def __init__(self, workers: int, balancers: int) -> None:
        self._balancers = [OurRouter(workers) for _ in range(balancers)]
        self.index = self._balancers[0].index
        for balancer in self._balancers:
            balancer.share(self.index)  # they would all hold the same
        self._random = Random(1)
        self._of: dict[tuple[int, int], OurRouter] = {}

    @property
    def decisions_us(self) -> list[float]:
        return [us for balancer in self._balancers for us in balancer.decisions_us]

    def __call__(self, call: Call, engines: Sequence[Engine], now: float) -> int:
        balancer = self._of[call.agent, call.turn] = self._random.choice(self._balancers)
        return balancer(call, engines, now)

    def waits(self, call: Call, submit: Callable[[], None]) -> bool:
        return self._of[call.agent, call.turn].waits(call, submit)

    def first_byte(self, call: Call, worker: int, now: float) -> None:
        self._of[call.agent, call.turn].first_byte(call, worker, now)

    def end(self, call: Call, worker: int, now: float) -> None:
        self._of.pop((call.agent, call.turn)).end(call, worker, now)

    def event(self, worker: int, line: Line, now: float) -> None:
        apply_line(self.index, worker, line)
        for balancer in self._balancers:
            balancer.hear(worker, line, now)

    def leave(self, worker: int, now: float) -> None:
        for balancer in self._balancers:
            balancer.leave(worker, now)

    def join(self, worker: int, now: float) -> None:
        for balancer in self._balancers:
            balancer.join(worker, now)
