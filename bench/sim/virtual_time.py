"""A trace on simulated engines in virtual time: thousands of requests a second of ours.

A policy is called for each request, `policy(call, engines, now) -> worker`, and may
have any of these methods, through which it learns what a router learns:

    queues(call, place)             whether it holds the call back, to `place(worker)` it later:
                                    then it is not called for a worker
    tick(now)                       every TICK_S
    begin(call, worker, now)        right after it placed the call
    waits(call, submit)             whether it holds the call back, to `submit()` it later
    first_byte(call, worker, now)   the first token
    end(call, worker, now)          the last one
    event(worker, line, now)        what an engine published, LAG_S late

`call` has `chain`, `session` (None where the run has no session header), the tokens,
`agent` and `turn`; an engine has `load` and `cached_tokens(request)`, which routers
do not see in life but a bound may. `line.removed` comes before `line.stored`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from bench.sim.engine import Engine, Event, Request
from bench.sim.segments import Line
from bench.trace.agents import Agent
from bench.trace.calls import Call, Loop

Policy = Callable[[Call, Sequence[Engine], float], int]


class Answer(NamedTuple):
    """A call that was answered: when it was sent, and when its first and last token came."""

    call: Call
    sent_s: float
    first_s: float
    ended_s: float
    cached_tokens: int


LAG_S = 0.05
"""How late events of engines are."""
TICK_S = 0.1


class Run:
    """One policy with one trace. `answers` are in the order of their ends."""

    def __init__(
        self,
        agents: Sequence[Agent],
        calls: Sequence[Sequence[Call]],
        policy: Policy,
        engines: list[Engine],
    ) -> None:
        self.session_header = False
        self.engines = engines
        self.answers: list[Answer] = []
        self._first_s: dict[Request, float] = {}
        self._loop = Loop(agents)
        self._calls = calls
        self._policy = policy
        self._sent: dict[Request, tuple[Call, float]] = {}
        self._lines: list[tuple[float, int, int, Line]] = []
        self._order = 0
        self._wakes: list[tuple[float, int]] = []  # a heap; some are out of date
        self._wake_at = [math.inf] * len(engines)
        self._now = 0.0
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731 - a default, several times
        hooks = ("begin", "first_byte", "end", "event")
        self._tell: dict[str, Any] = {name: getattr(policy, name, nothing) for name in hooks}
        self._waits = getattr(policy, "waits", nothing)
        self._queues = getattr(policy, "queues", nothing)
        self._tick = getattr(policy, "tick", None)
        self._tick_at = math.inf if self._tick is None else 0.0

    def all(self, limit_s: float = math.inf) -> None:
        """Makes all calls, those that are due before the limit, and delivers all lines."""
        while self._loop.open and (self._now < limit_s or self._sent):
            line_at = self._lines[0][0] if self._lines else math.inf
            due_at = self._loop.next_at() if self._now < limit_s else math.inf
            self._now = now = min(due_at, line_at, self._next_wake(), self._tick_at)
            self._deliver(now)
            if self._tick is not None and self._tick_at <= now:
                self._tick_at = now + TICK_S
                self._tick(now)
            for worker in self._woken(now):
                self._take(worker, self.engines[worker].advance(now))
            for agent, turn in self._loop.due(min(now, limit_s)):
                self._send(self._calls[agent][turn], now)
        while self._lines:
            self._now = self._lines[0][0]
            self._deliver(self._now)

    def _next_wake(self) -> float:
        wakes, wake_at = self._wakes, self._wake_at
        while wakes and wakes[0][0] != wake_at[wakes[0][1]]:
            heapq.heappop(wakes)
        return wakes[0][0] if wakes else math.inf

    def _woken(self, now: float) -> list[int]:
        """The workers where something happens by now, in order."""
        woken = set()
        while self._next_wake() <= now:
            woken.add(heapq.heappop(self._wakes)[1])
        return sorted(woken)

    def _deliver(self, now: float) -> None:
        while self._lines and self._lines[0][0] <= now:
            _, _, worker, line = heapq.heappop(self._lines)
            self._tell["event"](worker, line, now)

    def _send(self, call: Call, now: float) -> None:
        shown = call if self.session_header else replace(call, session="")
        request = Request(call.keys, call.prompt_tokens, call.output_tokens, call.chain)
        request.block_tokens = self.engines[0].config.block_tokens
        self._sent[request] = (shown, now)
        if not self._queues(shown, partial(self._place, shown, request)):
            self._place(shown, request, self._policy(shown, self.engines, now))

    def _place(self, call: Call, request: Request, worker: int) -> None:
        self._tell["begin"](call, worker, self._now)
        submit = partial(self._submit, worker, request)
        if not self._waits(call, submit):
            submit()

    def _submit(self, worker: int, request: Request) -> None:
        self._take(worker, self.engines[worker].submit(request, self._now))

    def _take(self, worker: int, events: list[Event]) -> None:
        for at, kind, request in events:
            call, sent = self._sent[request]
            if kind == "refused":
                raise RuntimeError(f"larger than an engine's memory: {request.prompt_tokens}")
            if kind == "first":
                self._first_s[request] = at
                self._tell["first_byte"](call, worker, at)
                continue
            del self._sent[request]
            first_s = self._first_s.pop(request)
            self.answers.append(Answer(call, sent, first_s, at, request.cached_tokens))
            self._tell["end"](call, worker, at)
            self._loop.finished(call.agent, call.turn, at)
        engine = self.engines[worker]
        wake_at = engine.next_at()
        if wake_at != self._wake_at[worker]:
            self._wake_at[worker] = wake_at
            heapq.heappush(self._wakes, (wake_at, worker))
        if events or engine.segments.changed:
            line = Line(*engine.segments.take(), engine.load)
            self._order += 1
            heapq.heappush(self._lines, (self._now + LAG_S, self._order, worker, line))
