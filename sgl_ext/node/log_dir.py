"""The launcher's log directory, which one node uses at a time."""

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from sgl_ext.logs import write_logs
from sgl_ext.settings.fields import changed
from sgl_ext.settings.schema import LaunchSettings, SettingsError
from sgl_ext.version import versions

_KEPT = 3
"""How many earlier logs, or parts of one, stay: `engine-0.log.1` is the last one."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Makes the directory and holds its lock. The system releases it if this process is killed.

    Raises SettingsError, with the process id of the other node, if another one has it.
    """
    at = f"log_dir={str(directory)!r}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise SettingsError(f"{at}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 20, 0).decode() or "unknown"
            message = f"{at}: in use by another node (process {owner}); each needs its own"
            raise SettingsError(message) from None
        with suppress(OSError):  # a full disk: the lock holds without the number
            os.truncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())
        yield
    finally:
        os.close(lock)


def new_log(path: Path) -> Path:
    """An empty log that only this user can read. The earlier ones move to `PATH.1` and so on."""
    _shift(path)
    with suppress(FileNotFoundError):
        path.replace(f"{path}.1")
    _make(path)
    return path


def open_log(path: Path) -> int:
    """A log that is appended to, also after it was emptied."""
    return os.open(path, os.O_WRONLY | os.O_APPEND)


def rotated(path: Path, limit_bytes: int) -> bool:
    """Begins a new log once it has its part of the limit, which its predecessors share.

    The process that appends to it keeps it open, so its content is copied to `PATH.1`; lines that
    are written meanwhile can be lost. False if the disk has no room for the copy, which is then
    left out.
    """
    if path.stat().st_size <= limit_bytes // (_KEPT + 1):
        return True
    _shift(path)
    copy = Path(f"{path}.1")
    try:
        _make(copy)
        shutil.copyfile(path, copy)
    except OSError:
        copy.unlink(missing_ok=True)
        return False
    finally:
        os.truncate(path, 0)
    return True


def _shift(path: Path) -> None:
    """Moves `PATH.1` to `PATH.2` and so on. The last one goes."""
    for number in range(_KEPT, 1, -1):
        with suppress(FileNotFoundError):
            Path(f"{path}.{number - 1}").replace(f"{path}.{number}")


def _make(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


log = logging.getLogger(__name__)


def launcher_log(settings: LaunchSettings) -> Path:
    """Its path."""
    return Path(settings.log_dir) / "launcher.log"


class Operator:
    """The person who started the launcher: what is said is printed and logged."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, text: str) -> None:
        self._say(text, logging.INFO)

    def error(self, text: str) -> None:
        """Says that something was refused or has failed."""
        self._say(text, logging.ERROR)

    def _say(self, text: str, level: int) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)
        log.log(level, "%s", text)


def begin_log(settings: LaunchSettings, console: Console) -> Operator:
    """Begins the log."""
    balancer = settings.balancer
    descriptor = open_log(new_log(launcher_log(settings)))
    write_logs("launcher", balancer.log_format, balancer.log_level, descriptor)
    log.info("starting", extra=versions()._asdict())
    log.info("settings other than the defaults", extra=changed(settings))
    return Operator(console)
