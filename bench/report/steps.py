"""The steps of a report: each is a process of its own, with a time limit and a log."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sgl_ext_cpu.node import ROOT

from bench.lib.script import NOT_VALID
from sgl_ext.node.failure import failure

Status = Literal["ok", "failed", "not valid", "not run"]
_OUTPUT, _ERRORS = "output.log", "errors.log"
_ENDING_S = 30.0
_SHOWN_LINES = 30
_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception): ")
_LONGEST = 400
_LOG = "Its whole log: "


@dataclass(frozen=True)
class Step:
    """A module that prints a JSON object as its last line, and how long it may run."""

    name: str
    module: str
    flags: tuple[str, ...] = ()
    limit_s: float = 120.0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Result:
    """How a step ended. not valid: it could not make the load that it is about.

    why: what failed or was not valid, "" if nothing. log_end: of the logs of a failure.
    """

    name: str
    status: Status
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    log_end: str = ""

    def document(self) -> dict[str, Any]:
        return asdict(self)


def run_step(step: Step, folder: Path, left_s: float = math.inf) -> Result:
    """Runs a step for at most `left_s`, and ends every process of it. Its logs are in `folder`."""
    limit_s = min(step.limit_s, left_s)
    if limit_s < 1:
        return Result(step.name, "not run", why="the time of the whole report was used up")
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    process = _started(step, folder)
    try:
        status: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        end_session(process)
    seconds = round(time.monotonic() - started, 1)
    figures = last_object((folder / _OUTPUT).read_text(errors="replace"))
    if status == 0 and figures is not None:
        return Result(step.name, "ok", seconds, figures)
    why = reason((folder / _ERRORS).read_text(errors="replace"), status, limit_s)
    if status == NOT_VALID:
        return Result(step.name, "not valid", seconds, why=why.partition(": not valid: ")[2] or why)
    return Result(step.name, "failed", seconds, figures or {}, why, log_ends(folder))


@contextmanager
def held(
    step: Step, folder: Path, left_s: float, written: Path, *, is_kept: bool = False
) -> Iterator[Result]:
    """Starts what others share, yields once it has written the file, and ends it with the block;
    is_kept: what has started runs on.

    The result is of the start. If it failed, nothing runs in the block.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written.unlink(missing_ok=True)
    started = time.monotonic()
    limit_s = min(step.limit_s, left_s)
    process = _started(step, folder)
    is_running = False
    try:
        while not written.exists() and process.poll() is None:
            if time.monotonic() > started + limit_s:
                break
            time.sleep(0.1)
        status, seconds = process.poll(), round(time.monotonic() - started, 1)
        if written.exists() and status is None:
            is_running = True
            yield Result(step.name, "ok", seconds)
        else:
            end_session(process)
            errors = (folder / _ERRORS).read_text(errors="replace")
            why = reason(errors, status, limit_s)
            yield Result(step.name, "failed", seconds, {}, why, log_ends(folder))
    finally:
        if not (is_kept and is_running):
            end_session(process)


def _started(step: Step, folder: Path) -> subprocess.Popen[bytes]:
    with (folder / _OUTPUT).open("wb") as out, (folder / _ERRORS).open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "-m", step.module, *step.flags],
            cwd=ROOT,
            env={**os.environ, **step.environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Interrupts a process that still runs, so that it ends its engines; then kills its session."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the usual case


def last_object(output: str) -> dict[str, Any] | None:
    """The JSON object in the last line; None if there is none."""
    lines = output.splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def reason(errors: str, status: int | None, limit_s: float) -> str:
    """Why a step failed, in one line: the exception, also that of an engine whose log is in
    `errors`, or else the last line. status: None if its time ran out."""
    lines = [line.rstrip() for line in errors.splitlines() if line.strip()]
    if status is None:
        return f"it did not end within {limit_s:.0f} s"
    if not lines:
        return f"it ended with status {status} and no message"
    # The path of the log differs between steps that fail alike.
    shown = [line.strip() for line in failure(lines) if not line.startswith(_LOG)]
    raised = [at for at, line in enumerate(shown) if _RAISED.match(line)]
    return " ".join(shown[raised[-1] :])[:_LONGEST] if raised else lines[-1].strip()


def log_ends(folder: Path) -> str:
    """The last lines of each log of a step."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in (".log", ".out") and path.name != _OUTPUT:
            lines = path.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
            if lines:
                found.append("\n".join([f"==> {path.relative_to(folder)}", *lines]))
    return "\n\n".join(found)


def failed(results: Sequence[Result]) -> list[str]:
    """The names of the steps that did not end well."""
    return [result.name for result in results if result.status != "ok"]
