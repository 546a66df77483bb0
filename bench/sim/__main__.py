"""A trace on simulated engines in virtual time: our router beside simple policies.

    python -m bench.sim --shape published_kind --workers 8 --scale 0.1
    python -m bench.sim --trace trace.jsonl

Policies: the balancer's router without its admission queue, with the engines' events; each worker
in turn; the least loaded worker; the worker where an agent began; and two of other routers
(`bench/sim/policies.py`). `--session-header` names each request's session. Sizes, speeds and
memory of the engines are at the trace's scale. The last line is one JSON object.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from bench.lib.script import parser_of, require, run
from bench.sim.engine import EngineConfig
from bench.sim.our_router import OurRouter
from bench.sim.policies import DynamoAgentic, LeastLoaded, LMetric, RoundRobin, Sticky
from bench.sim.virtual_time import Policy, simulate
from bench.trace.agents import TraceConfig
from bench.trace.calls import compile_calls, ideal_of
from bench.trace.options import add_trace_options, trace_of
from bench.trace.variants import make_trace

_TRACES = {
    "full": TraceConfig(sessions=80),
    "quick": TraceConfig(sessions=40, scale=0.1),
    "smallest": TraceConfig(sessions=5, calls=4, scale=0.05),
}
_POLICIES: dict[str, Callable[[int], Policy]] = {
    "ours": OurRouter,
    "round_robin": lambda workers: RoundRobin(),
    "least_loaded": lambda workers: LeastLoaded(),
    "sticky": lambda workers: Sticky(),
    "lmetric": lambda workers: LMetric(),
    "dynamo_agentic": lambda workers: DynamoAgentic(),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--session-header", action="store_true")
    add_trace_options(parser)
    options = parser.parse_args()
    default = _TRACES[options.size]
    trace = trace_of(parser, options, default) or default
    run("sim", partial(measure, trace, options.workers, has_header=options.session_header))


def measure(trace: TraceConfig, workers: int, *, has_header: bool = False) -> dict[str, Any]:
    """Each policy's figures on one trace."""
    agents = make_trace(trace)
    calls = compile_calls(agents)
    ideal = ideal_of(agents, calls)
    found: dict[str, Any] = {"workers": workers, "ideal_cached_ratio": round(ideal.cached_ratio, 4)}
    for name, policy in _POLICIES.items():
        figures = simulate(
            agents,
            calls,
            ideal,
            policy(workers),
            workers,
            engine_at(trace.scale),
            session_header=has_header,
        )
        require(figures.requests == ideal.requests, "every call is answered", policy=name)
        found[name] = asdict(figures)
        print(f"{name}: {found[name]}", file=sys.stderr)
    return found


def engine_at(scale: float) -> EngineConfig:
    """An engine that takes as long for a scaled prompt as the usual one for a whole prompt."""
    stock = EngineConfig()
    return replace(
        stock,
        capacity_tokens=max(1, int(stock.capacity_tokens * scale)),
        prefill_tokens_per_s=stock.prefill_tokens_per_s * scale,
        chunk_tokens=max(1, int(stock.chunk_tokens * scale)),
    )


if __name__ == "__main__":
    main()
