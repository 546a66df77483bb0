"""How many coding agents can an engine serve, as people really used them, and what do routers add?

    python -m bench.recorded [--quick] [--sessions FILE] [--part NAME]

Recorded sessions of Claude Code (`bench/recorded/sessions.py`) on simulated engines in virtual time
(`bench/sim`), with the balancer's own router and queue and the engines' own order and pins. So no
figure but those of `real` depends on how fast this machine is. Without the file of sessions the
bench makes some of the same shape, and `sessions` says so.

Parts:

    engine     one engine, from few agents to many: cached share, tokens computed, times
    level      agents within a service level, on one engine and on four: `agents_at`
    gaps       the cached share by the time before a turn
    routers    ours and others on four engines, and in full size on 16
    real       two real engines with a small model (`bench/recorded/real_engines.py`): whether the
               answers are the same, and what the caches are read for

A turn is within the level if its first token comes in the time that an idle engine needs to
compute the mean prompt twice, and its stream has a fifth of a lone one's speed. `agents_at` is the
number of agents at which 95% of turns are, between two numbers that were measured, or the most that
was measured. `by_seed` has the ratios of each seed by itself: one run of a seed may be far off.

`agents_vs_stock` is ours over stock on one engine, `agents_vs_hicache` the same where both have
host memory, and `agents_vs_best_router` ours over the best of the others on four. `behind_any_arm`
has each arm that is ahead of ours with the figure in which: beyond MARGIN, which two runs with
other seeds differ by.

Figures are of the sessions for judging; `--learning` takes the others, by which settings may be
chosen.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.lib.script import Size, parser_of, precondition, run
from bench.lib.spread import ratio_spread
from bench.recorded import real_engines
from bench.recorded.arms import ARMS
from bench.recorded.one_engine import MET, Level, engine_of, level_of, play
from bench.recorded.routers import FIGURES, ROUTERS, behind, route
from bench.recorded.sessions import Session, find_file, made_sessions, read_sessions

PARTS = ("engine", "level", "gaps", "routers", "real")
MARGIN = 0.03


@dataclass(frozen=True, slots=True)
class Amount:
    """grain: of the blocks. one: numbers of agents on one engine. each: on each of four.
    fleets: numbers of engines. seeds: runs of each on one engine; runs: of each on several. real:
    rounds on real engines."""

    grain: int
    seeds: int
    runs: int
    one: tuple[int, ...]
    each: tuple[int, ...]
    fleets: tuple[int, ...]
    others: tuple[str, ...]
    real: int = 0


_ALL = tuple(name for name in ARMS if name not in ("stock", "ours"))
SIZES: dict[Size, Amount] = {
    "full": Amount(
        16,
        3,
        3,
        (8, 16, 24, 28, 32, 36, 40, 44, 48, 56, 64, 80, 96),
        (28, 32, 36, 40, 44, 48),
        (4, 16),
        _ALL,
        real=9,
    ),
    "quick": Amount(
        32,
        3,
        1,
        (24, 32, 40, 48, 56, 64),
        (32, 40, 48),
        (4,),
        ("hicache", "ours_hicache"),
        real=3,
    ),
    "smallest": Amount(32, 1, 1, (4, 8), (4,), (2,), (), real=1),
}
_AT_ROUTERS = 40  # agents for each engine, where routers are compared


class Job(NamedTuple):
    """A run: an arm on one engine, or a router in front of several."""

    name: str
    engines: int
    at_once: int
    seed: int


class Result(NamedTuple):
    """What a run came to. within: the share of turns within the level."""

    job: Job
    figures: dict[str, Any]
    within: float
    by_gap: dict[str, dict[str, float]]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sessions", type=Path, help="recorded sessions (default: where they are)")
    parser.add_argument("--learning", action="store_true", help="the sessions to learn by")
    parser.add_argument("--part", choices=PARTS, help="one part alone")
    options = parser.parse_args()
    try:
        path = find_file(options.sessions)
        sessions = made_sessions(400) if path is None else read_sessions(path)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    wanted = [one for one in sessions if one.is_judging != options.learning]
    parts = PARTS if options.part is None else (options.part,)
    logging.disable(logging.WARNING)
    source = "made" if path is None else "recorded"
    run("recorded", partial(measure, wanted, SIZES[options.size], parts, source))


def measure(
    sessions: Sequence[Session], size: Amount, parts: Sequence[str], source: str
) -> dict[str, Any]:
    """All jobs of these parts, and their figures."""
    precondition(len(sessions) >= 10, "there are sessions enough", sessions=len(sessions))
    level = level_of(engine_of(size.grain), sessions)
    results = dict(_run(jobs_of(size, parts), sessions, size.grain, level))
    found: dict[str, Any] = {"sessions": source, "number": len(sessions), "level": asdict(level)}
    if "engine" in parts or "level" in parts:
        found["engine"] = _table(results, 1)
    if "level" in parts:
        found |= _levels(results, size)
    if "gaps" in parts:
        found["gaps"] = _gaps(results, size)
    if "routers" in parts:
        found |= _routers(results, size)
    if "real" in parts and size.real:
        found["real"] = real = real_engines.measure(sessions, size.real)
        found["wrong_answers"] = real["wrong_answers"]
    return found


def jobs_of(size: Amount, parts: Sequence[str]) -> list[Job]:
    """What to run, the longest first."""
    found: list[Job] = []
    seeds, runs = range(1, size.seeds + 1), range(1, size.runs + 1)
    if "routers" in parts:
        for engines in sorted(size.fleets, reverse=True):
            at_once = _agents_of(size) * engines
            found += [Job(name, engines, at_once, s) for s in runs for name in ROUTERS]
    if "level" in parts:
        four = size.fleets[0]
        found += [Job(n, four, four * k, s) for k in size.each for s in runs for n in ROUTERS]
    if "engine" in parts or "level" in parts:
        arms = ("stock", "ours", *(size.others if "engine" in parts else ()))
        found += [
            Job(n, 1, k, s) for k in sorted(size.one, reverse=True) for s in seeds for n in arms
        ]
    if "gaps" in parts:
        arms = ("stock", "ours", "ours_1h")
        found += [Job(n, 1, _agents_of(size), s) for s in seeds for n in arms]
    return [*dict.fromkeys(found)]


def _agents_of(size: Amount) -> int:
    return min(_AT_ROUTERS, size.each[-1])


def run_job(job: Job, sessions: Sequence[Session], grain: int, level: Level) -> Result:
    """Plays one job."""
    if job.engines == 1:
        played = play(ARMS[job.name], sessions, job.at_once, grain=grain, seed=job.seed)
    else:
        played = route(job.name, sessions, job.engines, job.at_once, grain=grain, seed=job.seed)
    return Result(job, played.figures(), played.within(level), played.by_gap())


def _run(
    jobs: Sequence[Job], sessions: Sequence[Session], grain: int, level: Level
) -> Iterable[tuple[Job, Result]]:
    processes = max(1, min(len(os.sched_getaffinity(0)), 8))
    work = partial(run_job, sessions=sessions, grain=grain, level=level)
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for result in pool.imap_unordered(work, jobs):
            print(result.job, round(result.within, 3), result.figures, file=sys.stderr, flush=True)
            yield result.job, result


def _table(results: Mapping[Job, Result], engines: int) -> dict[str, dict[str, Any]]:
    """The figures of each arm by the number of agents: the mean of the seeds."""
    found: dict[str, dict[str, Any]] = {}
    for job in sorted(results):
        if job.engines == engines and str(job.at_once) not in found.get(job.name, {}):
            found.setdefault(job.name, {})[str(job.at_once)] = _mean(results, job)
    return found


def _mean(results: Mapping[Job, Result], like: Job) -> dict[str, Any]:
    runs = [one for job, one in results.items() if job[:3] == like[:3]]
    figures = {
        name: round(statistics.mean(one.figures[name] for one in runs), 4)
        for name in runs[0].figures
    }
    return {**figures, "within": round(statistics.mean(one.within for one in runs), 4)}


def _levels(results: Mapping[Job, Result], size: Amount) -> dict[str, Any]:
    four = size.fleets[0]
    one, more = _table(results, 1), _table(results, four)
    # An arm that another part ran with one number of agents says nothing here.
    at_one = {name: agents_at(table) for name, table in one.items() if len(table) > 1}
    at_four = {name: agents_at(table) for name, table in more.items()}
    by_seed = {name: agents_by_seed(results, name, 1) for name in at_one}
    found: dict[str, Any] = {
        "agents_at": {"1": at_one, str(four): at_four},
        "fleet": {str(four): more},
    }
    if at_one["stock"]:
        found["agents_vs_stock"] = round(at_one["ours"] / at_one["stock"], 3)
        found["by_seed"] = {"ours / stock": ratio_spread(by_seed["ours"], by_seed["stock"])}
    if at_one.get("hicache"):
        found["agents_vs_hicache"] = round(at_one["ours_hicache"] / at_one["hicache"], 3)
        ratio = ratio_spread(by_seed["ours_hicache"], by_seed["hicache"])
        found["by_seed"]["ours_hicache / hicache"] = ratio
    best = max(at_four, key=lambda name: (name != "ours", at_four[name]))
    if at_four[best]:
        found["agents_vs_best_router"] = round(at_four["ours"] / at_four[best], 3)
        found["best_router"] = best
    return found


def agents_at(table: Mapping[str, Mapping[str, float]]) -> float:
    """The number of agents at which MET of all turns are within the level, by a straight line
    between the last number that is and the first that is not. The most that was measured if all
    are."""
    points = sorted((int(number), figures["within"]) for number, figures in table.items())
    last = (0, 1.0)
    for number, within in points:
        if within < MET:
            low, share = last
            return round(low + (number - low) * (share - MET) / (share - within), 1)
        last = (number, within)
    return float(last[0])


def agents_by_seed(results: Mapping[Job, Result], name: str, engines: int) -> list[float]:
    """The number of agents within the level, of each seed by itself."""
    points: dict[int, dict[str, dict[str, float]]] = {}
    for job, one in results.items():
        if (job.name, job.engines) == (name, engines):
            points.setdefault(job.seed, {})[str(job.at_once)] = {"within": one.within}
    return [agents_at(points[seed]) for seed in sorted(points)]


def _gaps(results: Mapping[Job, Result], size: Amount) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for job, result in results.items():
        if job.engines == 1 and job.at_once == _agents_of(size):
            found.setdefault(job.name, result.by_gap)
    return found


def _routers(results: Mapping[Job, Result], size: Amount) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    ahead: list[str] = []
    for engines in size.fleets:
        like = [Job(name, engines, _agents_of(size) * engines, 1) for name in ROUTERS]
        figures = {job.name: _mean(results, job) for job in like}
        tables[str(engines)] = figures
        ahead += [f"{engines}: {one}" for one in behind(figures, MARGIN)]
    return {"routers": tables, "behind_any_arm": ahead, "compared": list(FIGURES)}


if __name__ == "__main__":
    main()
