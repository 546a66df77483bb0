"""A file of lines that several processes append to, by a thread: adding a line never waits.

Lines wait in memory, within a bound, until they are written; a write that failed is made again.
What exceeds the bound is dropped and counted. When the file would grow beyond half of its limit,
it becomes FILE.1, in place of the one before, and a new file begins.
"""

import asyncio
import fcntl
import logging
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.settings.schema import SettingsError

log = logging.getLogger(__name__)

BUFFER_BYTES = 8 << 20
_CLOSE_S = 2.0


def check_file(path: str) -> None:
    """Makes the file. Raises SettingsError if it cannot be written."""
    try:
        os.close(open_locked(Path(path)))
    except OSError as error:
        raise SettingsError(f"request_log={path!r}: {error.strerror}") from None


class LineFile:
    """The lines of one process. Those that were lost are counted.

    limit_bytes: the largest size of the file and its predecessor together.
    """

    def __init__(self, path: Path, limit_bytes: int, metrics: Metrics) -> None:
        self._path = path
        self.change_limit(limit_bytes)
        self._dropped = metrics.request_log_dropped_lines
        self._lines: list[bytes] = []
        self._bytes = 0
        size, limit = (lambda: self._bytes), (lambda: self._buffer_bytes)
        metrics.tables.add("request_log_lines", size, limit, "bytes")
        self._writing: asyncio.Future[None] | None = None

    def change_limit(self, limit_bytes: int) -> None:
        """Changes the largest size. A file that is larger is replaced at its next write."""
        self._file_bytes = limit_bytes // 2
        self._buffer_bytes = min(BUFFER_BYTES, self._file_bytes)

    def add(self, line: bytes) -> None:
        """Adds a line, which ends in a line feed."""
        if self._bytes + len(line) > self._buffer_bytes:
            self._dropped.inc()
        else:
            self._lines.append(line)
            self._bytes += len(line)

    @property
    def paths(self) -> tuple[Path, Path]:
        """The file and its predecessor."""
        return self._path, Path(f"{self._path}.1")

    def find_waiting(self, start: bytes) -> bytes | None:
        """The last line that begins so and is not written yet."""
        return next((line for line in reversed(self._lines) if line.startswith(start)), None)

    async def write(self) -> None:
        """Writes the lines that wait. Call it periodically. Raises OSError if that fails."""
        if self._writing is None and self._lines:
            self._writing = asyncio.ensure_future(self._write(tuple(self._lines)))
        if self._writing is not None:
            # Shielded, so that no line is written twice.
            await asyncio.shield(self._writing)

    async def _write(self, lines: Sequence[bytes]) -> None:
        try:
            await asyncio.to_thread(self.append, lines)
        finally:
            self._writing = None  # before it is done: `write` would return at once for ever
        del self._lines[: len(lines)]
        self._bytes -= sum(map(len, lines))

    async def close(self) -> None:
        """Writes what waits, if that is soon."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                while self._lines:
                    await self.write()
        if self._lines:
            log.error("%s: %s lines were lost", self._path, len(self._lines))

    def append(self, lines: Sequence[bytes]) -> None:
        """Appends lines, all or none. It waits for the disk. Raises OSError."""
        data = memoryview(b"".join(lines))
        file = self._open(len(data))
        try:
            size = os.fstat(file).st_size
            try:
                while data:
                    data = data[os.write(file, data) :]
            except OSError:
                with suppress(OSError):  # what has no size, as /dev/full
                    os.ftruncate(file, size)
                raise
        finally:
            os.close(file)

    def _open(self, more_bytes: int) -> int:
        """The file, locked, with room for so many bytes."""
        while True:
            file = open_locked(self._path)
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or not found.st_size:
                return file
            if found.st_size + more_bytes <= self._file_bytes:
                return file
            try:
                self._path.replace(f"{self._path}.1")
            finally:
                os.close(file)


def open_locked(path: Path) -> int:
    """Opens a file to append to it, made if there is none, and locked until it is closed."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Another process may have renamed it before this one had the lock.
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)
