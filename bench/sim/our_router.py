"""The balancer's router as a policy of `bench/sim/virtual_time.py`: its placement, its index, its
sessions and its account of load, on the simulation's clock.

There is no admission queue: engines report no capacity, so each request is placed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.lib.fleet import router_of
from bench.sim.engine import Engine
from bench.sim.virtual_time import Line
from bench.trace.calls import Call
from sgl_ext.balancer.routing.attempts import Attempt, RoutingRequest
from sgl_ext.requests.session import session_key

SESSION_HEADER = "x-session-id"


class OurRouter:
    """A router of so many workers. Without `events` they publish nothing, and it knows only what
    it sent to them."""

    def __init__(self, workers: int, *, events: bool = True) -> None:
        self._now_s = 0.0
        self._router = router_of(workers, clock=lambda: self._now_s)
        self._index = self._router.prefixes.written
        self._events = events
        for worker in self._router.workers.all:
            worker.publishes = events
        self._attempts: dict[tuple[int, int], Attempt] = {}

    def __call__(self, call: Call, engines: Sequence[Engine], now: float) -> int:
        self._now_s = now
        chain = call.chain
        headers = {SESSION_HEADER: call.session} if call.session else {}
        routing = RoutingRequest(
            chain,
            session_key(headers, {}, chain),
            chain.hashes[0],
            self._router.prefixes.estimate_tokens(chain.ends[-1]),
        )
        attempt = self._router.place(routing, set())
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
        self._router.attempts.prefill_done(self._attempts[call.agent, call.turn])

    def end(self, call: Call, worker: int, now: float) -> None:
        self._now_s = now
        self._router.attempts.succeed(self._attempts.pop((call.agent, call.turn)))

    def event(self, worker: int, line: Line, now: float) -> None:
        if not self._events:
            return
        self._now_s = now
        index, in_flight = self._index, self._router.prefixes.in_flight
        assert index is not None, "this process writes its index"
        for segment in line.removed:
            index.remove(worker, segment)
            in_flight.forget_segment(worker, segment)
        for stored in line.stored:
            if index.store(worker, stored.parent, stored.segment, stored.tokens):
                in_flight.confirm(worker, stored.segment)
        held_by = self._router.workers.all[worker]
        held_by.apply_load({"pending_tokens": int(line.load.pending_tokens)}, now)
        self._router.attempts.confirm(held_by)
        self._router.load_reported(held_by)
