"""Our router beside simple policies on many seeds of a trace, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

from bench.lib.spread import Spread, spread
from bench.sim.engine import EngineConfig
from bench.sim.our_router import OurRouter
from bench.sim.policies import LeastLoaded, RoundRobin, Sticky
from bench.sim.virtual_time import Policy, simulate
from bench.trace.agents import TraceConfig
from bench.trace.calls import compile_calls, ideal_of
from bench.trace.variants import make_trace

_POLICIES: dict[str, Callable[[int], Policy]] = {
    "ours": OurRouter,
    "ours_without_events": lambda workers: OurRouter(workers, events=False),
    "sticky": lambda workers: Sticky(),
    "least_loaded": lambda workers: LeastLoaded(),
    "round_robin": lambda workers: RoundRobin(),
}
_FIGURES = ("ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "cached_ratio", "load_max_over_mean")


def simulate_seeds(
    trace: TraceConfig, engine: EngineConfig, workers: int, seeds: Iterable[int]
) -> dict[str, dict[str, Spread]]:
    """Each policy's figures, a round a seed. No request has a session header; `sticky` knows the
    sessions by heart."""
    found: dict[str, dict[str, list[float]]] = {}
    for seed in seeds:
        agents = make_trace(replace(trace, seed=seed))
        calls = compile_calls(agents)
        ideal = ideal_of(agents, calls)
        for name, policy in _POLICIES.items():
            figures = simulate(agents, calls, ideal, policy(workers), workers, engine)
            values = asdict(figures)
            of_policy = found.setdefault(name, {})
            for field in _FIGURES:
                of_policy.setdefault(field, []).append(values[field])
            moves = round(figures.moved * (figures.requests - len(agents)))
            of_policy.setdefault("moves", []).append(moves)
    return {
        name: {field: spread(values) for field, values in fields.items()}
        for name, fields in found.items()
    }
