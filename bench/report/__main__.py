"""Measures what this project claims, and writes docs/measured.md.

    make report

runs the benches in quick form: about 45 minutes on two cores that have nothing else to do.
It writes docs/benchmarks.json, docs/measured.md and the README's table.

A run that was interrupted goes on where it ended, unless the code, the machine or the size is
another. `--only` measures these steps alone. Steps that did not run stay on the page as they are.
The exit status is 1 if a step failed or did not run.

What takes longer is left to `--full` and `--only`: load generators of other projects.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from sgl_ext_cpu.node import ROOT

from bench.report import machine
from bench.report.page import page, pictures, with_readme_part
from bench.report.peers import peer_versions
from bench.report.plan import GPU, INSTALLERS, NAMES, Planned, chosen
from bench.report.saved import Saved
from bench.report.shown import only_shown
from bench.report.steps import Result, run_step

JSON, PAGE, README = "docs/benchmarks.json", "docs/measured.md", "README.md"


def main() -> int:
    options = _parser().parse_args()
    if options.page:
        _write(committed(ROOT))
        return 0
    size = "full" if options.full else "quick"
    here = machine.machine()
    key = {"code": machine.code(), "machine": here, "size": size}
    facts = {
        "began": time.strftime("%Y-%m-%d"),
        "commit": machine.commit(),
        "size": size,
        "machine": here,
        "packages": machine.packages(),
        "peers": peer_versions(),
    }
    folder = options.folder.resolve()
    saved, console = Saved(folder / "report.json", key, facts), Console()
    planned = chosen(options.only, is_full=options.full, with_gpu=options.gpu)
    install_for(planned, console)
    console.print(saved.go_on(keep=options.keep, also_ended=options.only is not None))
    try:
        results = measure(planned, saved, options, console)
    except KeyboardInterrupt:
        console.print("Interrupted. The same command goes on from here.")
        return 130
    saved.end()
    _write(with_other_steps(saved.document(), committed(ROOT)))
    console.print(f"Written: {PAGE}")
    bad = [result.name for result in results if result.status in ("failed", "not run")]
    if bad:
        console.print(f"Failed: {', '.join(bad)}. Logs are in {folder}")
    return 1 if bad else 0


def install_for(steps: Sequence[Planned], console: Console) -> None:
    """Installs what these steps compare with, once a checkout, which is in no step's time."""
    for name in dict.fromkeys(name for planned in steps for name in planned.needs):
        try:
            INSTALLERS[name]()
        except RuntimeError as error:  # the step says what it lacks
            console.print(f"{name} could not be installed: {error}")


def measure(
    steps: Sequence[Planned], saved: Saved, options: argparse.Namespace, console: Console
) -> list[Result]:
    """Runs the steps that are not measured yet, and saves each."""
    results = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    last = (TextColumn("{task.completed} of {task.total}"), TimeElapsedColumn())
    with Progress(*columns, *last, console=console) as progress:
        shown = progress.add_task("", total=len(steps))
        for planned in steps:
            if options.only is None and saved.has(planned.name):
                progress.advance(shown)
                continue
            step = planned.step(is_full=options.full)
            about_s = planned.about_s(is_full=options.full)
            progress.update(shown, description=f"{planned.name}, about {about_s:.0f} s")
            result = run_step(step, options.folder / planned.name)
            saved.add(result, planned.command(is_full=options.full), machine.commit())
            why = f": {result.why}" if result.why else ""
            console.print(f"{result.name}: {result.status}, {result.seconds:.0f} s{why}")
            results.append(result)
            progress.advance(shown)
    return results


def committed(root: Path) -> dict[str, Any]:
    """The document that docs/ has; an empty one if there is none."""
    path = root / JSON
    return dict(json.loads(path.read_text())) if path.exists() else {}


def with_other_steps(document: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """A run's document with the steps that only an earlier one of the same size has. Each of them
    says at which commit and on which machine it was measured."""
    if before.get("size") != document["size"]:
        return document
    order = (*NAMES, GPU.name)
    steps = {step["name"]: step for step in (*before["steps"], *document["steps"])}
    ordered = sorted(steps.values(), key=lambda step: order.index(step["name"]))
    peers = {**before["peers"], **document["peers"]}
    return {**document, "peers": peers, "steps": ordered}


def _write(report: dict[str, Any]) -> None:
    document = shown_of(report, ROOT)
    (ROOT / JSON).write_text(json.dumps(document, indent=1) + "\n")
    write_pages(document, ROOT)


def shown_of(report: dict[str, Any], root: Path) -> dict[str, Any]:
    """The report without what neither the page nor the README shows."""
    readme = (root / README).read_text()
    return only_shown(
        report,
        page,
        lambda noted: with_readme_part(readme, noted),
        pictures,
    )


def write_pages(report: dict[str, Any], root: Path) -> None:
    """Writes the page and the README's part."""
    (root / PAGE).write_text(page(report))
    for name, text in pictures(report).items():
        ((root / PAGE).parent / name).write_text(text)
    readme = root / README
    readme.write_text(with_readme_part(readme.read_text(), report))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--full", action="store_true", help="each bench in full: hours")
    parser.add_argument("--gpu", action="store_true", help="and `make gpu-report`")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument(
        "--keep", action="store_true", help="keep an earlier run's steps, whatever has changed"
    )
    parser.add_argument(
        "--page", action="store_true", help=f"measure nothing: write the page from {JSON}"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / ".run/report", help="logs and state")
    return parser


if __name__ == "__main__":
    sys.exit(main())
