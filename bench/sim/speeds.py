"""Our router and others in front of engines of unequal speed, in virtual time.

`ours` learns how fast the engines are, `ours_without_learning` does not. Each trace runs with
several seeds, on engines of the given speeds and on as many equal ones. No request has a session
header; `sticky` knows the sessions by heart. `gain` compares the two arms of ours, seed by seed:
above 1, learning is better.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from bench.lib.script import precondition, require
from bench.lib.spread import ratio_spread, spread
from bench.sim.engine import EngineConfig
from bench.sim.our_router import OurRouter
from bench.sim.policies import CacheAware, DynamoAgentic, LeastLoaded, LMetric, RoundRobin, Sticky
from bench.sim.virtual_time import Figures, Policy, simulate
from bench.trace.agents import TraceConfig
from bench.trace.calls import compile_calls, ideal_of
from bench.trace.variants import make_trace

_POLICIES: dict[str, Callable[[int], Policy]] = {
    "ours": OurRouter,
    "ours_without_learning": partial(OurRouter, learns=False),
    "lmetric": lambda workers: LMetric(),
    "dynamo_agentic": lambda workers: DynamoAgentic(),
    "cache_aware": lambda workers: CacheAware(),
    "sticky": lambda workers: Sticky(),
    "least_loaded": lambda workers: LeastLoaded(),
    "round_robin": lambda workers: RoundRobin(),
}
_FIGURES = (
    *("ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "total_mean_ms", "total_p50_ms", "total_p99_ms"),
    *("cached_ratio", "load_max_over_mean", "busy", "moved"),
)


def measure_speeds(
    setups: Mapping[str, tuple[TraceConfig, EngineConfig]],
    speeds: Sequence[float],
    seeds: Iterable[int],
) -> dict[str, Any]:
    """The figures of all arms on each of the named traces."""
    seeds = tuple(seeds)
    found: dict[str, Any] = {"speeds": list(speeds)}
    for name, (trace, engine) in setups.items():
        equal = [1.0] * len(speeds)
        found[name] = {
            "unequal": _measure(name, trace, engine, speeds, seeds),
            "equal": _measure(name, trace, engine, equal, seeds),
        }
    return found


def _measure(
    name: str,
    trace: TraceConfig,
    engine: EngineConfig,
    speeds: Sequence[float],
    seeds: Sequence[int],
) -> dict[str, Any]:
    rounds: dict[str, list[Figures]] = {policy: [] for policy in _POLICIES}
    for seed in seeds:
        agents = make_trace(replace(trace, seed=seed))
        calls = compile_calls(agents)
        ideal = ideal_of(agents, calls)
        for policy, make in _POLICIES.items():
            run = partial(simulate, agents, calls, ideal, make(len(speeds)), len(speeds), engine)
            figures = run(speeds=speeds)
            require(figures.requests == ideal.requests, "every call is answered", policy=policy)
            rounds[policy].append(figures)
            print(f"{name} {list(speeds)} {seed} {policy}: {figures}", file=sys.stderr, flush=True)
    busy = max(figures.busy for figures in rounds["ours"])
    precondition(busy < 0.9, "engines are not overloaded", busy=busy, trace=name)
    found: dict[str, Any] = {
        policy: {field: spread([asdict(each)[field] for each in figures]) for field in _FIGURES}
        for policy, figures in rounds.items()
    }
    found["gain"] = {
        field: ratio_spread(
            [getattr(each, field) for each in rounds["ours_without_learning"]],
            [getattr(each, field) for each in rounds["ours"]],
        )
        for field in _FIGURES[:6]
    }
    return found
