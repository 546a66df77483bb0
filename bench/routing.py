"""How much of the possible cache reuse does each router get from the same workers, and which TTFT?

The trace of a swarm of agents (bench/trace/swarm.py) goes as a closed loop through each router,
a real process, to simulated engines (bench/sim/engine.py) that are started for each run. The
engines of `ours` have the plugin: they strip a billing header and publish prefix events. The
other routers have stock engines. Only `vllm_router` gets the session header, which its policy
needs; other fields say where all routers get it.

    ours            python -m sgl_ext.balancer.serve
    round_robin     smg --policy round_robin
    least_loaded    smg --policy power_of_two, by its own requests in flight
    sglang_router   its default, cache_aware
    smg             its default, cache_aware
    vllm_router     sticky_least_loaded

`share_of_ideal` compares with one worker that has an infinite cache, over the calls that were
made: calls stop at a run's time limit, so a slow router makes fewer. `read_write` counts output
tokens as written. `load_max_over_mean` is of seconds of prefill. `--quick` halves prompts and
prefill speed. `--variant published_kind` and `published_unkind` send sessions of the published
shape instead (bench/trace/published.py), and `--trace FILE` a trace in Mooncake's format. `--real`
sends a small trace to two real CPU engines: all to one of them, through our balancer, and in
rotation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from bench.lib.script import parser_of, run
from bench.sim.engine import EngineConfig
from bench.trace.agents import TraceConfig
from bench.trace.run import POLICIES, Setup, ideal_ratio, measure
from bench.trace.variants import MOONCAKE, VARIANTS

_HEADER_GIVEN = "vllm_router"
_COLLAPSING = ("ours", "sglang_router", "smg")


def quick_setup(variant: str = "team") -> Setup:
    """Four workers, half-sized prompts, and sessions that act at eight times a person's pace."""
    trace = TraceConfig(variant, sessions=40, scale=0.5, pace=8, ramp_s=10)
    if variant == "no_sharing":
        trace = replace(trace, sessions=24, pace=4)
    engine = _engine(scale=0.5, decode_s=0.001, capacity_tokens=200_000)
    return Setup(trace, engine, 4, limit_s=21 if variant == "team" else 10)


def full_setup(variant: str = "team", workers: int = 4) -> Setup:
    """Full-sized prompts, and ten sessions a worker that act at four times a person's pace."""
    trace = TraceConfig(variant, sessions=10 * workers, pace=4)
    engine = _engine(scale=1, decode_s=0.003, capacity_tokens=500_000)
    return Setup(trace, engine, workers, 110)


def _engine(*, scale: float, decode_s: float, capacity_tokens: int) -> EngineConfig:
    stock = EngineConfig()
    return replace(
        stock,
        capacity_tokens=capacity_tokens,
        prefill_tokens_per_s=stock.prefill_tokens_per_s * scale,
        chunk_tokens=int(stock.chunk_tokens * scale),
        decode_base_s=decode_s,
        decode_per_request_s=decode_s / 60,
    )


def with_billing_header(setup: Setup) -> Setup:
    """The same, each conversation's system prompt opened by a billing header of its own."""
    return replace(setup, trace=replace(setup.trace, billing_header=True))


def compare(
    setup: Setup, policies: Iterable[str] = POLICIES, *, header: bool = False
) -> dict[str, dict[str, Any]]:
    """Each policy's figures; `header` gives every router the session header."""
    found = {}
    for policy in policies:
        found[policy] = measure(policy, setup, header=header or policy == _HEADER_GIVEN)
        print(f"{setup.trace.variant} {setup.workers} {policy}: {found[policy]}", file=sys.stderr)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--real", action="store_true", help="two real CPU engines instead")
    parser.add_argument("--variant", choices=VARIANTS, help="this trace alone")
    parser.add_argument("--trace", metavar="FILE", help="a trace in Mooncake's format alone")
    options = parser.parse_args()
    if options.trace:
        options.variant = MOONCAKE
    if options.real:
        from bench.trace.real_engines import measure_real

        run("routing", measure_real)
    elif options.variant:
        setup = setup_of(options.variant, options.trace, is_quick=options.size == "quick")
        run("routing", partial(measure_one, setup))
    elif options.size == "smallest":
        run("routing", measure_smallest)
    else:
        run("routing", partial(measure_all, is_quick=options.size == "quick"))


def setup_of(variant: str, file: str | None, *, is_quick: bool) -> Setup:
    """The quick or the full setup with another trace."""
    setup = quick_setup() if is_quick else full_setup()
    return replace(setup, trace=replace(setup.trace, variant=variant, file=file))


def measure_one(setup: Setup) -> dict[str, Any]:
    """All routers on one trace."""
    ideal = round(ideal_ratio(setup.trace), 4)
    return {"workers": setup.workers, "ideal_cached_ratio": ideal, **compare(setup)}


def measure_smallest() -> dict[str, Any]:
    """Our router alone, for some seconds on two small engines."""
    trace = TraceConfig(sessions=4, scale=0.1, pace=40, ramp_s=1)
    engine = _engine(scale=0.1, decode_s=0.0001, capacity_tokens=20_000)
    setup = Setup(trace, engine, workers=2, limit_s=3)
    return {"workers": setup.workers, **compare(setup, ("ours",))}


def measure_all(*, is_quick: bool) -> dict[str, Any]:
    """All routers on all traces."""
    make = quick_setup if is_quick else full_setup
    setup = make()
    found: dict[str, Any] = {
        "workers": setup.workers,
        "sessions": setup.trace.sessions,
        "ideal_cached_ratio": round(ideal_ratio(setup.trace), 4),
        **compare(setup),
    }
    found["requests"] = sum(found[policy]["requests"] for policy in POLICIES)
    for variant, policies in (("no_sharing", POLICIES), ("one_harness", _COLLAPSING)):
        for policy, figures in compare(make(variant), policies).items():
            found[policy][variant] = figures
    if not is_quick:
        for field, figures in further_cases().items():
            for policy, values in figures.items():
                found[policy][field] = values
    return found


def further_cases() -> dict[str, dict[str, dict[str, Any]]]:
    """Eight workers, the headers, and eight harnesses, by the name of the field."""
    team = full_setup()
    return {
        "eight_workers": compare(full_setup(workers=8)),
        "many_harnesses": compare(full_setup("many_harnesses")),
        "session_header": compare(team, header=True),
        "no_session_header": {_HEADER_GIVEN: measure(_HEADER_GIVEN, team, header=False)},
        "billing_header": compare(with_billing_header(team)),
        "both_headers": compare(with_billing_header(team), ("ours", _HEADER_GIVEN), header=True),
    }


if __name__ == "__main__":
    main()
