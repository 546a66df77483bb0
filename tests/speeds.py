"""Do the tests of engines hold on a machine of any speed?

    make test-speeds

runs them as they are, with each forward pass five times slower, and on one core beside a busy loop,
five times each, and prints every test that failed at least once. It is for before a release.
`python -m tests.speeds --times 1 tests/engine/scheduler tests/node` runs less, each path by itself.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

from sgl_ext_cpu.gate import SLOWER

ROOT = Path(__file__).parents[1]
_FACTOR = 5


@dataclass(frozen=True)
class Speed:
    """How a run is slowed down.

    variables: of all its processes. core: the only one that it may use, beside a busy loop; None:
        all. processes: of pytest.
    """

    variables: dict[str, str] = field(default_factory=dict)
    core: int | None = None
    processes: int = 2


SPEEDS = {
    "as it is": Speed(),
    f"each forward pass {_FACTOR} times slower": Speed({SLOWER: str(_FACTOR)}),
    "one core beside a busy loop": Speed(core=0, processes=1),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=5, help="how often at each speed")
    parser.add_argument("--speed", choices=SPEEDS, action="append", help="this speed alone")
    parser.add_argument("paths", nargs="*", default=["tests"])
    options = parser.parse_args()
    failures: Counter[tuple[str, str]] = Counter()
    names = options.speed or list(SPEEDS)
    for name in names:
        for number, path in product(range(options.times), options.paths):
            ran, failed = run(SPEEDS[name], [path])
            print(f"{path}, {name}, {number + 1}: {ran} ran, {len(failed)} failed", flush=True)
            failures.update((name, test) for test in failed)
    print(table(failures, names, options.times))
    return 1 if failures else 0


def table(failures: Mapping[tuple[str, str], int], names: Sequence[str], times: int) -> str:
    """Every test that failed at least once, and how often at each speed."""
    if not failures:
        return f"every test passed each of {times} times: {', '.join(names)}"
    lines = [f"| failed of {times} times | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for test in sorted({test for _, test in failures}):
        counts = [str(failures.get((name, test), 0)) for name in names]
        lines.append(f"| {test} | {' | '.join(counts)} |")
    return "\n".join(lines)


def run(speed: Speed, paths: Sequence[str]) -> tuple[int, list[str]]:
    """How many tests ran at this speed, and which failed."""
    with tempfile.TemporaryDirectory(prefix="speeds-") as folder, beside(speed.core):
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "engine and not slow"]
        command += ["-n", str(speed.processes), f"--junitxml={report}", "-p", "no:cacheprovider"]
        if speed.core is not None:
            command = ["taskset", "-c", str(speed.core), *command]
        environ = {**os.environ, **speed.variables}
        done = subprocess.run(
            [*command, *paths], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
        )
        if not report.exists():
            raise SystemExit(done.stdout[-4000:] + done.stderr[-4000:])
        return outcomes(report.read_text())


def outcomes(report: str) -> tuple[int, list[str]]:
    """How many tests of a JUnit report ran, and the names of those that failed."""
    ran, failed = 0, []
    for case in ElementTree.fromstring(report).iter("testcase"):
        if case.find("skipped") is None:
            ran += 1
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return ran, failed


@contextmanager
def beside(core: int | None) -> Iterator[None]:
    """A busy loop on this core, if there is one."""
    if core is None:
        yield
        return
    busy = subprocess.Popen(["taskset", "-c", str(core), sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


if __name__ == "__main__":
    sys.exit(main())
