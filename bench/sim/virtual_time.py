"""A trace on simulated engines in virtual time: thousands of requests a second of ours.

A policy is called for each request, `policy(call, engines, now) -> worker`, and may
have any of these methods, through which it learns what a router learns:

    begin(call, worker, now)        right after it placed the call
    waits(call, submit)             whether it holds the call back, to `submit()` it later
    first_byte(call, worker, now)   the first token
    end(call, worker, now)          the last one
    event(worker, line, now)        what an engine published, `event_lag_s` late

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
from typing import Any, NamedTuple

from bench.sim.engine import Engine, EngineConfig, Event, Load, Request
from bench.sim.segments import Stored
from bench.trace.agents import Agent
from bench.trace.calls import Call, Ideal, Loop

Policy = Callable[[Call, Sequence[Engine], float], int]


class Line(NamedTuple):
    """One line of an engine's event stream."""

    removed: list[int]
    stored: list[Stored]
    load: Load


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run came to. `load_max_over_mean` is of seconds of prefill; `busy` its mean
    share of the run; `moved` the share of later turns that left the worker of the last."""

    requests: int
    seconds: float
    cached_ratio: float
    share_of_ideal: float
    read_write: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
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
    event_lag_s: float = 0.05,
    limit_s: float = math.inf,
) -> Figures:
    """Runs a trace; `calls` are `compile_calls(agents)`, `ideal` is `ideal_of` both.

    No call starts after `limit_s`; the share of the ideal is then only nearly exact.
    """
    run = _Run(agents, calls, policy, [Engine(config) for _ in range(workers)], event_lag_s)
    run.session_header = session_header
    run.all(limit_s)
    return run.figures(ideal)


class _Run:
    def __init__(
        self,
        agents: Sequence[Agent],
        calls: Sequence[Sequence[Call]],
        policy: Policy,
        engines: list[Engine],
        lag_s: float,
    ) -> None:
        self.session_header = False
        self._loop = Loop(agents)
        self._calls = calls
        self._policy = policy
        self._engines = engines
        self._lag_s = lag_s
        self._sent: dict[Request, tuple[Call, float]] = {}
        self._lines: list[tuple[float, int, int, Line]] = []
        self._order = 0
        self._ttft_ms: list[float] = []
        self._worker: dict[int, int] = {}
        self._later = self._moved = 0
        self._prompt = self._cached = self._output = 0
        self._now = 0.0
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731 - a default, five times
        hooks = ("begin", "first_byte", "end", "event")
        self._tell: dict[str, Any] = {name: getattr(policy, name, nothing) for name in hooks}
        self._waits = getattr(policy, "waits", nothing)

    def all(self, limit_s: float) -> None:
        while self._loop.open and (self._now < limit_s or self._sent):
            wakes = [engine.next_at() for engine in self._engines]
            line_at = self._lines[0][0] if self._lines else math.inf
            due_at = self._loop.next_at() if self._now < limit_s else math.inf
            self._now = now = min(due_at, line_at, *wakes)
            while self._lines and self._lines[0][0] <= now:
                _, _, worker, line = heapq.heappop(self._lines)
                self._tell["event"](worker, line, now)
            for worker, at in enumerate(wakes):
                if at <= now:
                    self._take(worker, self._engines[worker].advance(now))
            for agent, turn in self._loop.due(min(now, limit_s)):
                self._send(self._calls[agent][turn], now)

    def _send(self, call: Call, now: float) -> None:
        shown = call if self.session_header else replace(call, session="")
        worker = self._policy(shown, self._engines, now)
        self._tell["begin"](shown, worker, now)
        last = self._worker.get(call.agent)
        if last is not None:
            self._later += 1
            self._moved += last != worker
        self._worker[call.agent] = worker
        request = Request(call.keys, call.prompt_tokens, call.output_tokens, call.chain)
        self._sent[request] = (shown, now)
        submit = partial(self._submit, worker, request)
        if not self._waits(shown, submit):
            submit()

    def _submit(self, worker: int, request: Request) -> None:
        self._take(worker, self._engines[worker].submit(request, self._now))

    def _take(self, worker: int, events: list[Event]) -> None:
        for at, kind, request in events:
            call, sent = self._sent[request]
            if kind == "refused":
                raise RuntimeError(f"larger than an engine's memory: {request.prompt_tokens}")
            if kind == "first":
                self._ttft_ms.append((at - sent) * 1000)
                self._tell["first_byte"](call, worker, at)
                continue
            del self._sent[request]
            self._prompt += request.prompt_tokens
            self._cached += request.cached_tokens
            self._output += request.output_tokens
            self._tell["end"](call, worker, at)
            self._loop.finished(call.agent, call.turn, at)
        engine = self._engines[worker]
        if events or engine.segments.changed:
            line = Line(*engine.segments.take(), engine.load)
            self._order += 1
            heapq.heappush(self._lines, (self._now + self._lag_s, self._order, worker, line))

    def figures(self, ideal: Ideal) -> Figures:
        cuts = statistics.quantiles(self._ttft_ms, n=100, method="inclusive")
        loads = [engine.prefill_s for engine in self._engines]
        mean = statistics.mean(loads)
        cached = self._cached / self._prompt
        return Figures(
            requests=len(self._ttft_ms),
            seconds=round(self._now, 1),
            cached_ratio=round(cached, 4),
            share_of_ideal=round(cached / ideal.cached_ratio, 4) if ideal.cached_tokens else 1.0,
            read_write=round(self._cached / (self._prompt - self._cached + self._output), 2),
            ttft_p50_ms=round(cuts[49], 1),
            ttft_p90_ms=round(cuts[89], 1),
            ttft_p95_ms=round(cuts[94], 1),
            ttft_p99_ms=round(cuts[98], 1),
            load_max_over_mean=round(max(loads) / mean, 3),
            busy=round(mean / self._now, 3),
            moved=round(self._moved / max(1, self._later), 4),
        )


class RoundRobin:
    """Each worker in turn."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, call: Call, engines: Sequence[Engine], now: float) -> int:
        self._next += 1
        return self._next % len(engines)


class LeastLoaded:
    """The worker with the fewest requests of ours under way, the longest unused of them."""

    def __init__(self) -> None:
        self._under_way: dict[int, int] = {}
        self._used_at: dict[int, float] = {}

    def __call__(self, call: Call, engines: Sequence[Engine], now: float) -> int:
        return min(
            range(len(engines)),
            key=lambda worker: (self._under_way.get(worker, 0), self._used_at.get(worker, 0)),
        )

    def begin(self, call: Call, worker: int, now: float) -> None:
        self._under_way[worker] = self._under_way.get(worker, 0) + 1
        self._used_at[worker] = now

    def end(self, call: Call, worker: int, now: float) -> None:
        self._under_way[worker] -= 1


class Sticky:
    """An agent stays where it began, with the fewest agents and then requests: a yardstick
    that knows conversations by heart."""

    def __init__(self) -> None:
        self._home: dict[int, int] = {}

    def __call__(self, call: Call, engines: Sequence[Engine], now: float) -> int:
        homes = list(self._home.values())
        best = min(range(len(engines)), key=homes.count)
        return self._home.setdefault(call.agent, best)

    def end(self, call: Call, worker: int, now: float) -> None:
        """Agents that are over are still counted: good enough for a yardstick."""
