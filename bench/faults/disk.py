"""A disk that can be full: a small file system in memory where this process may mount one.

Without that permission the writers' limit on the size of a file stands in for it: then writing
to any file fails, until the limit is lifted.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_SIZE_BYTES = 64 << 20
_BALLAST = "ballast"


class Disk:
    """A folder. `is_mounted`: it is a file system of its own."""

    def __init__(self, path: Path, *, is_mounted: bool) -> None:
        self.path = path
        self.is_mounted = is_mounted
        self._limited: Sequence[psutil.Process] = ()

    def fill(self, writers: Sequence[psutil.Process]) -> None:
        """Leaves no room. writers: the processes that are limited if it is not mounted."""
        if not self.is_mounted:
            self._limited = writers
            self._limit(is_full=True)
            return
        file = os.open(self.path / _BALLAST, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            while True:
                os.write(file, bytes(1 << 16))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        finally:
            os.close(file)

    def free(self) -> None:
        """Makes room again. Can be called twice."""
        if self.is_mounted:
            (self.path / _BALLAST).unlink(missing_ok=True)
        self._limit(is_full=False)
        self._limited = ()

    def is_full(self) -> bool:
        """Whether a byte more is refused."""
        if not self.is_mounted:
            limits = [process.rlimit(psutil.RLIMIT_FSIZE)[0] for process in self._limited]
            return bool(limits) and not any(limits)
        probe = self.path / "probe"
        try:
            probe.write_bytes(b"x")
        except OSError as error:
            return error.errno == errno.ENOSPC
        finally:
            probe.unlink(missing_ok=True)
        return False

    def _limit(self, *, is_full: bool) -> None:
        for process in self._limited:
            with suppress(psutil.NoSuchProcess):
                _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
                process.rlimit(psutil.RLIMIT_FSIZE, (0 if is_full else hard, hard))


@contextmanager
def disk(path: Path, *, is_small: bool = True) -> Iterator[Disk]:
    """A disk at this path, which is removed at the end; a plain folder if it need not be small."""
    path.mkdir(parents=True)
    options = f"size={_SIZE_BYTES}"
    command = ["mount", "-t", "tmpfs", "-o", options, "sgl-ext-chaos", str(path)]
    is_mounted = (
        is_small and not subprocess.run(command, capture_output=True, check=False).returncode
    )
    made = Disk(path, is_mounted=is_mounted)
    try:
        yield made
    finally:
        made.free()
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
