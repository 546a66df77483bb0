"""The balancer's router as a policy of `bench/sim/virtual_time.py`: its placement, its index, its
sessions and its account of load, on the simulation's clock.

There is no admission queue, so each request is placed at once, but in `AdmittingRouter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from bench.lib.fleet import router_of
from bench.sim.engine import Engine
from bench.sim.segments import Line, apply_line
from bench.trace.calls import Call
from radix.index import PrefixIndex
from sgl_ext.balancer.routing.admission import AdmissionQueue
from sgl_ext.balancer.routing.routing_request import RoutingRequest
from sgl_ext.balancer.routing.worker import Attempt, Worker
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.reading.client import agent_of, session_key

SESSION_HEADER = "x-session-id"


class OurRouter:
    """A router of so many workers."""

    def __init__(self, workers: int) -> None:
        self._now_s = 0.0
        self.router = router_of(workers, clock=lambda: self._now_s)
        index = self.router.prefixes.written
        assert index is not None, "this process writes its index"
        self.index: PrefixIndex = index
        self._attempts: dict[tuple[int, int], Attempt] = {}

    def __call__(self, call: Call, engines: Sequence[Engine], now: float) -> int:
        self._now_s = now
        routing = self.routing_of(call)
        attempt = self.router.place(routing, set())
        assert attempt is not None, "engines report no capacity"
        self._attempts[call.agent, call.turn] = attempt
        return attempt.worker.slot

    def routing_of(self, call: Call) -> RoutingRequest:
        """What it reads in a call."""
        chain = call.chain
        headers = {SESSION_HEADER: call.session} if call.session else {}
        session = session_key(headers, {}, chain)
        return RoutingRequest(
            chain,
            session,
            chain.hashes[0],
            self.router.prefixes.estimate_tokens(chain.ends[-1]),
            agent=agent_of(session, chain),
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
        apply_line(self.index, worker, line)
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


class _Queued:
    """A call in the admission queue."""

    def __init__(self, routing: RoutingRequest, placed: Callable[[Attempt], None]) -> None:
        self.routing = routing
        self.tried: set[Worker] = set()
        self.placed = placed

    def rejected(self, error: BalancerError) -> None:
        raise AssertionError(error.message)

    def abandon(self, reason: str) -> None:
        raise AssertionError(reason)


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
