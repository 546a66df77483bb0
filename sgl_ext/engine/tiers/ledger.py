"""The bytes of all pages in a folder, booked by every process that writes there.

A page is booked before it is written, and released if it is not there after all. So the booked
bytes are at least those of the pages, but for three things: a process that is killed leaves what it
had booked; a process that lists the pages books what it finds, and overlooks what others are
writing at that moment, a page for each thread; and files that are removed from outside stay booked.
Each listing corrects all three. The pages are listed when a process opens the folder, and when room
is needed and none of the last listing is left.

When a page does not fit, the least recently used are evicted. The lock is the kernel's: it ends
with the process that holds it. While that process is stopped, others wait for PATIENCE_S at most,
and then fail.
"""

import fcntl
import heapq
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

Report = Callable[[int, int], None]
_USED = struct.Struct("<q")
_BLOCK_BYTES, _INODE_BYTES = 4096, 1024
_MOST_LISTED = 8192
PATIENCE_S = 10.0
_LONGEST_PAUSE_S = 0.05


def cost_of(size: int) -> int:
    """The memory that a file of this size takes."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES + _INODE_BYTES


class _Page(NamedTuple):
    used_ns: int
    path: str
    cost: int


class Ledger:
    """The ledger of a folder, opened by one process; its threads may share it.

    report: is called with the number and the bytes of evicted pages, while the lock is held.
    """

    def __init__(self, root: Path, budget_bytes: int, report: Report) -> None:
        self._root = root
        self._budget_bytes = budget_bytes
        self._report = report
        self._oldest: deque[_Page] = deque()
        self._threads = threading.Lock()
        self._file = os.open(root / "ledger", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with self._locked():
            self._write(self._list())

    @property
    def used_bytes(self) -> int:
        """What is booked."""
        return self._read()

    def book(self, size: int) -> bool:
        """Books bytes, and evicts pages if they do not fit. False: they do not fit even so."""
        with self._locked():
            used = self._read()
            if size > self._budget_bytes:
                return False
            if used + size > self._budget_bytes:
                used = self._make_room(used, size)
            is_booked = used + size <= self._budget_bytes
            self._write(used + size if is_booked else used)
            return is_booked

    def release(self, size: int) -> None:
        """Takes back a booking whose page is not there."""
        with self._locked():
            self._write(self._read() - size)

    def remove(self, path: Path) -> None:
        """Removes a page, if it is there."""
        with suppress(OSError), self._locked():
            size = os.stat(path).st_size
            os.unlink(path)
            self._write(self._read() - cost_of(size))

    def close(self) -> None:
        os.close(self._file)

    def _make_room(self, used: int, size: int) -> int:
        """Evicts pages until `size` fits, or none is left. Returns what is used then."""
        freed: list[int] = []
        is_listed = False
        while used + size > self._budget_bytes:
            if not self._oldest:
                if is_listed:
                    break
                used, is_listed = self._list(), True
                continue
            page = self._oldest.popleft()
            with suppress(OSError):  # another process evicted it
                if os.stat(page.path).st_mtime_ns == page.used_ns:  # not used since
                    os.unlink(page.path)
                    used -= page.cost
                    freed.append(page.cost)
        if freed:
            self._report(len(freed), sum(freed))
        return used

    def _list(self) -> int:
        """Lists the pages and notes the least recently used. Returns the bytes of all."""
        total = 0

        def pages() -> Iterator[_Page]:
            nonlocal total
            folders = [
                one.path for one in os.scandir(self._root) if one.is_dir(follow_symlinks=False)
            ]
            for page in chain.from_iterable(map(os.scandir, folders)):
                with suppress(OSError):  # it was evicted or removed
                    found = page.stat(follow_symlinks=False)
                    total += (cost := cost_of(found.st_size))
                    yield _Page(found.st_mtime_ns, page.path, cost)

        # This pauses no other thread for long, as a sort of all would.
        self._oldest = deque(heapq.nsmallest(_MOST_LISTED, pages()))
        return total

    def _read(self) -> int:
        raw = os.pread(self._file, _USED.size, 0)
        return int(_USED.unpack(raw)[0]) if len(raw) == _USED.size else 0

    def _write(self, used: int) -> None:
        os.pwrite(self._file, _USED.pack(max(0, used)), 0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Raises TimeoutError, which is an OSError."""
        with self._threads:
            self._lock()
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lock(self) -> None:
        deadline_s, pause_s = time.monotonic() + PATIENCE_S, 0.0005
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise TimeoutError("another process holds the ledger") from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
