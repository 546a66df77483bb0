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
    event(worker, line, now)        what an engine published, `Feed.lag_s` late
    leave(worker, now)              the worker drains: it gets no new requests
    join(worker, now)               it takes requests again, with an empty cache

`call` has `chain`, `session` (None where the run has no session header), the tokens,
`agent` and `turn`; an engine has `load` and `cached_tokens(request)`, which routers
do not see in life but a bound may. `line.removed` comes before `line.stored`.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, NamedTuple

from bench.sim.engine import Engine, EngineConfig, Event, Request
from bench.sim.segments import Line
from bench.trace.agents import Agent
from bench.trace.calls import Call, Ideal, Loop

Policy = Callable[[Call, Sequence[Engine], float], int]


class Answer(NamedTuple):
    """A call that was answered: when it was sent, and when its first and last token came."""

    call: Call
    sent_s: float
    first_s: float
    ended_s: float
    cached_tokens: int


RECONNECT_S = 0.5
TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Feed:
    """How engines' events reach a policy.

    lag_s: how late. loss: the share of lines that are lost. After a lost line nothing comes until
    RECONNECT_S later, and then a snapshot.
    """

    lag_s: float = 0.05
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Churn:
    """Every `every_s` seconds so many engines drain, and come back empty `away_s` later."""

    every_s: float
    engines: int
    away_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run came to. `total` is from a call to the end of its answer; `load_max_over_mean` is
    of seconds of prefill; `busy` its mean share of the run; `moved` the share of later turns that
    left the worker of the last."""

    requests: int
    seconds: float
    cached_ratio: float
    share_of_ideal: float
    read_write: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
    total_p50_ms: float
    total_p99_ms: float
    total_mean_ms: float
    load_max_over_mean: float
    busy: float
    moved: float


def simulate(
    agents: Sequence[Agent],
    calls: Sequence[Sequence[Call]],
    ideal: Ideal,
    policy: Policy,
    workers: int = 4,
    config: EngineConfig | None = None,
    *,
    session_header: bool = False,
    limit_s: float = math.inf,
    speeds: Sequence[float] = (),
) -> Figures:
    """Runs a trace; `calls` are `compile_calls(agents)`, `ideal` is `ideal_of` both.

    No call starts after `limit_s`; the share of the ideal is then only nearly exact. speeds: of the
    engines; without them, all are as fast as `config` says.
    """
    config = config or EngineConfig()
    engines = [Engine(config.at_speed(speed)) for speed in speeds or [1.0] * workers]
    run = Run(agents, calls, policy, engines)
    run.session_header = session_header
    run.all(limit_s)
    return run.figures(ideal)


class Run:
    """One policy with one trace.

    counts: which calls the figures are about. The others are made all the same.
    cached, cached_of_all: tokens read and tokens of prompts, of calls that count and of all.
    lines, segments: what the policy was sent of engines' events.
    ended_s: when each agent's last answer was complete.
    answers: all of them, in the order of their ends.
    """

    def __init__(
        self,
        agents: Sequence[Agent],
        calls: Sequence[Sequence[Call]],
        policy: Policy,
        engines: list[Engine],
        feed: Feed | None = None,
        churn: Churn | None = None,
        counts: Callable[[Call], bool] = lambda call: True,
    ) -> None:
        self.session_header = False
        self.engines = engines
        self.lines = self.segments = self.answered = 0
        self.ttft_ms: list[float] = []
        self.total_ms: list[float] = []
        self.ended_s: dict[int, float] = {}
        self.answers: list[Answer] = []
        self._first_s: dict[Request, float] = {}
        self._loop = Loop(agents)
        self._calls = calls
        self._policy = policy
        self._feed = feed or Feed()
        self._churn = churn
        self._counts = counts
        self._random = Random(1)
        self._sent: dict[Request, tuple[Call, float]] = {}
        self._lines: list[tuple[float, int, int, Line | None]] = []
        self._broken: set[int] = set()  # whose stream is to begin again
        self._order = 0
        self._wakes: list[tuple[float, int]] = []  # a heap; some are out of date
        self._wake_at = [math.inf] * len(engines)
        self._turns: list[tuple[float, int]] = []  # a heap: who comes back when
        self._churn_at = math.inf if churn is None else churn.every_s
        self._worker: dict[int, int] = {}
        self._later = self._moved = 0
        self.cached = self.cached_of_all = (0, 0)
        self._output = 0
        self._now = 0.0
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731 - a default, seven times
        hooks = ("begin", "first_byte", "end", "event", "leave", "join")
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
            turn_at = min(self._churn_at, self._turns[0][0] if self._turns else math.inf)
            self._now = now = min(due_at, line_at, turn_at, self._next_wake(), self._tick_at)
            self._deliver(now)
            if self._tick is not None and self._tick_at <= now:
                self._tick_at = now + TICK_S
                self._tick(now)
            if turn_at <= now:
                self._turn(now)
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
            if line is None:
                self._broken.discard(worker)
                engine = self.engines[worker]
                engine.segments.take()
                line = Line([], list(engine.segments.snapshot()), engine.load, cleared=True)
            self.lines += 1
            self.segments += len(line.stored) + len(line.removed)
            self._tell["event"](worker, line, now)

    def _turn(self, now: float) -> None:
        """Engines leave and come back."""
        while self._turns and self._turns[0][0] <= now:
            _, worker = heapq.heappop(self._turns)
            self.engines[worker].flush()
            self._take(worker, [])
            self._tell["join"](worker, now)
        if self._churn is not None and self._churn_at <= now:
            self._churn_at += self._churn.every_s
            away = {worker for _, worker in self._turns}
            there = [worker for worker in range(len(self.engines)) if worker not in away]
            for worker in self._random.sample(there, min(self._churn.engines, len(there) - 1)):
                self._tell["leave"](worker, now)
                heapq.heappush(self._turns, (now + self._churn.away_s, worker))

    def _send(self, call: Call, now: float) -> None:
        shown = call if self.session_header else replace(call, session="")
        request = Request(call.keys, call.prompt_tokens, call.output_tokens, call.chain)
        request.block_tokens = self.engines[0].config.block_tokens
        self._sent[request] = (shown, now)
        if not self._queues(shown, partial(self._place, shown, request)):
            self._place(shown, request, self._policy(shown, self.engines, now))

    def _place(self, call: Call, request: Request, worker: int) -> None:
        self._tell["begin"](call, worker, self._now)
        last = self._worker.get(call.agent)
        if last is not None:
            self._later += 1
            self._moved += last != worker
        self._worker[call.agent] = worker
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
                if self._counts(call):
                    self.ttft_ms.append((at - sent) * 1000)
                self._tell["first_byte"](call, worker, at)
                continue
            del self._sent[request]
            self.answered += 1
            first_s = self._first_s.pop(request)
            self.answers.append(Answer(call, sent, first_s, at, request.cached_tokens))
            if self._counts(call):
                self.total_ms.append((at - sent) * 1000)
            self._add_up(request, is_counted=self._counts(call))
            self._tell["end"](call, worker, at)
            self.ended_s[call.agent] = at
            self._loop.finished(call.agent, call.turn, at)
        engine = self.engines[worker]
        wake_at = engine.next_at()
        if wake_at != self._wake_at[worker]:
            self._wake_at[worker] = wake_at
            heapq.heappush(self._wakes, (wake_at, worker))
        if worker in self._broken:
            return
        if events or engine.segments.changed:
            line: Line | None = Line(*engine.segments.take(), engine.load)
            at = self._now + self._feed.lag_s
            if self._feed.loss and self._random.random() < self._feed.loss:
                self._broken.add(worker)
                line, at = None, at + RECONNECT_S
            self._order += 1
            heapq.heappush(self._lines, (at, self._order, worker, line))

    def _add_up(self, request: Request, *, is_counted: bool) -> None:
        cached, prompt = self.cached_of_all
        self.cached_of_all = cached + request.cached_tokens, prompt + request.prompt_tokens
        if is_counted:
            cached, prompt = self.cached
            self.cached = cached + request.cached_tokens, prompt + request.prompt_tokens
            self._output += request.output_tokens

    def figures(self, ideal: Ideal) -> Figures:
        cuts = statistics.quantiles(self.ttft_ms, n=100, method="inclusive")
        totals = statistics.quantiles(self.total_ms, n=100, method="inclusive")
        loads = [engine.prefill_s for engine in self.engines]
        mean = statistics.mean(loads)
        cached_tokens, prompt_tokens = self.cached
        cached = cached_tokens / prompt_tokens
        return Figures(
            requests=len(self.ttft_ms),
            seconds=round(self._now, 1),
            cached_ratio=round(cached, 4),
            share_of_ideal=round(cached / ideal.cached_ratio, 4) if ideal.cached_tokens else 1.0,
            read_write=round(cached_tokens / (prompt_tokens - cached_tokens + self._output), 2),
            ttft_p50_ms=round(cuts[49], 1),
            ttft_p90_ms=round(cuts[89], 1),
            ttft_p95_ms=round(cuts[94], 1),
            ttft_p99_ms=round(cuts[98], 1),
            total_p50_ms=round(totals[49], 1),
            total_p99_ms=round(totals[98], 1),
            total_mean_ms=round(statistics.mean(self.total_ms), 1),
            load_max_over_mean=round(max(loads) / mean, 3),
            busy=round(mean / self._now, 3),
            moved=round(self._moved / max(1, self._later), 4),
        )
