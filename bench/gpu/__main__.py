"""What is this GPU machine, what does SGLang choose on it, and do our features hold there?

    make gpu-report

runs for at most ten minutes, downloads nothing and puts no large model on the disk. It writes
`report.md` and `report.json` into a folder. A step that fails is named, the others go on, and
the exit status is 1. Without a GPU the same steps run on the CPU platform.
See docs/how/measuring.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_ext_cpu.node import ROOT, is_healthy, local_model
from sgl_ext_cpu.nursery import running_nursery

from bench.gpu.groups import GROUPS
from bench.gpu.machine import Machine, find_machine, with_model
from bench.gpu.page import page
from bench.report.steps import Result, Step, failed, held, run_step
from sgl_ext.settings.schema import SettingsError


@dataclass(frozen=True)
class Shared:
    """A step that uses the running engines of a group."""

    module: str
    group: str


STEPS = {
    "facts": Shared("bench.gpu.facts", "wide"),
    "equality": Shared("bench.gpu.equality", "narrow"),
    "header_strip": Shared("bench.header_strip", "wide"),
    "warm_turn": Shared("bench.warm_turn", "wide"),
    "equality_deterministic": Shared("bench.gpu.equality", "deterministic"),
    "decoding": Shared("bench.gpu.decoding", "wide"),
    "host_tier": Shared("bench.gpu.host_tier", "tiered"),
    "priority": Shared("bench.priority", "narrow"),
    "pin_flood": Shared("bench.pin_flood", "narrow"),
    "fanout": Shared("bench.fanout", "wide"),
    "speculative_prefill": Shared("bench.speculative_prefill", "wide"),
}
"""In the order in which they run: what is worth most comes first."""
# A first start compiles kernels. No step may take all of a lease of ten minutes.
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
        torch_facts = run.figures_of("environment").get("torch", {})
        machine = with_model(machine, torch_facts, options.model)
        names = {machine.model_of(group) for group in GROUPS.values()}
        print(f"models {', '.join(sorted(names))} ...", end=" ", flush=True)
        models = {name: local_model(name) for name in names}
        print("ok", flush=True)
    except (LookupError, OSError) as error:
        print(f"FAILED: {error}", flush=True)
        run.note(Result("model", "failed", why=str(error)))
    else:
        run.model = machine.model
        more = dict(pair.partition("=")[::2] for pair in options.engine)
        with _forked(machine, run.folder) as variables:
            measure(run, machine, models, variables, more)
    wrong = failed(list(run.results.values()))
    ended = f"failed: {', '.join(wrong)}" if wrong else "all steps ended well"
    print(f"{run.folder / 'report.md'}: {ended}")
    return 1 if wrong else 0


class Run:
    """The steps so far, by name, and the time that is left. It prints each step as it begins and
    ends, and then writes the report, so that one which is cut short is there, too.

    With `--resume` it goes on from the report in the folder: a step that ended well there is not
    run again, and engines that still run are used again.

    model: the shape of its weights, once it is chosen.
    """

    def __init__(self, options: argparse.Namespace, *, is_cpu: bool) -> None:
        self.model = ""
        self._is_cpu = is_cpu
        self._began = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        self.folder: Path = options.folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.names: Sequence[str] = options.only
        self.results: dict[str, Result] = {}
        self.is_kept: bool = options.keep
        self.is_resumed: bool = options.resume
        self._limit_s: float = 60.0 * options.minutes
        self._started = time.monotonic()
        self._spent_s = 0.0
        self._writing = threading.Lock()
        if self.is_resumed:
            self._resume()

    def _resume(self) -> None:
        path = self.folder / "report.json"
        if not path.exists():
            return
        before = json.loads(path.read_text())
        self._began, self._spent_s = before["began"], before["seconds"]
        self.results = {step["name"]: Result(**step) for step in before["steps"]}

    @property
    def seconds(self) -> float:
        """Of this run."""
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float:
        """What of the limit is left."""
        return self._limit_s - self.seconds

    def has(self, name: str) -> bool:
        """Whether a step is to run: it is one of those named, and has not ended well before."""
        ended = self.results.get(name)
        return name in (*self.names, "environment") and (ended is None or ended.status != "ok")

    def figures_of(self, name: str) -> dict[str, Any]:
        """What a step found; nothing if it has not ended well."""
        return self.results[name].figures if name in self.results else {}

    def step(self, step: Step) -> None:
        """Runs a step, if it is to run."""
        if self.has(step.name):
            self.note(run_step(step, self.folder / step.name, self.left_s))

    @contextmanager
    def holding(self, step: Step, written: Path) -> Iterator[Result]:
        """How the start of what others share ended; it ends with the block, unless it is kept."""
        if self.is_resumed and _still_serves(written):
            yield Result(step.name, "ok")
            if not self.is_kept:
                os.killpg(json.loads(written.read_text())["process"], signal.SIGKILL)
            return
        folder = self.folder / step.name
        with held(step, folder, self.left_s, written, is_kept=self.is_kept) as result:
            self.note(result)
            yield result

    def leave_out(self, name: str, why: str) -> None:
        """Notes a step that cannot run."""
        self.note(Result(name, "not run", why=why))

    def note(self, result: Result) -> None:
        """Adds a result, in place of one of the same step, and writes the report."""
        ended = "ok" if result.status == "ok" else f"{result.status.upper()}: {result.why}"
        with self._writing:
            print(f"{result.name} ... {ended} ({result.seconds:.0f} s)", flush=True)
            self.results.pop(result.name, None)
            self.results[result.name] = result
            self.write()

    def write(self) -> None:
        """Writes the report of the steps so far."""
        report = {
            "began": self._began,
            "seconds": round(self._spent_s + self.seconds, 1),
            "is_cpu": self._is_cpu,
            "model": self.model,
            "steps": [result.document() for result in self.results.values()],
        }
        (self.folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (self.folder / "report.md").write_text(page(report))


def _still_serves(written: Path) -> bool:
    """Whether engines that an earlier run kept still serve."""
    if not written.exists():
        return False
    arms = [arm for arm in json.loads(written.read_text()).values() if isinstance(arm, dict)]
    return all(is_healthy(arm["url"]) for arm in arms)


def measure(
    run: Run,
    machine: Machine,
    models: Mapping[str, Path],
    forked: dict[str, str],
    more: Mapping[str, str],
) -> None:
    """All steps that have engines. The groups that they need start together, then the steps run one
    after the other.

    models: directories by the size of the model. forked: variables with which an engine is forked.
    more: further settings of all engines.
    """
    variant = ("--batch-variant",) if machine.gpu is not None else ()
    steps = {name: step for name, step in STEPS.items() if run.has(name)}
    if machine.gpu is None:  # the CPU has no other kernels
        steps.pop("equality_deterministic", None)

    def given(group: str) -> tuple[str, ...]:
        config = run.folder / f"{group}.toml"
        config.write_text(machine.config(GROUPS[group], more))
        model = models[machine.model_of(GROUPS[group])]
        return (machine.bench_size, "--model", str(model), "--config", str(config), *variant)

    def written(group: str) -> Path:
        return run.folder / f"start_{group}" / "running.json"

    def start(group: str) -> Result:
        flags = (*given(group), "--group", group, "--written", str(written(group)))
        step = Step(f"start_{group}", "bench.gpu.groups", flags, _FIRST_START_S, forked)
        return stack.enter_context(run.holding(step, written(group)))

    needed = dict.fromkeys(step.group for step in steps.values())
    if run.is_resumed:  # what is not needed ends, too, unless it is kept
        needed |= {group: None for group in GROUPS if _still_serves(written(group))}
    with ExitStack() as stack:
        with ThreadPoolExecutor() as pool:
            started = dict(zip(needed, pool.map(start, needed), strict=True))
        for name, step in steps.items():
            if started[step.group].status != "ok":
                run.leave_out(name, f"its engines did not start: {started[step.group].why}")
                continue
            logs = ("--logs", str(run.folder / name), "--running", str(written(step.group)))
            run.step(Step(name, step.module, (*given(step.group), *logs), _STEP_S, forked))


@contextmanager
def _forked(machine: Machine, folder: Path) -> Iterator[dict[str, str]]:
    """On the CPU, the variables with which engines are forked from one process. A GPU's are not:
    CUDA does not survive it."""
    if machine.gpu is not None or "SGLEXT_CPU_NURSERY" in os.environ:
        yield {}
        return
    with (
        (folder / "nursery.log").open("wb") as log,
        running_nursery({"OMP_NUM_THREADS": "1"}, errors=log) as nursery,
    ):
        yield nursery.environment


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--folder", type=Path, default=ROOT / ".run/gpu-report")
    add("--minutes", type=float, default=10.0, help="for all steps together")
    add("--only", nargs="+", choices=STEPS, default=tuple(STEPS), help="beside the environment")
    add("--keep", action="store_true", help="leave the engines running")
    add("--resume", action="store_true", help="go on from the folder's report and its engines")
    add("--model", default="", help="the size of the large engines' model, such as 2b-config")
    add(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of SGLang for all engines, such as attention-backend=triton",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
