"""Notes of where segments end in the shared tier, and which process reads them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from sgl_ext.engine.tiers import segment_notes
from sgl_ext.engine.tiers.page_folder import NameSpace, PageFolder
from sgl_ext.engine.tiers.segment_notes import NoteReader, NoteWriter

PAGE = 4
KEYS = [letter * 64 for letter in "abc"]
# The second one ends in the middle of the second page, the last one on the third.
SEGMENTS = [(1, None, 3), (2, 1, 10), (3, 2, 12)]


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


class Engine:
    """One engine's pages and notes."""

    def __init__(self, root: Path, budget_bytes: int = 1 << 20) -> None:
        self.folder = PageFolder(root, budget_bytes)
        self.pages = self.folder.name_space("kv-1")
        self.notes = NoteWriter(self.folder, "kv-1", PAGE)

    def store(self, keys: list[str], used_ns: int = 5) -> None:
        for key in keys:
            self.pages.put(key, [memoryview(b"page")], used_ns)


@pytest.fixture
def reader(root: Path) -> Iterator[Callable[[], NoteReader]]:
    opened: list[NoteReader] = []

    def open_one() -> NoteReader:
        opened.append(NoteReader(root / "kv-1"))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"sgl_ext_{name}_total", labels) or 0.0


def test_a_segment_is_there_while_the_page_is_in_which_it_ends(
    root: Path, reader: Callable[[], NoteReader]
) -> None:
    engine, notes = Engine(root), reader()
    assert notes.segments() == {}
    engine.notes.add(SEGMENTS, KEYS)
    engine.notes.write(5)
    assert notes.segments() == {}, "no page is stored"
    engine.store(KEYS)
    assert notes.segments() == {segment[0]: segment for segment in SEGMENTS}
    engine.pages.drop(KEYS[2])
    assert notes.segments().keys() == {1, 2}
    engine.store(KEYS)
    assert notes.segments().keys() == {1, 2, 3}, "it was computed again"
    engine.notes.clear()
    assert notes.segments() == {}


def test_a_segment_that_ends_beyond_the_known_pages_is_not_noted(
    root: Path, reader: Callable[[], NoteReader]
) -> None:
    engine = Engine(root)
    engine.store(KEYS)
    engine.notes.add(SEGMENTS, KEYS[:2])
    engine.notes.write(5)
    assert reader().segments().keys() == {1, 2}


def test_a_note_is_used_when_its_page_is(root: Path, reader: Callable[[], NoteReader]) -> None:
    """So a full tier evicts the notes of what it has evicted, and not those of what is used."""
    engine, notes = Engine(root), reader()
    engine.notes.add(SEGMENTS, KEYS)
    engine.notes.write(7)
    engine.store(KEYS[:2], used_ns=50)
    notes.segments()
    space = PageFolder(root, 1).name_space("kv-1.notes")
    names = [f"{segment:032x}" for segment in (1, 2, 3)]
    assert [space.used_ns(name) for name in names] == [50, 50, 0]
    engine.pages.touch(KEYS[0], 60)
    notes.segments()
    assert [space.used_ns(name) for name in names] == [60, 50, 0]


def damage_bytes(space: NameSpace, name: str) -> None:
    (space.path / name).write_bytes(b"torn")


def damage_text(space: NameSpace, name: str) -> None:
    space.drop(name)
    space.put(name, [memoryview(b"[1,2,3]".ljust(128))], 5)


def damage_parent(space: NameSpace, name: str) -> None:
    space.drop(name)
    text = f'["not hex",5,"{KEYS[0]}"]'
    space.put(name, [memoryview(text.encode().ljust(128))], 5)


@pytest.mark.parametrize("damage", [damage_bytes, damage_text, damage_parent])
def test_a_damaged_note_is_removed_and_counted(
    root: Path, reader: Callable[[], NoteReader], damage: Callable[[NameSpace, str], None]
) -> None:
    engine = Engine(root)
    engine.store(KEYS)
    engine.notes.add(SEGMENTS, KEYS)
    engine.notes.write(5)
    space, name = engine.folder.name_space("kv-1.notes"), f"{2:032x}"
    damage(space, name)
    before, notes = metric("shared_tier_pages", result="corrupt"), reader()
    assert notes.segments().keys() == {1, 3}
    assert metric("shared_tier_pages", result="corrupt") == before + 1
    assert space.used_ns(name) is None
    assert notes.segments().keys() == {1, 3}
    assert metric("shared_tier_pages", result="corrupt") == before + 1


def test_other_files_beside_notes_are_no_notes(
    root: Path, reader: Callable[[], NoteReader]
) -> None:
    engine, notes = Engine(root), reader()
    engine.store(KEYS)
    folder = root / "kv-1.notes"
    (folder / "a folder").mkdir()
    os.mkfifo(folder / "a pipe")
    (folder / "a link").symlink_to("/etc/passwd")
    engine.notes.add(SEGMENTS, KEYS)
    engine.notes.write(5)
    assert notes.segments().keys() == {1, 2, 3}


def test_what_waits_to_be_noted_is_bounded_and_counted(
    root: Path, reader: Callable[[], NoteReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_notes, "_MOST_WAITING", 2)
    monkeypatch.setattr(segment_notes, "MOST_NOTES", 3)
    engine, before = Engine(root), metric("shared_tier_notes_dropped")
    engine.store(KEYS)
    for first in (1, 11, 21):
        engine.notes.add([(first, None, 4), (first + 1, first, 8)], KEYS)
    assert metric("shared_tier_notes_dropped") == before + 2
    engine.notes.write(5)
    assert len(reader().segments()) == 3


def test_one_engine_publishes_and_when_it_is_killed_another_one(
    root: Path, reader: Callable[[], NoteReader]
) -> None:
    script = f"""
import sys; sys.path.insert(0, {os.getcwd()!r})
from pathlib import Path
from sgl_ext.engine.tiers.segment_notes import NoteReader
notes = NoteReader(Path({str(root / "kv-1")!r}))
print(notes.may_publish(), flush=True)
sys.stdin.read()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "True\n"
        second, third = reader(), reader()
        assert not second.may_publish()
        first.kill()
        first.wait()
        assert second.may_publish()
        assert second.may_publish(), "from now on"
        assert not third.may_publish()


def test_a_tier_that_is_removed_has_no_segments(
    root: Path, reader: Callable[[], NoteReader]
) -> None:
    engine, notes = Engine(root), reader()
    engine.store(KEYS)
    engine.notes.add(SEGMENTS, KEYS)
    engine.notes.write(5)
    assert notes.segments()
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert notes.segments() == {}
