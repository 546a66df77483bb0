"""How much of the possible cache reuse does each router get from the same workers, and which TTFT?

The trace of a swarm of agents (bench/trace/swarm.py) goes as a closed loop through each router,
a real process, to simulated engines (bench/sim/engine.py) that are started for each run. The
engines of `ours` have the plugin: they strip a billing header, publish prefix events and take
their queues in our order; those of `ours_fcfs` serve first what comes first. The other routers
have stock engines. Only `vllm_router` gets the session header, which its policy needs; other
fields say where all routers get it.

    ours            python -m sgl_ext.balancer.serve
    round_robin     smg --policy round_robin
    least_loaded    smg --policy power_of_two, by its own requests in flight
    sglang_router   its default, cache_aware
    smg             its default, cache_aware
    vllm_router     sticky_least_loaded

`share_of_ideal` compares with one worker that has an infinite cache, over the calls that were
made: calls stop at a run's time limit, so a slow router makes fewer. `read_write` counts output
tokens as written. `load_max_over_mean` is of seconds of prefill. `--quick` halves prompts and
prefill speed. `--shape published_kind` and `published_unkind` send sessions of the published
shape instead (bench/trace/published.py), and `--trace FILE` a trace in Mooncake's format: both with
a tenth of the tokens and pauses, on engines that take a tenth of the time. `--real`
sends a small trace to two real CPU engines: all to one of them, through our balancer, and in
rotation.

`--harnesses`: 128 people with the same harness, or with eight (bench/trace/harness.py), who begin
within five seconds. No router gets a session header but `vllm_router`. `ours_without_events` is
our router in front of stock engines, which only answer. Each figure is the spread of some seeds.
`moves` counts, at the workers, requests that came to another worker than the one before of the
same conversation. `simulated` has many seeds more, of our router alone, without processes.

`--speeds 1,1,0.5,0.25`: engines of these speeds, in virtual time (`bench/sim/speeds.py`): our
router with and without what it learns of them, and policies of other routers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from bench.lib.script import Size, parser_of, run
from bench.lib.spread import spread
from bench.sim.engine import EngineConfig
from bench.sim.seeds import simulate_seeds
from bench.sim.speeds import measure_speeds
from bench.trace import harness
from bench.trace.agents import TraceConfig
from bench.trace.options import add_trace_options, trace_of
from bench.trace.published import VARIANTS as PUBLISHED
from bench.trace.run import FCFS, NO_EVENTS, POLICIES, Setup, ideal_ratio, measure

_HEADER_GIVEN = "vllm_router"
_WITHOUT_HEADER = "vllm_router_without_header"
_OF_SEEDS = (
    "ttft_p50_ms",
    "ttft_p95_ms",
    "ttft_p99_ms",
    "cached_ratio",
    "load_max_over_mean",
    "moves",
)
_ROUTERS = tuple(policy for policy in POLICIES if policy not in ("ours", "least_loaded"))
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


def lapsed_setup(*, is_quick: bool) -> Setup:
    """A tenth of a trace's tokens and times, so that sessions of an hour fit a run of minutes."""
    stock, part = EngineConfig(), 0.1
    trace = TraceConfig("published_kind", sessions=40, scale=part, pace=1 / part)
    engine = replace(
        stock,
        capacity_tokens=int(stock.capacity_tokens * part),
        chunk_tokens=int(stock.chunk_tokens * part),
        prefill_base_s=stock.prefill_base_s * part,
        decode_base_s=stock.decode_base_s * part,
        decode_per_request_s=stock.decode_per_request_s * part,
    )
    return Setup(trace, engine, 4, limit_s=20 if is_quick else 110)


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
    parser.add_argument("--harnesses", action="store_true", help="people with the same harnesses")
    parser.add_argument("--speeds", type=_speeds, help="of the engines, in virtual time")
    add_trace_options(parser)
    options = parser.parse_args()
    if options.trace or options.shape in PUBLISHED:
        setup = lapsed_setup(is_quick=options.size != "full")
    else:
        setup = full_setup() if options.size == "full" else quick_setup()
    if options.real:
        from bench.trace import real_engines

        given = trace_of(parser, options, real_engines.TRACE)
        run("routing", partial(real_engines.measure_real, given or real_engines.TRACE))
    elif options.speeds:
        run("routing", partial(measure_unequal, options.speeds, options.size))
    elif options.harnesses:
        run("routing", partial(measure_harnesses, size=options.size))
    elif given := trace_of(parser, options, setup.trace):
        run("routing", partial(measure_one, replace(setup, trace=given)))
    elif options.size == "smallest":
        run("routing", measure_smallest)
    else:
        run("routing", partial(measure_all, is_quick=options.size == "quick"))


def measure_one(setup: Setup) -> dict[str, Any]:
    """All routers on one trace."""
    ideal = round(ideal_ratio(setup.trace), 4)
    arms = (POLICIES[0], FCFS, *POLICIES[1:])
    return {"workers": setup.workers, "ideal_cached_ratio": ideal, **compare(setup, arms)}


def measure_smallest() -> dict[str, Any]:
    """Our router alone, for some seconds on two small engines."""
    trace = TraceConfig(sessions=4, scale=0.1, pace=40, ramp_s=1)
    engine = _engine(scale=0.1, decode_s=0.0001, capacity_tokens=20_000)
    setup = Setup(trace, engine, workers=2, limit_s=3)
    return {"workers": setup.workers, **compare(setup, ("ours",))}


def harness_setup(variant: str, *, people: int = 128, limit_s: float = 60.0) -> Setup:
    """Half-sized prompts, and people who act at eight times their pace."""
    trace = TraceConfig(variant, sessions=people, calls=12, scale=0.5, pace=8, ramp_s=40)
    return Setup(trace, _engine(scale=0.5, decode_s=0.003, capacity_tokens=400_000), 4, limit_s)


def measure_harnesses(size: Size) -> dict[str, Any]:
    """All routers with people of one harness, and of eight."""
    seeds, simulated, limit_s = {"full": (5, 200, 60.0), "quick": (2, 10, 6.5)}.get(
        size, (1, 1, 5.0)
    )
    policies: tuple[str, ...] = ("ours", NO_EVENTS, *_ROUTERS, _WITHOUT_HEADER)
    if size == "smallest":
        policies = (NO_EVENTS,)
    found: dict[str, Any] = {}
    for variant in harness.VARIANTS:
        setup = harness_setup(variant, people=8 if size == "smallest" else 128, limit_s=limit_s)
        rounds: dict[str, list[dict[str, Any]]] = {policy: [] for policy in policies}
        for seed in range(1, seeds + 1):
            seeded = replace(setup, trace=replace(setup.trace, seed=seed))
            for policy in policies:
                name = policy.removesuffix("_without_header")
                figures = measure(name, seeded, header=policy == _HEADER_GIVEN)
                rounds[policy].append(figures)
                print(f"{variant} {seed} {policy}: {figures}", file=sys.stderr)
        found[variant] = {
            policy: {field: spread([each[field] for each in figures]) for field in _OF_SEEDS}
            for policy, figures in rounds.items()
        }
        found[variant]["simulated"] = simulate_seeds(
            setup.trace, setup.engine, setup.workers, range(1, simulated + 1)
        )
    return {"workers": 4, **found}


def _speeds(text: str) -> tuple[float, ...]:
    speeds = tuple(map(float, text.split(",")))
    if len(speeds) < 2 or not all(0 < speed < inf for speed in speeds):
        raise ValueError(text)
    return speeds


def measure_unequal(speeds: Sequence[float], size: Size) -> dict[str, Any]:
    """Our router with and without learning, and other policies. Sessions begin all the time, as
    nothing is known at first; `crowded` has half as many more, which memory does not hold."""
    if size == "smallest":
        trace = TraceConfig(sessions=4, scale=0.1, pace=40, ramp_s=1)
        engine = _engine(scale=0.1, decode_s=0.0001, capacity_tokens=20_000)
        return measure_speeds({"team": (trace, engine)}, speeds, [1])
    lapsed, team, stock = lapsed_setup(is_quick=False), quick_setup(), EngineConfig()
    # A tenth of the tokens at the usual steps take a tenth of the time.
    engine = replace(
        lapsed.engine,
        decode_base_s=stock.decode_base_s,
        decode_per_request_s=stock.decode_per_request_s,
    )
    sessions = max(2, round(11 * sum(speeds)))
    trace = replace(lapsed.trace, sessions=sessions, ramp_s=600)
    setups = {
        "team": (replace(team.trace, sessions=sessions, ramp_s=400), team.engine),
        **{variant: (replace(trace, variant=variant), engine) for variant in PUBLISHED},
        "crowded": (replace(trace, sessions=sessions * 3 // 2), engine),
    }
    return measure_speeds(setups, speeds, range(1, 6 if size == "full" else 3))


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
