"""One policy in front of a fleet of simulated engines, as large as it may be: what
`bench/scale.py` runs many of.

Sessions have the published shape, at a tenth of its size: so many for each engine, and of each its
first calls. So a fleet of any size has the same work for each engine. People's first calls are made
and not counted, because a fleet that has just begun computes every harness's prefix on every
engine, which one that runs for long has done. `share_of_ideal_from_start` counts them, too.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from bench.lib.script import precondition, require
from bench.sim.engine import Engine, EngineConfig
from bench.sim.our_router import OurRouter, OurRouters
from bench.sim.policies import CacheAware, LeastLoaded, LMetric, PowerOfTwo, RoundRobin
from bench.sim.virtual_time import Churn, Feed, Policy, Run
from bench.trace.agents import Agent, TraceConfig, first_calls
from bench.trace.calls import Call, Ideal, compile_calls, ideal_of
from bench.trace.variants import make_trace
from radix.index_memory import index_bytes

SESSIONS = 4
"""Of people, for each engine."""
CALLS, WARM_CALLS = 10, 3
_SCALE = 0.1
_SAMPLED = 20


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy, and what it learns how late. churn: so much of the fleet leaves every 5 s."""

    policy: Callable[[int], Policy]
    feed: Feed | None = None
    churn: float = 0.0


ARMS: dict[str, Arm] = {
    "ours": Arm(OurRouter),
    **{
        f"ours_{balancers}_balancers": Arm(partial(OurRouters, balancers=balancers))
        for balancers in (2, 4, 16)
    },
    "ours_16_alone": Arm(partial(OurRouters, balancers=16, shares=False)),
    "round_robin": Arm(lambda engines: RoundRobin()),
    "least_loaded": Arm(lambda engines: LeastLoaded()),
    "power_of_two": Arm(lambda engines: PowerOfTwo()),
    "cache_aware": Arm(lambda engines: CacheAware()),
    "lmetric": Arm(lambda engines: LMetric()),
    "ours_lag_500_ms": Arm(OurRouter, Feed(lag_s=0.5)),
    "ours_lag_2_s": Arm(OurRouter, Feed(lag_s=2.0)),
    "ours_lag_5_s": Arm(OurRouter, Feed(lag_s=5.0)),
    "ours_lossy": Arm(OurRouter, Feed(loss=0.02)),
    "ours_lossy_lag_5_s": Arm(OurRouter, Feed(lag_s=5.0, loss=0.02)),
    "ours_churn": Arm(OurRouter, churn=0.02),
    "ours_churn_16_balancers": Arm(partial(OurRouters, balancers=16), churn=0.02),
}
PEERS = ("round_robin", "least_loaded", "power_of_two", "cache_aware", "lmetric")
FEEDS = ("ours_lag_500_ms", "ours_lag_2_s", "ours_lag_5_s", "ours_lossy", "ours_lossy_lag_5_s")
CHURN = ("ours_churn", "ours_churn_16_balancers")


@dataclass(frozen=True, slots=True)
class Job:
    """A run: an arm, the engines, and the seed of the trace."""

    arm: str
    engines: int
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to. `cached` and `ideal`: tokens read and tokens of prompts, of the calls
    that count and of all."""

    job: Job
    ttft_ms: list[float]
    cached: tuple[int, int]
    cached_of_all: tuple[int, int]
    ideal: Ideal
    ideal_of_all: Ideal
    load_max_over_mean: float
    busy: float
    moved: float
    seconds: float
    lines: int
    segments: int
    index_segments: int
    decisions_us: list[float]
    processor_s: float


@lru_cache(maxsize=2)
def trace_for(
    engines: int, seed: int
) -> tuple[Sequence[Agent], Sequence[Sequence[Call]], Ideal, Ideal]:
    """The agents of a fleet, their calls, and the ideal of those that count and of all."""
    config = TraceConfig("published_kind", SESSIONS * engines, scale=_SCALE, seed=seed)
    agents = first_calls(make_trace(config), CALLS)
    calls = compile_calls(agents)
    return agents, calls, ideal_of(agents, calls, counts=counts), ideal_of(agents, calls)


def counts(call: Call) -> bool:
    """Whether the figures are about a call."""
    return call.turn >= WARM_CALLS or call.kind == "subagent"


def engine() -> EngineConfig:
    """At the trace's scale. It holds the same share of its sessions' tokens as in `bench.sim`."""
    stock = EngineConfig()
    return replace(
        stock,
        capacity_tokens=int(stock.capacity_tokens * _SCALE * SESSIONS / 10),
        prefill_tokens_per_s=stock.prefill_tokens_per_s * _SCALE,
        chunk_tokens=int(stock.chunk_tokens * _SCALE),
    )


def run_job(job: Job) -> Result:
    """Runs one. Raises InvariantBroken, or NotValid if the load is not what it should be."""
    logging.disable(logging.WARNING)  # engines that leave are no news here
    agents, calls, ideal, ideal_of_all = trace_for(job.engines, job.seed)
    arm = ARMS[job.arm]
    policy: Any = arm.policy(job.engines)
    leaving = round(arm.churn * job.engines) or 1
    churn = Churn(every_s=5.0, engines=leaving, away_s=10.0) if arm.churn else None
    engines = [Engine(engine()) for _ in range(job.engines)]
    run = Run(agents, calls, policy, engines, arm.feed, churn, counts)
    began_s = time.process_time()
    run.all()
    processor_s = time.process_time() - began_s
    figures = run.figures(ideal)
    named = {"arm": job.arm, "engines": job.engines}
    require(run.answered == ideal_of_all.requests, "every call is answered", **named)
    require(figures.requests == ideal.requests, "every call that counts is counted", **named)
    precondition(figures.busy < 0.9, "engines are not overloaded", busy=figures.busy, **named)
    index = getattr(policy, "index", None)
    if index is not None:
        require(len(index) < index.limit_segments, "the index is not full", **named)
        check_index(policy, engines, named)
    return Result(
        job,
        run.ttft_ms,
        run.cached,
        run.cached_of_all,
        ideal,
        ideal_of_all,
        figures.load_max_over_mean,
        figures.busy,
        figures.moved,
        figures.seconds,
        run.lines,
        run.segments,
        0 if index is None else len(index),
        getattr(policy, "decisions_us", []),
        round(processor_s, 2),
    )


def check_index(policy: Any, engines: Sequence[Engine], named: dict[str, Any]) -> None:
    """Once all lines have come, the index says of engines what they hold."""
    for worker in range(0, len(engines), max(1, len(engines) // _SAMPLED)):
        found = {segment for _, segment, _ in policy.index.snapshot(worker)}
        held = set(engines[worker].segments.held)
        lacks, more = len(held - found), len(found - held)
        is_same = not lacks and not more
        require(is_same, "the index holds what engines hold", lacks=lacks, more=more, **named)


def merged(results: Sequence[Result]) -> dict[str, Any]:
    """The figures of one arm and size, over its seeds."""
    ttft = statistics.quantiles(
        [ms for each in results for ms in each.ttft_ms], n=100, method="inclusive"
    )
    first, mean = results[0], statistics.mean
    seconds = sum(each.seconds for each in results)
    share, cached_ratio = _share([(each.cached, each.ideal) for each in results])
    from_start, _ = _share([(each.cached_of_all, each.ideal_of_all) for each in results])
    found: dict[str, Any] = {
        "requests": sum(len(each.ttft_ms) for each in results),
        "cached_ratio": cached_ratio,
        "share_of_ideal": share,
        "share_of_ideal_from_start": from_start,
        "ttft_p50_ms": round(ttft[49], 1),
        "ttft_p99_ms": round(ttft[98], 1),
        "load_max_over_mean": round(mean(each.load_max_over_mean for each in results), 3),
        "busy": round(mean(each.busy for each in results), 3),
        "moved": round(mean(each.moved for each in results), 4),
        "processor_s": round(sum(each.processor_s for each in results), 1),
    }
    if decisions := [us for each in results for us in each.decisions_us]:
        cuts = statistics.quantiles(decisions, n=100, method="inclusive")
        found |= {
            "decision_us": round(cuts[49], 1),
            "decision_mean_us": round(mean(decisions), 1),
            "decision_p99_us": round(cuts[98], 1),
            "events_per_s": round(sum(each.lines for each in results) / seconds, 1),
            "segments_per_s": round(sum(each.segments for each in results) / seconds, 1),
            "index_segments": first.index_segments,
            "index_bytes": index_bytes(max(first.index_segments, 1)),
        }
    return found


def _share(pairs: Sequence[tuple[tuple[int, int], Ideal]]) -> tuple[float, float]:
    """The cached share of prompt tokens over the ideal one, and that share."""
    cached = sum(cached for (cached, _), _ in pairs) / sum(prompt for (_, prompt), _ in pairs)
    best = sum(ideal.cached_tokens for _, ideal in pairs) / sum(
        ideal.prompt_tokens for _, ideal in pairs
    )
    return round(cached / best, 4), round(cached, 4)
