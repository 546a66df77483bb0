"""What does a lookup in the prefix index cost, and does the cost stay flat as the index grows?

The same prompts are in our index, as segments of about 1,024 tokens, and in the `RadixTree` of
Dynamo's KV router, as blocks of 64: chains of 130 segments, at 10^4 to 10^6 segments and 1 to
1,024 workers (see `bench.lib.index_side`). Each index has a process of its own. For each number
of workers, rounds of lookups visit all indexes in turn, and the figures are medians over rounds.
Both indexes must find the same workers. Bytes are the growth of a process's resident memory.

Dynamo's lookup is that of its Python binding, which passes each call to a thread. `empty_us` is
the cost of a call without a prompt; one of the ratios subtracts it.

`by_workers` has times by the size of the fleet, at 10^5 segments. A `decision` is that of a whole
router: the lookup, the views of the workers that it needs, and the choice. For Dynamo it is
`select` of its `SelectionService`, with an empty index, so without the lookup: its least.

Dynamo is installed into an environment of its own when first needed. If that fails, `dynamo` is
null and stderr says why. `--quick` runs fewer rounds, and has 10^6 segments for the most workers
only: to fill Dynamo with them takes a minute and 2 GB.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sgl_ext_cpu.peers import install_package

from bench.lib.index_side import BLOCK_TOKENS, BLOCKS, LOOKUPS
from bench.lib.script import Size, parser_of, require, run

DYNAMO = "ai-dynamo-runtime"
DYNAMO_VERSION = "1.6.1"
SEGMENTS = (10_000, 100_000, 1_000_000)
WORKERS = (1, 8, 64, 256, 1_024)
FLEET_SEGMENTS = 100_000
_ROOT = Path(__file__).parent.parent

Figures = dict[str, float]
Cells = dict[str, dict[str, Figures]]
"""Figures by segments, by workers."""


def main() -> None:
    size: Size = parser_of(__doc__).parse_args().size
    run("index", partial(compare, size))


def compare(size: Size) -> dict[str, Any]:
    """Both indexes at all sizes; ours alone, and small, in the smallest form."""
    is_smallest = size == "smallest"
    peer = None if is_smallest else install_dynamo()
    sizes, all_workers = (SEGMENTS[:1], WORKERS[:1]) if is_smallest else (SEGMENTS, WORKERS)
    rounds = {"full": 15, "quick": 5, "smallest": 1}[size]
    ours: Cells = {str(segments): {} for segments in sizes}
    dynamo: Cells = {str(segments): {} for segments in sizes}
    for workers in all_workers:
        few = size == "quick" and workers != all_workers[-1]
        used = sizes[: -1 if few else None]
        sides = [Side("ours", Path(sys.executable), segments) for segments in used]
        if peer:
            sides += [Side("dynamo", peer, segments) for segments in used]
        measured = measure(sides, workers, rounds)
        for side, figures in measured.items():
            cells = ours if side.name == "ours" else dynamo
            cells[str(side.segments)][str(workers)] = figures
            print(side.name, side.segments, workers, figures, file=sys.stderr, flush=True)
    return report(ours, dynamo if peer else None)


@dataclass(frozen=True, slots=True)
class Side:
    """An index of one kind and size, and the Python that can run it."""

    name: str
    python: Path
    segments: int


def measure(sides: list[Side], workers: int, rounds: int) -> dict[Side, Figures]:
    """Fills one side after the other, then times lookups on each in turn, `rounds` times.

    Two sides of a size must find the same.
    """
    filled: dict[Side, Figures] = {}
    timed: dict[Side, list[dict[str, Any]]] = {side: [] for side in sides}
    with ExitStack() as stack:
        running = {}
        for side in sides:
            running[side] = stack.enter_context(running_side(side, workers))
            filled[side] = json.loads(_read_line(running[side]))
        for number in range(rounds + 1):
            for side in sides if number % 2 else reversed(sides):
                timed[side].append(_ask(running[side], number))
            digests = {(side.segments, timed[side][-1].pop("digest")) for side in sides}
            is_same = len(digests) == len({side.segments for side in sides})
            require(is_same, "both indexes find the same", workers=workers, digests=digests)
    # The first round warms up.
    return {side: {**filled[side], **_medians(timed[side][1:])} for side in sides}


@contextmanager
def running_side(side: Side, workers: int) -> Iterator[subprocess.Popen[str]]:
    """A process with one index, which ends with the context."""
    arguments = [side.name, str(side.segments), str(workers)]
    process = subprocess.Popen(
        [str(side.python), "-m", "bench.lib.index_side", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def install_dynamo() -> Path | None:
    """The Python that has Dynamo, made once a checkout; None, and why on stderr, if it fails."""
    try:
        python = install_package(DYNAMO, DYNAMO_VERSION)
        subprocess.run([python, "-c", "import dynamo._core"], check=True, capture_output=True)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(f"no {DYNAMO}: {error}", file=sys.stderr)
        return None
    return python


def report(ours: Cells, dynamo: Cells | None) -> dict[str, Any]:
    """All figures, those of the most segments and workers first."""
    fewest, *_, largest = *ours, *ours
    most = list(ours[largest])[-1]
    large = ours[largest][most]
    ratios: dict[str, float] = {}
    if dynamo:
        peer = dynamo[largest][most]
        walk_us = peer["lookup_us"] - peer["empty_us"]
        ratios["dynamo_lookup_over_ours"] = peer["lookup_us"] / large["lookup_us"]
        ratios["dynamo_lookup_less_empty_over_ours"] = walk_us / large["lookup_us"]
        ratios["dynamo_bytes_over_ours"] = peer["bytes_per_segment"] / large["bytes_per_segment"]
    return {
        "lookup_us_largest": large["lookup_us"],
        "lookups_per_s_largest": large["lookups_per_s"],
        "bytes_per_segment": large["bytes_per_segment"],
        "lookup_growth": large["lookup_us"] / ours[fewest][most]["lookup_us"],
        **ratios,
        "by_workers": by_workers(ours, dynamo),
        "ours": _summary(ours),
        "dynamo": {"version": DYNAMO_VERSION, **_summary(dynamo)} if dynamo else None,
    }


def by_workers(ours: Cells, dynamo: Cells | None) -> dict[str, dict[str, Any]]:
    """Times in microseconds by the number of workers, at one number of segments."""
    segments = str(FLEET_SEGMENTS) if str(FLEET_SEGMENTS) in ours else next(iter(ours))
    found: dict[str, dict[str, Any]] = {}
    for workers, figures in ours[segments].items():
        found[workers] = {"segments": int(segments), "ours_us": _times(figures)}
        if dynamo:
            found[workers]["dynamo_us"] = _times(dynamo[segments][workers])
    return found


def _times(figures: Figures) -> dict[str, float]:
    names = {
        "lookup_p50": "lookup_us",
        "lookup_p99": "lookup_p99_us",
        "decision_p50": "decision_us",
        "decision_p99": "decision_p99_us",
        "apply_per_segment": "apply_us_per_segment",
    }
    return {name: figures[field] for name, field in names.items() if field in figures}


def _summary(cells: Cells) -> dict[str, Any]:
    largest = list(list(cells.values())[-1].values())[-1]
    bytes_per_token = largest["bytes_per_segment"] / (BLOCKS * BLOCK_TOKENS)
    return {**largest, "bytes_per_prompt_token": bytes_per_token, "sizes": cells}


def _ask(side: subprocess.Popen[str], seed: int) -> dict[str, Any]:
    assert side.stdin is not None
    side.stdin.write(f"{seed} {LOOKUPS}\n")
    side.stdin.flush()
    found: dict[str, Any] = json.loads(_read_line(side))
    return found


def _read_line(side: subprocess.Popen[str]) -> str:
    assert side.stdout is not None
    line = side.stdout.readline()
    if not line:
        raise RuntimeError(f"{side.args!r} ended with {side.wait()}")
    return line


def _medians(rounds: list[dict[str, Any]]) -> Figures:
    medians = {
        name: round(statistics.median(found[name] for found in rounds), 3) for name in rounds[0]
    }
    return {**medians, "lookups_per_s": round(1e6 / medians["lookup_us"])}


if __name__ == "__main__":
    main()
