"""How a process lives and ends: with its launcher, not with its terminal, and its folders with it.

The launcher gives each child one end of a pipe as standard input and never writes to it. When the
launcher ends, even after kill -9, the system closes the other end, and the child's read returns.

A terminal that closes sends SIGHUP, and operators do, to have settings read. The signal is blocked,
and a thread waits for it. A handler would not be inherited by programs that the process starts, and
they would end; that a signal is blocked and ignored is inherited.

Output that cannot be written now is dropped. So a closed terminal, a full disk or a pipe without a
reader neither ends nor stops the process.

A process holds a lock on the file `lock` in its folder for as long as it runs. The system releases
the lock however the process ends, so a folder whose lock is free belongs to no process."""

import atexit
import fcntl
import os
import re
import select
import shutil
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

LIFELINE = "SGLEXT_LIFELINE"


def end_with_parent() -> None:
    """Ends this process when standard input closes, if a launcher started it."""
    if os.environ.pop(LIFELINE, None) is None:
        return

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


_HANGUP = {signal.SIGHUP}


def hold_hangups() -> None:
    """From now on SIGHUP ends neither this process nor those that it starts. Call it before there
    are other threads."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANGUP)


def on_hangup(call: Callable[[], object]) -> None:
    """Calls `call` at each SIGHUP that is held, in a thread, until it raises RuntimeError, as an
    event loop that is closed does."""

    def wait() -> None:
        try:
            while True:
                signal.sigwait(_HANGUP)
                call()
        except RuntimeError:
            return

    threading.Thread(target=wait, name="hangups", daemon=True).start()


def handle_hangups(handle: Callable[[int, FrameType | None], object]) -> None:
    """Calls `handle` at each SIGHUP in the main thread: for a process that only forks."""
    signal.signal(signal.SIGHUP, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANGUP)


class LossyStream:
    """A stream that drops what cannot be written now."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            if self._takes_more():
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            if self._takes_more():
                self._stream.flush()

    def _takes_more(self) -> bool:
        """Whether a write would not wait. What is no file of the system never waits."""
        try:
            descriptor = self._stream.fileno()
        except (OSError, ValueError):
            return True
        ready = select.poll()
        ready.register(descriptor, select.POLLOUT)
        return bool(ready.poll(0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_output() -> None:
    """From now on this process goes on when its output cannot be written."""
    sys.stdout = cast(TextIO, LossyStream(sys.stdout))
    sys.stderr = cast(TextIO, LossyStream(sys.stderr))


ENGINE_FOLDERS = "sgl-ext-engine-"
BALANCER_FOLDERS = "sgl-ext-balancer-"
"""The prefixes of the folders' names."""
_LOCK = "lock"
_locks: list[int] = []  # held until this process ends


def make_folder(prefix: str, parent: Path | None = None) -> Path:
    """Makes a folder that only this user can read, and removes those of the same prefix whose
    process has ended. It is removed when this process ends, or, if that is too sudden, by the
    next call or `remove_stale`. parent: None for the temporary directory."""
    remove_stale(prefix, parent)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    new = folder / f"new-{_LOCK}"
    _locks.append(os.open(new, os.O_RDWR | os.O_CREAT, 0o600))
    fcntl.flock(_locks[-1], fcntl.LOCK_EX)
    new.rename(folder / _LOCK)  # locked before others can see it
    atexit.register(_remove, folder, os.getpid())
    return folder


def remove_stale(prefix: str, parent: Path | None = None) -> None:
    """Removes this user's folders of a prefix whose process has ended."""
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        with suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a child that was forked
        shutil.rmtree(folder, ignore_errors=True)


def ended_for_memory() -> int | None:
    """How many processes of this machine the system has ended because memory ran out; None if it
    does not say."""
    try:
        counters = Path("/proc/vmstat").read_text()
    except OSError:
        return None
    found = re.search(r"^oom_kill (\d+)$", counters, re.MULTILINE)
    return None if found is None else int(found[1])
