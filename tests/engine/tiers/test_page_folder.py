"""Pages in a folder that several processes share: bytes, budget, order of eviction, and faults."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.engine.tiers import page_folder
from sgl_ext.engine.tiers.page_folder import FolderError, PageFolder, Read, Written, cost_of
from tests.waiting import until

MIB = 1 << 20


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder in shared memory, where the product has it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def parts(page: bytes, size: int = 1000) -> list[memoryview]:
    """A page in parts, as it lies in a pool's memory."""
    whole = memoryview(bytearray(page))
    return [whole[at : at + size] for at in range(0, len(page), size)]


def read(space: page_folder.NameSpace, name: str, size: int, used_ns: int = 1) -> bytes | Read:
    into = bytearray(size)
    result = space.get(name, [memoryview(into)], used_ns)
    return bytes(into) if result is Read.READ else result


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and path.name != "ledger"]


def on_disk(root: Path) -> int:
    return sum(cost_of(path.stat().st_size) for path in files(root))


@given(page=st.binary(min_size=1, max_size=5000), size=st.integers(1, 700))
def test_a_page_is_read_as_it_was_written_however_it_lies_in_memory(page: bytes, size: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        space = PageFolder(Path(folder), MIB).name_space("kv")
        assert space.put("a", parts(page, size), 1) is Written.WRITTEN
        assert space.put("a", parts(page), 2) is Written.KNOWN
        assert space.used_ns("a") == 2
        assert read(space, "a", len(page)) == page
        assert space.used_ns("a") == 1
        assert read(space, "b", len(page)) is Read.MISSED
        assert space.used_ns("b") is None


def test_only_the_owner_can_read_the_pages(root: Path) -> None:
    pages = PageFolder(root / "new", MIB)
    pages.name_space("kv").put("a", parts(b"x"), 1)
    for path in (root / "new").rglob("*"):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected
    (root / "open").mkdir(mode=0o755)
    with pytest.raises(FolderError, match=r"open: only its owner may have access"):
        PageFolder(root / "open", MIB)
    (root / "file").touch()
    with pytest.raises(FolderError, match="file: "):
        PageFolder(root / "file", MIB)


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def swap(path: Path) -> None:
    """A whole page, but of other tokens."""
    path.with_name("b").replace(path)


@pytest.mark.parametrize("damage", [flip, lengthen, shorten, empty, swap])
def test_a_damaged_page_is_a_miss_and_is_removed(root: Path, damage: object) -> None:
    pages = PageFolder(root, MIB)
    space, page = pages.name_space("kv"), random.Random(1).randbytes(3000)
    space.put("a", parts(page), 1)
    space.put("b", parts(page[::-1]), 1)
    assert callable(damage)
    damage(root / "kv" / "a")
    assert read(space, "a", len(page)) is Read.CORRUPT
    assert read(space, "a", len(page)) is Read.MISSED
    assert space.put("a", parts(page), 2) is Written.WRITTEN
    assert read(space, "a", len(page)) == page
    space.clear()
    assert files(root) == []


class Model:
    """Pages with their costs and times of use, evicted as they should be."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.pages: dict[tuple[str, str], tuple[int, int]] = {}

    def put(self, key: tuple[str, str], cost: int, used: int) -> Written:
        if key in self.pages:
            self.pages[key] = (used, cost)
            return Written.KNOWN
        if cost > self.budget:
            return Written.REFUSED
        while self.used + cost > self.budget:
            del self.pages[min(self.pages, key=self.pages.__getitem__)]
        self.pages[key] = (used, cost)
        return Written.WRITTEN

    @property
    def used(self) -> int:
        return sum(cost for _, cost in self.pages.values())


_page = st.tuples(st.sampled_from(["kv", "swa"]), st.sampled_from("abcdefgh"))
_steps = st.lists(
    st.tuples(st.sampled_from(["put", "get", "drop"]), _page, st.integers(0, 2)), max_size=60
)


@given(steps=_steps, budget=st.integers(1, 40), sizes=st.lists(st.integers(1, 9), min_size=8))
def test_processes_evict_together_what_was_used_least_recently(
    steps: list[tuple[str, tuple[str, str], int]], budget: int, sizes: list[int]
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        root, model, evicted = Path(folder), Model(budget * 4096), [0, 0]

        def report(pages: int, size: int) -> None:
            evicted[0] += pages
            evicted[1] += size

        opened = [PageFolder(root, model.budget, report) for _ in range(3)]
        spaces = [{name: one.name_space(name) for name in ("kv", "swa")} for one in opened]
        written = 0
        for used, (verb, key, process) in enumerate(steps, start=1):
            space, page = spaces[process][key[0]], bytes(sizes["abcdefgh".index(key[1])] * 3000)
            if verb == "put":
                cost = cost_of(len(page) + 24)
                result = space.put(key[1], parts(page), used)
                assert result is model.put(key, cost, used)
                written += result is Written.WRITTEN
            elif verb == "get":
                found = read(space, key[1], len(page), used)
                assert (found == page) == (key in model.pages)
                if key in model.pages:
                    model.pages[key] = (used, model.pages[key][1])
            else:
                space.drop(key[1])
                written -= model.pages.pop(key, None) is not None
            assert {(f.parent.name, f.name) for f in files(root)} == model.pages.keys()
            assert opened[process].used_bytes == model.used == on_disk(root) <= model.budget
        assert evicted[0] == written - len(model.pages)
        for one, kinds in zip(opened, spaces, strict=True):
            for space in kinds.values():
                space.close()
            one.close()


def test_what_is_listed_for_eviction_is_bounded(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_folder, "_MOST_LISTED", 3)
    pages = PageFolder(root, 10 * cost_of(124))
    space = pages.name_space("kv")
    for number in range(50):
        assert space.put(str(number), parts(bytes(100)), number) is Written.WRITTEN
    assert {path.name for path in files(root)} == {str(number) for number in range(40, 50)}


@pytest.mark.parametrize("call", ["open", "writev", "short", "utime", "link"])
def test_a_full_file_system_is_a_refusal_and_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    pages = PageFolder(root, MIB)
    space, page = pages.name_space("kv"), bytes(5000)

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        if call == "short":
            patched.setattr(os, "writev", lambda file, buffers: os.write(file, buffers[0]))
        elif call == "utime":
            patched.setattr(os, "utime", full)
            patched.setattr(space, "touch", lambda name, used_ns: False)
        else:
            patched.setattr(os, call, full)
        assert space.put("a", parts(page), 1) is Written.REFUSED
    assert files(root) == []
    assert pages.used_bytes == 0
    assert space.put("a", parts(page), 1) is Written.WRITTEN


def test_a_small_tmpfs_refuses_what_it_cannot_hold(root: Path) -> None:
    script = f"""
import sys; sys.path.insert(0, {os.getcwd()!r})
from pathlib import Path
from sgl_ext.engine.tiers.page_folder import PageFolder, Read
root = Path({str(root)!r}) / "small" / "tier"
space = PageFolder(root, 1 << 30).name_space("kv")
results = [space.put(str(n), [memoryview(bytes(20000))], n) for n in range(20)]
found = [space.get(str(n), [memoryview(bytearray(20000))], n) for n in range(20)]
print(*results); print(*found)
"""
    mount = (
        f'mkdir {root}/small && mount -t tmpfs -o size=128k none {root}/small && exec $0 -c "$1"'
    )
    command = ["unshare", "-m", "sh", "-c", mount, sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("this user may not mount")
    assert done.returncode == 0, done.stderr
    written, found = (line.split() for line in done.stdout.splitlines())
    kept = written.count("written")
    assert 1 < kept < 10
    assert written == ["written"] * kept + ["refused"] * (20 - kept)
    assert found == ["read"] * kept + ["missed"] * (20 - kept)


def test_a_folder_that_is_removed_makes_misses_and_failures(root: Path) -> None:
    pages = PageFolder(root / "tier", 3 * cost_of(1024))
    space = pages.name_space("kv")
    for number in range(5):
        space.put(str(number), parts(bytes(1000)), number)
    shutil.rmtree(root / "tier")
    assert read(space, "4", 1000) is Read.MISSED
    assert space.put("5", parts(bytes(1000)), 6) in (Written.FAILED, Written.REFUSED)
    assert not space.touch("4", 7)


def test_a_page_that_is_kept_is_evicted_after_all_that_are_not(root: Path) -> None:
    space, now_ns = PageFolder(root, 3 * cost_of(124)).name_space("kv"), time.time_ns()
    hour_ns = 3_600_000_000_000
    for name in "abc":
        assert space.put(name, parts(bytes(100)), now_ns) is Written.WRITTEN
    assert space.keep("a", now_ns + 2 * hour_ns)
    assert space.keep("b", now_ns + hour_ns)
    assert not space.keep("missing", now_ns + hour_ns)
    assert space.keep("a", now_ns + hour_ns), "it is kept for longer already"
    assert read(space, "a", 100, now_ns + 5) == bytes(100), "a read ends no lease"
    assert space.put("b", parts(bytes(100)), now_ns + 6) is Written.KNOWN
    for number in range(9):
        assert space.put(str(number), parts(bytes(100)), now_ns + number) is Written.WRITTEN
        assert {path.name for path in files(root)} == {"a", "b", str(number)}
    for name in "de":
        space.put(name, parts(bytes(100)), now_ns)
        assert space.keep(name, now_ns + 3 * hour_ns)
    assert {path.name for path in files(root)} == {"d", "e"}, "the shorter leases go first"


def test_a_page_whose_lease_has_ended_is_used_as_any(root: Path) -> None:
    space = PageFolder(root, MIB).name_space("kv")
    assert space.put("a", parts(b"page"), 1) is Written.WRITTEN
    assert space.keep("a", time.time_ns() - 1)
    assert space.touch("a", 5)
    assert space.used_ns("a") == 5


def test_a_disk_that_cannot_read_a_page_keeps_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = PageFolder(root, MIB).name_space("kv")
    space.put("a", parts(b"page"), 1)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "readv", broken)
        assert read(space, "a", 4) is Read.FAILED
    assert read(space, "a", 4) == b"page"


@pytest.mark.parametrize("call", ["open", "writev", "utime", "link"])
def test_a_process_that_is_killed_while_it_writes_leaves_a_whole_page_or_none(
    root: Path, call: str
) -> None:
    """At each system call of a write, the last of which gives the page its name."""
    script = f"""
import os, signal, sys; sys.path.insert(0, {os.getcwd()!r})
from pathlib import Path
from sgl_ext.engine.tiers.page_folder import PageFolder
space = PageFolder(Path({str(root)!r}), 1 << 20).name_space("kv")
space.put("before", [memoryview(b"whole")], 1)
original = os.{call}
def killed(*args, **kwargs):
    if sys.argv[1] == "after":
        original(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
space.touch = lambda *_: False
os.{call} = killed
space.put("a", [memoryview(bytes(50_000))], 1)
"""
    for when in ("before", "after"):
        done = subprocess.run([sys.executable, "-c", script, when], check=False)
        assert done.returncode == -signal.SIGKILL
        pages = PageFolder(root, MIB)
        space = pages.name_space("kv")
        is_named = call == "link" and when == "after"
        assert read(space, "a", 50_000) == (bytes(50_000) if is_named else Read.MISSED)
        assert read(space, "before", 5) == b"whole"
        assert pages.used_bytes == on_disk(root), "the next process counts what there is"


def test_a_process_that_is_stopped_with_the_lock_delays_writes_for_a_limited_time(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = PageFolder(root, MIB).name_space("kv")
    assert space.put("a", parts(b"page"), 1) is Written.WRITTEN
    other = os.open(root / "ledger", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    monkeypatch.setattr(page_folder, "PATIENCE_S", 0.0)
    assert space.put("b", parts(b"page"), 2) is Written.FAILED
    assert read(space, "a", 4) == b"page", "reading needs no lock"
    space.drop("a")
    with pytest.raises(FolderError, match="another process holds the ledger"):
        PageFolder(root, MIB)
    os.close(other)
    assert space.put("b", parts(b"page"), 3) is Written.WRITTEN
    space.drop("a")
    assert read(space, "a", 4) is Read.MISSED


_WRITER = f"""
import os, random, sys; sys.path.insert(0, {os.getcwd()!r})
from pathlib import Path
from sgl_ext.engine.tiers.page_folder import PageFolder, Read
root, seed, count, budget = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
space, order = PageFolder(root, budget).name_space("kv"), random.Random(seed)
print("ready", flush=True)
read = wrong = 0
for step in range(count):
    name = order.randrange(40)
    page = random.Random(name).randbytes(30000)
    space.put(str(name), [memoryview(page)], step)
    name = order.randrange(40)
    into = bytearray(30000)
    result = space.get(str(name), [memoryview(into)], step)
    read += result is Read.READ
    right = random.Random(name).randbytes(30000)
    wrong += result is Read.CORRUPT or (result is Read.READ and into != right)
print(read, wrong)
"""


def writer(root: Path, seed: int, count: int, budget: int) -> subprocess.Popen[str]:
    given = [str(root), str(seed), str(count), str(budget)]
    command = [sys.executable, "-c", _WRITER, *given]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_processes_that_write_the_same_pages_keep_the_budget_and_every_byte(
    root: Path,
) -> None:
    page = cost_of(30024)
    budget = 12 * page
    both = [writer(root, seed, 1500, budget) for seed in (1, 2)]
    most = 0
    while any(process.poll() is None for process in both):
        most = max(most, sum(1 for path in files(root) if path.exists()) * page)
    for process in both:
        said, _ = process.communicate()
        _, result = said.splitlines()
        read, wrong = map(int, result.split())
        assert read > 100
        assert wrong == 0
    assert most <= budget + 2 * page
    assert PageFolder(root, budget).used_bytes == on_disk(root) <= budget


def test_a_process_that_is_killed_while_it_writes_leaves_whole_pages_only(root: Path) -> None:
    budget = 12 * cost_of(30024)
    for seed in range(6):
        process = writer(root, seed, 10**6, budget)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        names = {path.name for path in files(root)}
        until(lambda known=names: {path.name for path in files(root)} != known)  # type: ignore[misc]
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    pages = PageFolder(root, budget)
    assert pages.used_bytes == on_disk(root) <= budget
    space = pages.name_space("kv")
    for path in files(root):
        assert read(space, path.name, 30000) == random.Random(int(path.name)).randbytes(30000)


def test_a_process_that_is_killed_between_booking_and_writing_blocks_no_memory(root: Path) -> None:
    pages = PageFolder(root, 4 * cost_of(1024))
    assert pages._ledger.book(3 * cost_of(1024))  # and it ends
    space = PageFolder(root, 4 * cost_of(1024)).name_space("kv")
    for number in range(4):
        assert space.put(str(number), parts(bytes(1000)), number) is Written.WRITTEN
    assert len(files(root)) == 4
