"""What does it cost to ask who holds a prefix, and does that stay flat as the index grows?

The same prompts go into our index, as segments of about 1,024 tokens, and into the
`RadixTree` of Dynamo's KV router, as blocks of 64: chains of 130 segments, at 10^4 to
10^6 segments and 8 to 1,024 workers (see `bench._index_side`). Each index is in a
process of its own; rounds of lookups alternate between the two, and what is reported
are medians over the rounds. Both must find the same. Bytes are growth of the process's
resident memory. Dynamo's lookup is its Python binding's, which hands each call to a
thread; `empty_us` is what that costs without a prompt.

Dynamo is installed on first use into an environment of its own; where it cannot be had,
`dynamo` is null and why is on stderr. `--quick` runs fewer rounds, and fills Dynamo at
10^6 segments for the most workers only, as that takes a minute and 2 GB each time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench._index_side import BLOCK_TOKENS, BLOCKS

DYNAMO = "ai-dynamo-runtime"
DYNAMO_VERSION = "1.6.1"
SEGMENTS = (10_000, 100_000, 1_000_000)
WORKERS = (8, 64, 1_024)
LOOKUPS = 500
_ROOT = Path(__file__).parent.parent

Figures = dict[str, float]
Cells = dict[str, dict[str, Figures]]
"""Figures by segments, by workers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, Dynamo in fewer sizes")
    options = parser.parse_args()
    peer = install_dynamo()
    ours: Cells = {}
    dynamo: Cells = {}
    for segments in SEGMENTS:
        for workers in WORKERS:
            skip = options.quick and segments == SEGMENTS[-1] and workers != WORKERS[-1]
            sides = {"ours": Path(sys.executable)}
            if peer and not skip:
                sides["dynamo"] = peer
            measured = measure(sides, segments, workers, rounds=5 if options.quick else 15)
            for name, cells in (("ours", ours), ("dynamo", dynamo)):
                if name in measured:
                    cells.setdefault(str(segments), {})[str(workers)] = measured[name]
                    print(segments, workers, name, measured[name], file=sys.stderr, flush=True)
    print(json.dumps(report(ours, dynamo)))


def measure(sides: dict[str, Path], segments: int, workers: int, rounds: int) -> dict[str, Figures]:
    """Fills each side, then times lookups on one after the other, `rounds` times.

    Raises RuntimeError if the sides do not find the same.
    """
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(running_side(python, name, segments, workers))
            for name, python in sides.items()
        }
        filled = {name: json.loads(_read_line(side)) for name, side in running.items()}
        timed: dict[str, list[dict[str, Any]]] = {name: [] for name in running}
        for number in range(rounds + 1):
            for name in sorted(running, reverse=number % 2 == 0):
                timed[name].append(_ask(running[name], number))
            if len({timed[name][-1].pop("digest") for name in running}) > 1:
                raise RuntimeError(f"{segments} segments, {workers} workers: the answers differ")
        return {
            name: {**filled[name], **_medians(found[1:])}  # the first round warms up
            for name, found in timed.items()
        }


@contextmanager
def running_side(
    python: Path, name: str, segments: int, workers: int
) -> Iterator[subprocess.Popen[str]]:
    """A process with one index, which ends with the context."""
    process = subprocess.Popen(
        [str(python), "-m", "bench._index_side", name, str(segments), str(workers)],
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
    folder = _ROOT / ".models" / "peers" / f"{DYNAMO}-{DYNAMO_VERSION}"
    python = folder / "bin" / "python"
    if (folder / "installed").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    install = [str(python), "-m", "pip", "install", "-q", f"{DYNAMO}=={DYNAMO_VERSION}"]
    for command in ([sys.executable, "-m", "venv", str(folder)], install):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"no {DYNAMO}: {(done.stderr or done.stdout).strip()}", file=sys.stderr)
            return None
    (folder / "installed").touch()
    return python


def report(ours: Cells, dynamo: Cells) -> dict[str, Any]:
    """All figures, those of the most segments and workers first."""
    largest = _largest(ours)
    peer = _summary(dynamo) if dynamo else None
    ratios = {
        f"dynamo_{name}_over_ours": peer[name] / largest[name] if peer else None
        for name in ("lookup_us", "bytes_per_segment")
    }
    return {
        "lookup_us_largest": largest["lookup_us"],
        "lookups_per_s_largest": 1e6 / largest["lookup_us"],
        "bytes_per_segment": largest["bytes_per_segment"],
        "lookup_growth": largest["lookup_us"]
        / ours[str(SEGMENTS[0])][str(WORKERS[0])]["lookup_us"],
        **ratios,
        "ours": _summary(ours),
        "dynamo": peer and {"version": DYNAMO_VERSION, **peer},
    }


def _summary(cells: Cells) -> dict[str, Any]:
    largest = _largest(cells)
    tokens = BLOCKS * BLOCK_TOKENS
    return {
        **largest,
        "bytes_per_prompt_token": largest["bytes_per_segment"] / tokens,
        "sizes": cells,
    }


def _largest(cells: Cells) -> Figures:
    return cells[str(SEGMENTS[-1])][str(WORKERS[-1])]


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
    medians = {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}
    return {**medians, "lookups_per_s": 1e6 / medians["lookup_us"]}


if __name__ == "__main__":
    main()
