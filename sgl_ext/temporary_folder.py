"""Folders, in the temporary directory or elsewhere, that end with the process that made them.

A process holds a lock on the file `lock` in its folder for as long as it runs. The system releases
the lock however the process ends, so a folder whose lock is free belongs to no process.
"""

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

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
