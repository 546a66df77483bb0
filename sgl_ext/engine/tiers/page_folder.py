"""Pages in a folder, on a tmpfs or on a disk, which several processes write, read and evict.

    FOLDER/ledger          the bytes of all pages, and the lock of who changes them
    FOLDER/NAME SPACE/PAGE one page: a header with its length and checksum, then its bytes

A page is written into a file that has no name (O_TMPFILE), and gets its name when it is complete.
So no process sees a part of a page, and the kernel frees what a killed process was writing. A page
that has a name never changes. Of two processes that write the same page, the second finds the name
taken, and drops its own.

The checksum covers the page's name and its bytes. A page that does not match is removed, and is a
miss. Every failure of the file system is an outcome here, never an exception: the caller is a
thread of a scheduler.

The ledger has the bytes of all pages, booked by every process that writes there. A page is booked
before it is written, and released if it is not there after all. So the booked bytes are at least
those of the pages, but for three things: a process that is killed leaves what it had booked; a
process that lists the pages books what it finds, and overlooks what others are writing at that
moment, a page for each thread; and files that are removed from outside stay booked. Each listing
corrects all three. The pages are listed when a process opens the folder, and when room is needed
and none of the last listing is left.

A page may be kept until some time (`NameSpace.keep`). It then counts as used at that time: so it is
evicted after all that were used, and those with the earliest time go first.

When a page does not fit, the least recently used are evicted. The lock is the kernel's: it ends
with the process that holds it. While that process is stopped, others wait for PATIENCE_S at most,
and then fail.

On a disk the system's page cache has what was written and read last, and writes it to the disk
later. What a machine had not written when its power went off does not match its checksum.
"""

import errno
import fcntl
import heapq
import os
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

Report = Callable[[int, int], None]
_USED = struct.Struct("<q")
_BLOCK_BYTES, _INODE_BYTES = 4096, 1024
_MOST_LISTED = 8192
PATIENCE_S = 10.0
_LONGEST_PAUSE_S = 0.05
_SPARE = 64


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
        """Evicts pages until `size` fits, or none is left. Returns what is used then.

        A listing says nothing of pages that were written after it. Those go before a page that is
        kept, so before one is evicted the pages are listed again; and then several are evicted, as
        listing takes time.
        """
        freed: list[int] = []
        is_listed, now_ns = False, time.time_ns()
        while used + size > self._budget_bytes:
            if not self._oldest:
                if is_listed:
                    break
                used, is_listed = self._list(), True
                continue
            if self._oldest[0].used_ns > now_ns and not is_listed:
                used, is_listed = self._list(), True
                size += self._budget_bytes // _SPARE if self._oldest[0].used_ns > now_ns else 0
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


_HEADER = struct.Struct("<8sQQ")  # mark, length of the page, checksum
_MARK = b"sglpage1"
_MOST_BUFFERS = 1000  # IOV_MAX is 1024
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


class FolderError(Exception):
    """A folder that cannot hold pages. The message names it."""


class Written(StrEnum):
    """What became of a page that was to be written."""

    WRITTEN = "written"
    KNOWN = "known"
    """It was there already."""
    REFUSED = "refused"
    """It has no room: it is larger than the budget, or the file system is full."""
    FAILED = "failed"


class Read(StrEnum):
    """What became of a page that was to be read."""

    READ = "read"
    MISSED = "missed"
    CORRUPT = "corrupt"
    """Its length or its checksum was wrong. It was removed."""
    FAILED = "failed"
    """The disk could not read it."""


class PageFolder:
    """The folder, opened by one process. Its methods may be called from several threads.

    budget_bytes: what the pages of all processes may take together. While pages are written, they
        may exceed it by one page for each thread that writes.
    report: is called with the number and the bytes of evicted pages.
    """

    def __init__(self, root: Path, budget_bytes: int, report: Report | None = None) -> None:
        """Makes the folder if it is missing. Raises FolderError."""
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = root.lstat()
            if not stat.S_ISDIR(found.st_mode):
                raise FolderError(f"{root}: is not a folder")
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise FolderError(f"{root}: only its owner may have access; it must be yours, 0700")
            os.close(os.open(root, os.O_TMPFILE | os.O_WRONLY, 0o600))
            self._ledger = Ledger(root, budget_bytes, report or (lambda pages, size: None))
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):
                reason = "its file system has no files without names (O_TMPFILE); "
                reason += "use ext4, XFS or a tmpfs"
            raise FolderError(f"{root}: {reason}") from None
        self._root = root

    def name_space(self, name: str) -> "NameSpace":
        """The pages of engines that are alike."""
        return NameSpace(self._root / name, self._ledger)

    @property
    def used_bytes(self) -> int:
        """What the pages of all processes take."""
        return self._ledger.used_bytes

    def close(self) -> None:
        """Closes what is open; the pages stay."""
        self._ledger.close()


class NameSpace:
    """Pages of one kind, in the folder at `path`.

    used_ns: when a page was used; the least recently used is evicted.
    """

    def __init__(self, path: Path, ledger: Ledger) -> None:
        path.mkdir(mode=0o700, exist_ok=True)
        self.path = path
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._ledger = ledger

    def used_ns(self, name: str) -> int | None:
        """When a page was used; None if it is not there."""
        try:
            return os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_mtime_ns
        except OSError:
            return None

    def names(self, most: int) -> set[str]:
        """The names of at most so many pages."""
        try:
            with os.scandir(self._folder) as pages:
                return {page.name for page in islice(pages, most)}
        except OSError:  # the folder was removed
            return set()

    def touch(self, name: str, used_ns: int) -> bool:
        """Records the use of a page. Returns whether it is there."""
        return self._set_used(name, used_ns, self._folder)

    def keep(self, name: str, until_ns: int) -> bool:
        """Keeps a page until this time, or until its own if that is later. Returns whether it
        is there."""
        return self.touch(name, until_ns)

    @staticmethod
    def _set_used(file: str | int, used_ns: int, folder: int | None = None) -> bool:
        try:
            # A time in the future is the end of a lease.
            found_ns = os.stat(file, dir_fd=folder).st_mtime_ns
            if found_ns <= used_ns or found_ns <= time.time_ns():
                os.utime(file, ns=(used_ns, used_ns), dir_fd=folder)
        except OSError:
            return False
        return True

    def put(self, name: str, page: Sequence[memoryview], used_ns: int) -> Written:
        """Writes a page, unless it is there. page: its bytes, in parts."""
        if self.touch(name, used_ns):
            return Written.KNOWN
        length = sum(part.nbytes for part in page)
        cost = cost_of(_HEADER.size + length)
        try:
            if not self._ledger.book(cost):
                return Written.REFUSED
            result = self._write(name, page, length, used_ns)
            if result is not Written.WRITTEN:
                self._ledger.release(cost)
        except OSError:  # the folder was removed
            return Written.FAILED
        return result

    def _write(self, name: str, page: Sequence[memoryview], length: int, used_ns: int) -> Written:
        header = _HEADER.pack(_MARK, length, _checksum(name, page))
        try:
            file = os.open(".", os.O_TMPFILE | os.O_WRONLY, 0o600, dir_fd=self._folder)
            try:
                parts = [memoryview(header), *page]
                if _total(os.writev, file, parts) < len(header) + length:
                    return Written.REFUSED  # a full file system takes a part
                os.utime(file, ns=(used_ns, used_ns))
                # With a folder's descriptor, and not without, this follows the link to the file.
                own, folder = f"/proc/self/fd/{file}", self._folder
                os.link(own, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
            finally:
                os.close(file)
        except FileExistsError:
            return Written.KNOWN
        except OSError as error:
            return Written.REFUSED if error.errno in _NO_ROOM else Written.FAILED
        return Written.WRITTEN

    def get(self, name: str, page: Sequence[memoryview], used_ns: int) -> Read:
        """Reads a page into memory. Nothing there may be used unless the outcome is READ."""
        try:
            # A pipe would wait for its writer.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(name, flags, dir_fd=self._folder)
        except OSError:
            return Read.MISSED
        try:
            if self._is_read(file, name, page):
                self._set_used(file, used_ns)
                return Read.READ
        except OSError as error:
            if error.errno == errno.EIO:
                return Read.FAILED
        finally:
            os.close(file)
        self.drop(name)
        return Read.CORRUPT

    @staticmethod
    def _is_read(file: int, name: str, page: Sequence[memoryview]) -> bool:
        length = sum(part.nbytes for part in page)
        header = bytearray(_HEADER.size)
        read = _total(os.readv, file, [memoryview(header), *page])
        if read != len(header) + length or os.fstat(file).st_size != read:
            return False
        return _HEADER.unpack(header) == (_MARK, length, _checksum(name, page))

    def drop(self, name: str) -> None:
        """Removes a page."""
        self._ledger.remove(self.path / name)

    def clear(self) -> None:
        """Removes all pages of this kind."""
        with suppress(OSError):
            for name in os.listdir(self._folder):
                self.drop(name)

    def close(self) -> None:
        """Closes the folder; the pages stay."""
        os.close(self._folder)


def _total(call: Callable[[int, Any], int], file: int, parts: list[memoryview]) -> int:
    """The bytes that system calls read into these parts or write from them."""
    groups = range(0, len(parts), _MOST_BUFFERS)
    return sum(call(file, parts[at : at + _MOST_BUFFERS]) for at in groups)


def _checksum(name: str, page: Sequence[memoryview]) -> int:
    digest = xxhash.xxh3_64(name.encode())
    for part in page:
        digest.update(part)
    return digest.intdigest()
