"""What is this GPU machine, what does SGLang choose on it, and do our features hold there?

    make gpu-report

runs for at most ten minutes, downloads nothing and puts no large model on the disk. It writes
`report.md` and `report.json` into a folder. A step that fails is named, the others go on, and
the exit status is 1. Without a GPU the same steps run on the CPU platform. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sgl_ext_cpu.node import ROOT, local_model
from sgl_ext_cpu.nursery import Nursery

from bench.gpu.machine import Machine, find_machine, with_model
from bench.gpu.page import page
from bench.report.steps import Result, Step, failed, held, run_step
from sgl_ext.settings.schema import SettingsError

_SHARED = ("facts", "header_strip", "fanout")
_OWN = ("warm_turn", "priority", "pin_flood", "speculative_prefill")
_EQUALITY, _DETERMINISTIC = "equality", "equality_deterministic"
NAMES = (*_SHARED, _EQUALITY, _DETERMINISTIC, *_OWN)
# A first start compiles kernels.
_FIRST_START_S, _ENVIRONMENT_S, _STEP_S = 330.0, 150.0, 150.0


def main() -> int:
    options = _parser().parse_args()
    machine, unusable = Machine(None), ""
    try:
        machine = find_machine()
    except SettingsError as error:
        unusable = str(error)
    run = Run(options, is_cpu=machine.gpu is None and not unusable)
    os.environ |= machine.environment
    run.step(Step("environment", "bench.gpu.environment", limit_s=_ENVIRONMENT_S))
    try:
        if unusable:
            raise LookupError(unusable)
        machine = with_model(machine, run.results[0].figures.get("torch", {}))
        print(f"model {machine.model} ...", end=" ", flush=True)
        model = local_model(machine.model)
        print("ok", flush=True)
    except (LookupError, OSError) as error:
        print(f"FAILED: {error}", flush=True)
        run.results.append(Result("model", "failed", why=str(error)))
        run.write()
    else:
        with _forked(machine, run.folder) as variables:
            measure(run, machine, model, variables)
    wrong = failed(run.results)
    ended = f"failed: {', '.join(wrong)}" if wrong else "all steps ended well"
    print(f"{run.folder / 'report.md'}: {ended}")
    return 1 if wrong else 0


class Run:
    """The steps so far, and the time that is left. It prints each step as it begins and ends, and
    then writes the report, so that one which is cut short is there, too.

    model: the shape of its weights, once it is chosen.
    """

    def __init__(self, options: argparse.Namespace, *, is_cpu: bool) -> None:
        self.model = ""
        self._is_cpu = is_cpu
        self._began = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        self.folder: Path = options.folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.names: Sequence[str] = options.only
        self.results: list[Result] = []
        self._limit_s = 60.0 * options.minutes
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def step(self, step: Step) -> None:
        """Runs a step, if it is one of those to run."""
        if step.name in self.names or step.name == "environment":
            print(f"{step.name} ...", end=" ", flush=True)
            self._note(run_step(step, self.folder / step.name, self._limit_s - self.seconds))

    @contextmanager
    def holding(self, step: Step, written: Path) -> Iterator[bool]:
        """Whether what others share has started; it ends with the block."""
        print(f"{step.name} ...", end=" ", flush=True)
        left_s = self._limit_s - self.seconds
        with held(step, self.folder / step.name, left_s, written) as result:
            self._note(result)
            yield result.status == "ok"

    def leave_out(self, name: str, why: str) -> None:
        """Notes a step that cannot run, if it is one of those to run."""
        if name not in self.names:
            return
        print(f"{name} ...", end=" ", flush=True)
        self._note(Result(name, "not run", why=why))

    def _note(self, result: Result) -> None:
        ended = "ok" if result.status == "ok" else f"{result.status.upper()}: {result.why}"
        print(f"{ended} ({result.seconds:.0f} s)", flush=True)
        self.results.append(result)
        self.write()

    def write(self) -> None:
        """Writes the report of the steps so far."""
        report = {
            "began": self._began,
            "seconds": round(self.seconds, 1),
            "is_cpu": self._is_cpu,
            "model": self.model,
            "steps": [result.document() for result in self.results],
        }
        (self.folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (self.folder / "report.md").write_text(page(report))


def measure(run: Run, machine: Machine, model: Path, forked: dict[str, str]) -> None:
    """All steps that have engines. forked: variables with which an engine is forked."""
    run.model = machine.model
    variant = ("--batch-variant",) if machine.gpu is not None else ()
    own, few = machine.write_configs(run.folder)

    def step(name: str, module: str, config: Path, *flags: str) -> Step:
        given = (machine.bench_size, "--model", str(model), "--config", str(config), *variant)
        logs = ("--logs", str(run.folder / name))
        return Step(name, module, (*given, *logs, *flags), _STEP_S, forked)

    if shared := [name for name in _SHARED if name in run.names]:
        written = run.folder / "start" / "running.json"
        start = step("start", "bench.gpu.pair", own, "--written", str(written))
        with run.holding(replace(start, limit_s=_FIRST_START_S), written) as has_started:
            for name in shared:
                module = "bench.gpu.facts" if name == "facts" else f"bench.{name}"
                if has_started:
                    run.step(step(name, module, own, "--running", str(written)))
                else:
                    run.leave_out(name, "its engines did not start")
    run.step(step(_EQUALITY, "bench.gpu.equality", own))
    whys = {result.name: result.why for result in run.results if result.status == "failed"}
    if "start" in whys and whys["start"] == whys.get(_EQUALITY):
        for name in (_DETERMINISTIC, *_OWN):
            run.leave_out(name, f"no engine starts: {whys['start']}")
        return
    if machine.gpu is not None:  # the CPU has no other kernels
        run.step(
            step(
                _DETERMINISTIC, "bench.gpu.equality", few, "--deterministic", machine.deterministic
            )
        )
    for name in _OWN:
        run.step(step(name, f"bench.{name}", few))


@contextmanager
def _forked(machine: Machine, folder: Path) -> Iterator[dict[str, str]]:
    """On the CPU, the variables with which engines are forked from one process. A GPU's are not:
    CUDA does not survive it."""
    if machine.gpu is not None or "SGLEXT_CPU_NURSERY" in os.environ:
        yield {}
        return
    with (
        (folder / "nursery.log").open("wb") as log,
        Nursery({"OMP_NUM_THREADS": "1"}, errors=log) as nursery,
    ):
        yield nursery.environment


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=ROOT / ".run/gpu-report")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all steps together")
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, default=NAMES, help="steps beside the environment"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
