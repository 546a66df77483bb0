"""A child process that has its own log and process group, and ends with the launcher.

A `StartLog` says how far a child has started. The log is read from where the start began, and each
part of it once, so a look is cheap however long the log is.
"""

import asyncio
import os
import re
import signal
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sgl_ext.process import LIFELINE, ended_for_memory

FLEET = "fleet"
"""The name of the child that keeps engines on Ray."""
FLEET_SERVES = "all engines serve"
"""What it logs once they do."""
READY = "ready"
# Text that SGLang logs when a stage begins, the first stage first.
_STAGES = (
    ("", "importing"),
    ("server_args=", "starting the scheduler"),
    ("Load weight begin", "loading weights"),
    ("Load weight end", "loaded weights"),
    ("KV Cache is allocated", "allocated the KV cache"),
    ("CUDA graph begin", "capturing CUDA graphs"),
    ("Uvicorn running", "warming up"),
    ("The server is fired up", READY),
)
_FLEET_COUNT = re.compile(r"(\d+) of (\d+) engines serve")
# tqdm's bars: the shards of the weights, and the batch sizes of the CUDA graphs.
_PERCENT = re.compile(r"(?:shards|Capturing)[^\r\n%]*?(\d{1,3})%")
_WITH_PERCENT = ("loading weights", "capturing CUDA graphs")
# What the extension says at a start for the operator, in a line of the log.
_NOTE = re.compile(r"^(?:\[[^\]\n]*\] )?sgl-ext: ([^\n]+)\n", re.MULTILINE)
_MOST_NOTES = 32
_MOST_BYTES = 1 << 20
_OVERLAP_CHARS = 1000  # a line that is half written is read again


class StartLog:
    """What a log says since one start of its process."""

    def __init__(self, path: Path, begin: int = 0, *, keeps_fleet: bool = False) -> None:
        """begin: the size of the log before the start."""
        self._path = path
        self._begin = self._read = begin
        self._rest = ""
        self._keeps_fleet = keeps_fleet
        self._stage = 0
        self._progress: float | None = None
        self._fleet = "connecting to Ray"
        self.notes: dict[str, None] = {}
        """What the extension said, in order, each once."""

    def stage(self) -> tuple[str, float | None]:
        """Reads new lines, and gives the stage and how much of it is done."""
        while new := self._new_text():
            text = self._rest + new
            self._rest = text[-_OVERLAP_CHARS:]
            if self._keeps_fleet:
                self._note_fleet(text)
            else:
                self._note_stage(text)
        return (self._fleet if self._keeps_fleet else _STAGES[self._stage][1]), self._progress

    def last_text(self) -> str:
        """The end of what was logged since the start, at most a MiB."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                begin = self._begin if self._begin <= size else 0
                file.seek(max(begin, size - _MOST_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def _note_stage(self, text: str) -> None:
        for said in _NOTE.findall(text)[: _MOST_NOTES - len(self.notes)]:
            self.notes[said] = None
        for number in range(len(_STAGES) - 1, self._stage, -1):
            if _STAGES[number][0] in text:
                self._stage, self._progress = number, None
                break
        if _STAGES[self._stage][1] in _WITH_PERCENT and (found := _PERCENT.findall(text)):
            self._progress = min(int(found[-1]), 100) / 100

    def _note_fleet(self, text: str) -> None:
        if found := _FLEET_COUNT.findall(text):
            serving, wanted = map(int, found[-1])
            self._fleet = f"{serving} of {wanted} engines serve"
            self._progress = serving / wanted if wanted else None
        if FLEET_SERVES in text:
            self._fleet, self._progress = READY, None

    def _new_text(self) -> str:
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._read:  # it was rotated
                    self._read = 0
                file.seek(self._read)
                data = file.read(_MOST_BYTES)
        except OSError:
            return ""
        self._read += len(data)
        return data.decode(errors="replace")


# A library of SGLang's writes these lines when a process ends, after the reason.
_NOISE = re.compile(r"nanobind: |\s*- (leaked |\.\.\. skipped remainder)|See https://nanobind\.")


class Exit(NamedTuple):
    """How a process ended without being stopped. time_s: by the wall clock."""

    time_s: float
    cause: str


class Child:
    """One process of the node, which can be started several times.

    Its process group holds everything that it starts, so stopping it leaves nothing behind.
    A terminal's Ctrl-C does not reach it: the launcher decides when it ends.

    start_log: what its log says since its latest start.
    crashes: how often it ended without being stopped. last_exit: the last of these ends.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        url: str,
        without: Collection[str] = (),
    ) -> None:
        """without: variables of the launcher's own environment that it does not get."""
        self.name = name
        self.url = url
        self.log = log
        self._command = list(command)
        own = {name: value for name, value in os.environ.items() if name not in without}
        self._environment = {**own, **environment, LIFELINE: "1"}
        self._process: asyncio.subprocess.Process | None = None
        self._starts = 0
        self._ended_for_memory: int | None = None
        self.crashes = 0
        self.last_exit: Exit | None = None
        self.start_log = StartLog(log, keeps_fleet=name == FLEET)

    @property
    def run_id(self) -> str:
        """Its name, and from its second start on the number of the start."""
        return self.name if self._starts <= 1 else f"{self.name}.{self._starts}"

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return max(self._starts - 1, 0)

    def crashed(self, cause: str, now_s: float) -> None:
        """It ended without being stopped."""
        self.crashes += 1
        self.last_exit = Exit(now_s, cause)

    def change_command(self, command: Sequence[str]) -> None:
        """What the next start runs."""
        self._command = list(command)

    def change_environment(self, environment: Mapping[str, str]) -> None:
        """What the next start has in addition."""
        self._environment |= environment

    async def start(self) -> None:
        """Starts the process; its output is appended to its log."""
        self._starts += 1
        self._ended_for_memory = ended_for_memory()
        with self.log.open("ab") as output:
            self.start_log = StartLog(self.log, output.tell(), keeps_fleet=self.name == FLEET)
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs and before it is started."""
        return None if self._process is None else self._process.returncode

    @property
    def is_memory_short(self) -> bool:
        """Whether the system may have ended a process for memory since the latest start."""
        before, now = self._ended_for_memory, ended_for_memory()
        return before is None or now is None or now > before

    async def wait(self) -> int:
        """Waits until the process ends, kills the rest of its group, and returns its exit code."""
        assert self._process is not None, "start before wait"
        code = await self._process.wait()
        self._kill_group()
        return code

    async def stop(self, limit_s: float) -> None:
        """Sends SIGTERM, and kills the whole group after `limit_s` at most."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), limit_s)
        self._kill_group()
        await self._process.wait()

    def last_lines(self, count: int) -> list[str]:
        """The last lines of its log, without empty ones and noise."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        lines = [line for line in text.splitlines() if line.strip()]
        return [line for line in lines if not _NOISE.match(line.strip())][-count:]

    def lines_of_start(self) -> list[str]:
        """The last lines of its log since its latest start, without empty ones and noise."""
        lines = self.start_log.last_text().splitlines()
        return [line for line in lines if line.strip() and not _NOISE.match(line.strip())]

    def _kill_group(self) -> None:
        assert self._process is not None, "only a started child has a group"
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def stage_of(child: Child) -> tuple[str, float | None]:
    """The stage of a child's start, and how much of that stage is done, from 0 to 1, if known."""
    return child.start_log.stage()
