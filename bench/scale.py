"""Does routing stay as good and as cheap with a thousand engines and many balancers?

The project's own router, with its placement, index and sessions, in front of simulated engines in
virtual time (`bench/sim/fleets.py`): 4 to 1,000 engines, each with the same work. Arms, on the same
traces:

    ours                        one balancer
    ours_16_balancers, ...      balancers that share a store, so that each learns the others'
                                placements and loads a moment later; each call comes to one of
                                them by chance
    ours_16_alone               without a store: they know of each other's requests only what
                                engines publish
    ours_lag_5_s, ours_lossy    events that come late, and of which some are lost
    ours_churn                  engines that drain and come back empty
    round_robin, least_loaded, power_of_two, cache_aware, lmetric
                                policies of other routers (`bench/sim/policies.py`)

Small fleets run with several seeds, so that their percentiles are of as many requests.
`share_of_ideal` compares with one worker that has an infinite cache, without each agent's first
calls; `share_of_ideal_from_start` counts these, too. `events_per_s` and `segments_per_s` are what
one balancer receives. Decisions are timed while nothing else runs. `decisions` has those of one
router with 1,000 workers and five million segments in its index.

`balancers_16_over_1` is of TTFT p99, with the most engines that both arms have. `targets_missed`
names targets that a figure misses. `--quick` has three sizes, the other arms with 64 engines alone,
and one million segments.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from bench.lib.index_side import decision_times
from bench.lib.script import Size, parser_of, require, run
from bench.sim.fleets import CHURN, FEEDS, PEERS, Job, Result, merged, run_job, trace_for

SIZES: dict[Size, tuple[int, ...]] = {
    "full": (4, 16, 64, 256, 1_000),
    "quick": (4, 64, 1_000),
    "smallest": (4, 40),
}
BALANCERS = ("ours_2_balancers", "ours_4_balancers", "ours_16_balancers")
_OTHER_ARMS = (*BALANCERS, "ours_16_alone", *PEERS, *FEEDS, *CHURN)
_LEAST_ENGINES = 192  # over the seeds of a size
TARGETS = {
    "decision_us_1000": 100.0,
    "ttft_p99_1000_over_4": 1.2,
    "balancers_16_over_1": 1.1,
}
"""At most; and `share_of_ideal_1000` at least LEAST_SHARE."""
LEAST_SHARE = 0.98


def main() -> None:
    run("scale", partial(measure, parser_of(__doc__).parse_args().size))


def jobs_of(size: Size) -> list[Job]:
    """The longest first."""
    sizes = SIZES[size]
    most, middle = sizes[-1], sizes[len(sizes) // 2]
    found = [Job("ours", most)]
    if size == "smallest":
        return [*found, Job(BALANCERS[-1], most), Job("ours", sizes[0])]
    for engines in reversed(sizes):
        arms = ["ours", *_OTHER_ARMS] if size == "full" or engines == middle else ["ours"]
        seeds = range(1, 1 + max(1, _LEAST_ENGINES // engines))
        found += [Job(arm, engines, seed) for seed in seeds for arm in arms]
    return [*dict.fromkeys(found)]


def measure(size: Size) -> dict[str, Any]:
    """All arms and sizes."""
    jobs = jobs_of(size)
    trace_for(jobs[0].engines, jobs[0].seed)  # the processes inherit it
    gc.collect()
    gc.freeze()
    results: list[Result] = []
    segments = {"full": 5_000_000, "quick": 1_000_000, "smallest": 10_000}[size]
    context = multiprocessing.get_context("fork")

    def note(result: Result) -> None:
        results.append(result)
        print(result.job, merged([result]), file=sys.stderr, flush=True)

    with context.Pool(1) as pool:  # nothing beside what times decisions
        note(pool.apply(run_job, (jobs[0],)))
        times = pool.apply(decision_times, (segments, 1_000))
    processes = 1 if size == "smallest" else max(1, min(len(os.sched_getaffinity(0)), 4))
    with context.Pool(processes) as pool:
        for result in pool.imap_unordered(run_job, jobs[1:]):
            note(result)
    return report(results, times)


def report(results: Sequence[Result], decisions: dict[str, float]) -> dict[str, Any]:
    """The figures by size and arm, and those that have a target."""
    sizes = sorted({each.job.engines for each in results})
    by_size: dict[str, dict[str, Any]] = {}
    for engines in sizes:
        of_size = [each for each in results if each.job.engines == engines]
        arms = {
            arm: merged([each for each in of_size if each.job.arm == arm])
            for arm in dict.fromkeys(each.job.arm for each in of_size)
        }
        by_size[str(engines)] = {**arms.pop("ours"), "arms": arms}
    least, most = by_size[str(sizes[0])], by_size[str(sizes[-1])]
    for figures in by_size.values():
        requests = {each["requests"] for each in (figures, *figures["arms"].values())}
        require(len(requests) == 1, "all arms answer the same calls", requests=requests)
    one = [figures for figures in by_size.values() if BALANCERS[-1] in figures["arms"]][-1]
    many = one["arms"][BALANCERS[-1]]
    targets = {
        f"decision_us_{sizes[-1]}": most["decision_us"],
        f"share_of_ideal_{sizes[-1]}": most["share_of_ideal"],
        f"ttft_p99_{sizes[-1]}_over_{sizes[0]}": _ratio(most, least, "ttft_p99_ms"),
        "balancers_16_over_1": _ratio(many, one, "ttft_p99_ms"),
    }
    missed = [name for name, most in TARGETS.items() if targets.get(name, 0.0) > most]
    if targets.get("share_of_ideal_1000", 1.0) < LEAST_SHARE:
        missed.append("share_of_ideal_1000")
    return {**targets, "targets_missed": missed, "decisions": decisions, "sizes": by_size}


def _ratio(one: dict[str, Any], other: dict[str, Any], field: str) -> float:
    return round(float(one[field] / other[field]), 3)


if __name__ == "__main__":
    main()
