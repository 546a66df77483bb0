"""The command line that the fuzzers share."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable


def main(run: Callable[[int, int, bool], Counter[str]], description: str | None) -> None:
    """Runs `run(first, cases, stop)` with the options of the command line, and prints its counts.

    Without --all it ends at the first difference.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--all", action="store_true", help="print every difference")
    options = parser.parse_args()
    begun_s = time.perf_counter()
    counts = run(options.first, options.cases, not options.all)
    print(dict(counts), f"{time.perf_counter() - begun_s:.0f} s")
