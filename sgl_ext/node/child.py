"""A child process that has its own log and process group, and ends with the launcher."""

import asyncio
import os
import re
import signal
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sgl_ext.node import lifeline
from sgl_ext.node.stages import FLEET, StartLog

# A library of SGLang's writes these lines when a process ends, after the reason.
_NOISE = re.compile(r"nanobind: |\s*- (leaked |\.\.\. skipped remainder)|See https://nanobind\.")


class Child:
    """One process of the node, which can be started several times.

    Its process group holds everything that it starts, so stopping it leaves nothing behind.
    A terminal's Ctrl-C does not reach it: the launcher decides when it ends.

    start_log: what its log says since its latest start.
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
        self._environment = {**own, **environment, lifeline.VARIABLE: "1"}
        self._process: asyncio.subprocess.Process | None = None
        self._starts = 0
        self.start_log = StartLog(log, keeps_fleet=name == FLEET)

    @property
    def run_id(self) -> str:
        """Its name, and from its second start on the number of the start."""
        return self.name if self._starts <= 1 else f"{self.name}.{self._starts}"

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return max(self._starts - 1, 0)

    def change_command(self, command: Sequence[str]) -> None:
        """What the next start runs."""
        self._command = list(command)

    def change_environment(self, environment: Mapping[str, str]) -> None:
        """What the next start has in addition."""
        self._environment |= environment

    async def start(self) -> None:
        """Starts the process; its output is appended to its log."""
        self._starts += 1
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
