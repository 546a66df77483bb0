"""How much faster do agents end if a balancer holds some of them back while memory is short?

    python -m bench.held_agents [--quick] [--engines 4]

The balancer's own router and admission queue in front of simulated engines in virtual time, whose
cache evicts what was used least recently (`bench/sim`). Sessions have the published shape. Full
size has the sizes and speeds of real engines. Each row has engines whose memory is a share of what
all sessions use at their ends, from plenty to a tenth. Arms:

    fcfs      each request is sent at once, and engines serve them as they come
    free      each request is sent at once, as with `agent-hold-s 0`, and engines order them as ours
    held      requests are held back for 20 s at most, as by default, and ordered by engines, too

A session's time is from its first request to its last answer, with its tools and its person.
`sessions_per_hour` counts until the last session has ended. Where memory is plenty, nothing is
held back: the last two arms must be the same, request by request.
"""

from __future__ import annotations

import logging
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from bench.lib.script import Size, parser_of, require, run
from bench.lib.spread import ratio_spread
from bench.sim.__main__ import engine_at
from bench.sim.engine import Engine
from bench.sim.our_router import AdmittingRouter
from bench.sim.virtual_time import Run
from bench.trace.agents import Agent, TraceConfig, first_calls
from bench.trace.calls import Call, Ideal, compile_calls, ideal_of
from bench.trace.variants import make_trace
from sgl_ext.settings.schema import BalancerSettings

MEMORY = (1.5, 0.4, 0.2, 0.1)
_DEFAULTS = BalancerSettings()


class Arm(NamedTuple):
    """hold_s: of the balancer. aging_s: of the engines; 0: they serve first what comes first."""

    hold_s: float
    aging_s: float


ARMS = {
    "fcfs": Arm(0.0, 0.0),
    "free": Arm(0.0, _DEFAULTS.aging_s),
    "held": Arm(_DEFAULTS.agent_hold_s, _DEFAULTS.aging_s),
}
_LEAST_PROMPTS = 1.5


@dataclass(frozen=True)
class Amount:
    """sessions: for each engine. calls: of each agent, the most. seeds: how many traces."""

    sessions: int
    calls: int
    scale: float
    seeds: int


SIZES: dict[Size, Amount] = {
    "full": Amount(16, 40, 1.0, 3),
    "quick": Amount(16, 20, 0.02, 3),
    "smallest": Amount(8, 8, 0.02, 1),
}


@dataclass(frozen=True)
class Trace:
    """Agents, their calls, and the best that a cache could do for them."""

    agents: Sequence[Agent]
    calls: Sequence[Sequence[Call]]
    ideal: Ideal

    @property
    def longest_tokens(self) -> int:
        """The longest prompt and answer."""
        return max(call.prompt_tokens + call.output_tokens for each in self.calls for call in each)

    @property
    def all_tokens(self) -> int:
        """What all agents use at their ends."""
        return sum(each[-1].prompt_tokens for each in self.calls if each)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--engines", type=int, default=2)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    run("held_agents", partial(measure, SIZES[options.size], options.engines))


def measure(size: Amount, engines: int) -> dict[str, Any]:
    """All shares of memory and both arms."""
    rows: dict[float, dict[str, list[dict[str, float]]]] = {
        share: {name: [] for name in ARMS} for share in MEMORY
    }
    for seed in range(1, size.seeds + 1):
        trace = traced(size, engines, seed)
        for share, arms in rows.items():
            for name, arm in ARMS.items():
                arms[name].append(simulated(trace, size.scale, engines, share, arm))
                print(seed, share, name, arms[name][-1], file=sys.stderr, flush=True)
    plenty = rows[MEMORY[0]]
    for free, held in zip(plenty["free"], plenty["held"], strict=True):
        require(free == held, "where memory is plenty nothing changes", free=free, held=held)
    return {
        "engines": engines,
        "sessions": size.sessions * engines,
        "memory": {str(share): _row(arms) for share, arms in rows.items()},
    }


def traced(size: Amount, engines: int, seed: int) -> Trace:
    """A trace of the published shape."""
    sessions = size.sessions * engines
    config = TraceConfig("published_kind", sessions, scale=size.scale, seed=seed)
    agents = first_calls(make_trace(config), size.calls)
    calls = compile_calls(agents)
    return Trace(agents, calls, ideal_of(agents, calls))


def simulated(
    trace: Trace, scale: float, engines: int, memory: float, arm: Arm
) -> dict[str, float]:
    """What one arm comes to."""
    least_tokens = int(_LEAST_PROMPTS * trace.longest_tokens)
    capacity_tokens = max(int(memory * trace.all_tokens / engines), least_tokens)
    config = replace(engine_at(scale), capacity_tokens=capacity_tokens, aging_s=arm.aging_s)
    router = AdmittingRouter(engines, hold_s=arm.hold_s)
    played = Run(trace.agents, trace.calls, router, [Engine(config) for _ in range(engines)])
    played.session_header = True
    played.all()
    figures = played.figures(trace.ideal)
    require(figures.requests == trace.ideal.requests, "every call is answered", arm=arm)
    began = {one.session: one.starts_at for one in trace.agents if one.starts_at is not None}
    ended: dict[str, float] = {}
    for one in trace.agents:
        if one.turns:
            ended[one.session] = max(ended.get(one.session, 0.0), played.ended_s[one.number])
    took_s = [at_s - began[session] for session, at_s in ended.items()]
    return {
        "session_mean_s": round(statistics.mean(took_s), 1),
        "session_p50_s": round(statistics.median(took_s), 1),
        "session_max_s": round(max(took_s), 1),
        "sessions_per_hour": round(3600 * len(took_s) / max(ended.values()), 1),
        "cached_ratio": figures.cached_ratio,
        "ttft_p50_ms": figures.ttft_p50_ms,
        "ttft_p90_ms": figures.ttft_p90_ms,
        "ttft_p99_ms": figures.ttft_p99_ms,
        "ttft_max_ms": round(max(played.ttft_ms), 1),
        "busy": figures.busy,
    }


def _row(arms: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: {figure: round(statistics.mean(one[figure] for one in runs), 3) for figure in runs[0]}
        for name, runs in arms.items()
    }
    for figure in ("session_mean_s", "sessions_per_hour", "ttft_p50_ms", "ttft_p99_ms"):
        ours, free, fcfs = ([one[figure] for one in arms[n]] for n in ("held", "free", "fcfs"))
        found[f"{figure}_vs_free"] = ratio_spread(ours, free)
        found[f"{figure}_vs_fcfs"] = ratio_spread(ours, fcfs)
    return found


if __name__ == "__main__":
    main()
