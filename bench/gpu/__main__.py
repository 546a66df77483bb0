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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sgl_ext_cpu.node import ROOT, local_model
from sgl_ext_cpu.nursery import Nursery

from bench.gpu.machine import Machine, find_machine, with_model
from bench.gpu.page import page
from bench.gpu.steps import Result, Step, failed, run_step
from sgl_ext.settings.schema import SettingsError

_BENCHES = (
    *("header_strip", "warm_turn", "fanout", "priority", "pin_flood"),
    "speculative_prefill",
)
_EQUALITY, _DETERMINISTIC = "equality", "equality_deterministic"
NAMES = ("environment", "facts", _EQUALITY, *_BENCHES, _DETERMINISTIC)
# These replace or time functions of an engine's own imports, so none may be forked.
_OWN_ENGINES = ("facts", "warm_turn")
# A first start compiles kernels.
_FIRST_START_S, _STEP_S = 330.0, 150.0
_ENVIRONMENT_S = 150.0


def main() -> int:
    options = _parser().parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    began, started = time.strftime("%Y-%m-%d %H:%M:%S %Z"), time.monotonic()

    def left_s() -> float:
        return started + float(options.minutes) * 60 - time.monotonic()

    machine, reason = Machine(None), ""
    try:
        machine = find_machine()
    except SettingsError as error:
        reason = str(error)
    os.environ |= machine.environment
    first = Step("environment", "bench.gpu.environment", limit_s=_ENVIRONMENT_S)
    results = [_announced(first, folder, left_s())]
    try:
        if reason:
            raise LookupError(reason)
        machine = with_model(machine, results[0].figures.get("torch", {}))
        model = local_model(machine.model)
    except (LookupError, OSError) as error:
        print(f"model ... FAILED: {error}", flush=True)
        results.append(Result("model", "failed", why=str(error)))
    else:
        configs = machine.write_configs(folder)
        with _forked(machine) as variables:
            for step in steps(machine, model, configs, variables):
                if step.name in options.only:
                    results.append(_announced(step, folder, left_s()))
    report = {
        "began": began,
        "seconds": round(time.monotonic() - started, 1),
        "is_cpu": machine.gpu is None and not reason,
        "model": machine.model,
        "steps": [result.document() for result in results],
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "report.md").write_text(page(report))
    wrong = failed(results)
    ended = f"failed: {', '.join(wrong)}" if wrong else "all steps ended well"
    print(f"{folder / 'report.md'}: {ended}")
    return 1 if wrong else 0


def steps(
    machine: Machine, model: Path, configs: tuple[Path, Path], forked: dict[str, str]
) -> Iterator[Step]:
    """All steps after the first, in order.

    configs: with SGLang's own CUDA graphs, and with few. forked: variables with which an engine is
    forked.
    """
    size = machine.bench_size
    variant = ("--batch-variant",) if machine.gpu is not None else ()
    flags, few = (("--model", str(model), "--config", str(config)) for config in configs)
    yield Step("facts", "bench.gpu.facts", (size, *flags), _FIRST_START_S)
    yield Step(_EQUALITY, "bench.gpu.equality", (size, *flags), _STEP_S, forked)
    for name in _BENCHES:
        own = {} if name in _OWN_ENGINES else forked
        yield Step(name, f"bench.{name}", (size, *few, *variant), _STEP_S, own)
    if machine.gpu is not None:
        more = (size, "--deterministic", *few)
        yield Step(_DETERMINISTIC, "bench.gpu.equality", more, _STEP_S)


def _announced(step: Step, folder: Path, left_s: float) -> Result:
    """Runs a step, and prints its name, and then how it ended."""
    print(f"{step.name} ...", end=" ", flush=True)
    logs = folder / step.name.replace(", ", "-").replace(" ", "-")
    flags = step.flags if step.name == "environment" else (*step.flags, "--logs", str(logs))
    result = run_step(replace(step, flags=flags), logs, left_s)
    ended = "ok" if result.status == "ok" else f"{result.status.upper()}: {result.why}"
    print(f"{ended} ({result.seconds:.0f} s)", flush=True)
    return result


@contextmanager
def _forked(machine: Machine) -> Iterator[dict[str, str]]:
    """On the CPU, the variables with which engines are forked from one process. A GPU's are not:
    CUDA does not survive it."""
    if machine.gpu is not None or "SGLEXT_CPU_NURSERY" in os.environ:
        yield {}
        return
    with Nursery({"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}) as nursery:
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
