"""The document store: persistence, eviction, chains, and files that stop the start."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sgl_ext_cpu.node import free_port

from sgl_ext.balancer.conversations.document_store import (
    IN_MEMORY,
    Document,
    DocumentStore,
    StoreUnusable,
    check_store,
)
from sgl_ext.launch import make_children
from sgl_ext.node.hardware import Hardware
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.settings.schema import BalancerSettings, LaunchSettings

_MIB = 1 << 20
Open = Callable[..., DocumentStore]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens connections to one file, as several processes do."""
    stores: list[DocumentStore] = []

    def begin(limit_bytes: int = 4 * _MIB) -> DocumentStore:
        stores.append(DocumentStore(str(tmp_path / "kept" / "store.sqlite"), limit_bytes))
        return stores[-1]

    yield begin
    for store in stores:
        store.close()


def turn(id: str, continues: str | None = None, size: int = 10) -> Document:
    return Document(id, id.encode() * size, b"about " + id.encode(), continues)


def test_documents_are_found_by_other_processes_and_after_a_restart(opened: Open) -> None:
    first, second = opened(), opened()
    assert first.put("a", turn("r1"), 60.0, now=100.0) == 0
    found = second.get("a", "r1", now=100.0)
    assert found == Document("r1", b"r1" * 10, b"about r1", None, 160.0)
    first.close()
    second.close()
    assert opened().get("a", "r1", now=159.9) == found


def test_owners_cannot_read_or_delete_each_others_documents(opened: Open) -> None:
    store = opened()
    store.put("a", turn("r1"), 60.0, now=0.0)
    assert store.get("b", "r1", now=0.0) is None
    assert store.chain("b", "r1", 0.0, _MIB) is None
    assert not store.delete("b", "r1", now=0.0)
    store.put("b", turn("r1", size=1), 60.0, now=0.0)
    assert store.chain("a", "r1", 0.0, _MIB) == [b"r1" * 10]
    store.put("b", turn("r2", "r1"), 60.0, now=0.0)
    assert store.chain("b", "r2", 0.0, _MIB) == [b"r1", b"r2" * 10]


def test_a_chain_is_complete_or_unknown(opened: Open) -> None:
    store = opened()
    for id, continues in (("r1", None), ("r2", "r1"), ("r3", "r2"), ("other", "r1")):
        store.put("a", turn(id, continues), 60.0, now=0.0)
    assert store.chain("a", "r3", 0.0, _MIB) == [b"r1" * 10, b"r2" * 10, b"r3" * 10]
    assert store.chain("a", "other", 0.0, _MIB) == [b"r1" * 10, b"other" * 10]
    assert store.delete("a", "r2", now=0.0)
    assert store.chain("a", "r3", 0.0, _MIB) is None
    assert store.chain("a", "other", 0.0, _MIB) == [b"r1" * 10, b"other" * 10]


def test_a_circular_chain_is_unknown(opened: Open) -> None:
    store = opened()
    store.put("a", turn("r1"), 60.0, now=0.0)
    store.put("a", turn("r2", "r1"), 60.0, now=0.0)
    store.put("a", turn("r1", "r2"), 60.0, now=0.0)
    assert store.chain("a", "r2", 0.0, _MIB) is None


def test_a_chain_over_the_size_limit_is_not_read(opened: Open) -> None:
    store = opened()
    store.put("a", turn("r1"), 60.0, now=0.0)
    store.put("a", turn("r2", "r1"), 60.0, now=0.0)
    assert store.chain("a", "r2", 0.0, 40) is not None
    with pytest.raises(BalancerError, match="larger than"):
        store.chain("a", "r2", 0.0, 39)


def test_a_use_renews_the_whole_chain(opened: Open) -> None:
    store = opened()
    store.put("a", turn("r1"), 60.0, now=0.0)
    store.put("a", turn("r2", "r1"), 60.0, now=50.0)
    store.use("a", "r2", now=59.0)
    assert store.chain("a", "r2", 118.9, _MIB) is not None
    assert store.chain("a", "r2", 119.0, _MIB) is None


def test_an_expired_document_is_unknown_before_it_is_swept(opened: Open) -> None:
    store = opened()
    for number in range(100):
        store.put("a", turn(f"r{number}"), 10.0, now=0.0)
    store.put("a", turn("kept"), 60.0, now=0.0)
    assert store.get("a", "r1", now=10.0) is None
    assert store.sweep(now=9.0) == 0
    swept = [store.sweep(now=10.0) for _ in range(3)]
    assert sum(swept) == 100
    assert swept[-1] == 0
    assert store.get("a", "kept", now=10.0) is not None


def test_beyond_the_limit_the_least_recently_used_is_evicted(opened: Open) -> None:
    store = opened(limit_bytes=_MIB)
    for number in range(4):
        store.put("a", turn(f"r{number}", size=100_000), 1e6, now=float(number))
    store.use("a", "r0", now=10.0)
    evicted = store.put("a", turn("new", size=100_000), 1e6, now=11.0)
    assert evicted is not None
    assert evicted > 0
    assert store.get("a", "r1", now=11.0) is None
    assert store.get("a", "new", now=11.0) is not None


def test_the_file_stays_within_its_limit(opened: Open, tmp_path: Path) -> None:
    store = opened(limit_bytes=_MIB)
    for number in range(200):
        store.put("a", turn(f"r{number}", size=5000), 1e6, now=float(number))
    store.log._checkpoint()
    assert (tmp_path / "kept" / "store.sqlite").stat().st_size <= 1.1 * _MIB
    assert store.get("a", "r199", now=200.0) is not None


def test_a_document_larger_than_the_store_evicts_nothing(opened: Open) -> None:
    store = opened(limit_bytes=_MIB)
    store.put("a", turn("r1"), 60.0, now=0.0)
    assert store.put("a", Document("large", b"x" * (_MIB + 1), b""), 60.0, now=0.0) is None
    # It fits alone, but not together with the pages that the file always needs.
    assert store.put("a", Document("large", b"x" * (_MIB - 100), b""), 60.0, now=0.0) is None
    assert store.get("a", "r1", now=0.0) is not None


def test_a_full_disk_fails_a_write_and_keeps_the_other_documents(opened: Open) -> None:
    store = opened(limit_bytes=64 * _MIB)
    store.put("a", turn("r1"), 60.0, now=0.0)
    store._db.execute("PRAGMA max_page_count = 100")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.put("a", turn("large", size=200_000), 60.0, now=0.0)
    assert store.get("a", "large", now=0.0) is None
    assert store.chain("a", "r1", 0.0, _MIB) == [b"r1" * 10]
    store.put("a", turn("small"), 60.0, now=0.0)
    assert store.get("a", "small", now=0.0) is not None


def test_only_the_owner_can_read_the_files(opened: Open, tmp_path: Path) -> None:
    opened().put("a", turn("r1"), 60.0, now=0.0)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "kept").iterdir()}
    assert modes == dict.fromkeys(("store.sqlite", "store.sqlite-wal", "store.sqlite-shm"), 0o600)


@pytest.mark.parametrize("garbage", [b"not a database, but long enough for one" * 100])
def test_a_file_of_another_program_stops_the_start(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "store.sqlite"
    path.write_bytes(garbage)
    with pytest.raises(StoreUnusable, match=r"store=.*store.sqlite.*not a database"):
        check_store(str(path), _MIB)
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as other:
        other.execute("CREATE TABLE theirs (x)")
        other.commit()
    with pytest.raises(StoreUnusable, match=r"store=.*other.sqlite.*another program"):
        check_store(str(tmp_path / "other.sqlite"), _MIB)
    with pytest.raises(StoreUnusable, match=r"store=.*cannot be used"):
        check_store(str(tmp_path), _MIB)


def test_a_corrupt_store_stops_the_start(opened: Open, tmp_path: Path) -> None:
    store = opened()
    for number in range(50):
        store.put("a", turn(f"r{number}", size=5000), 60.0, now=0.0)
    store.close()
    path = tmp_path / "kept" / "store.sqlite"
    check_store(str(path), _MIB)
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(8 * 4096))
    with pytest.raises(StoreUnusable, match="store="):
        check_store(str(path), _MIB)


def test_the_launcher_checks_the_store_before_it_starts_engines(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite").write_bytes(b"not a database, but long enough for one" * 100)
    config = LaunchSettings(
        model_path="m", log_dir=str(tmp_path), balancer=BalancerSettings(port=free_port())
    )
    with pytest.raises(StoreUnusable, match=r"store=.*store.sqlite.*not a database"):
        make_children(config, Hardware(()))


class Documents(RuleBasedStateMachine):
    """Against a dictionary, as long as nothing has to go."""

    ids = st.integers(0, 5).map(str)

    def __init__(self) -> None:
        super().__init__()
        self.store = DocumentStore(IN_MEMORY, 64 * _MIB)
        self.now = 0.0
        self.known: dict[str, tuple[str | None, float, float]] = {}

    def chain(self, id: str | None) -> list[str] | None:
        found: list[str] = []
        while id is not None:
            if id not in self.known or self.known[id][2] <= self.now or id in found:
                return None
            found.insert(0, id)
            id = self.known[id][0]
        return found

    @rule(id=ids, continues=st.none() | ids, ttl_s=st.integers(1, 20))
    def put(self, id: str, continues: str | None, ttl_s: float) -> None:
        self.store.put("a", Document(id, id.encode(), b"", continues), ttl_s, self.now)
        self.known[id] = (continues, ttl_s, self.now + ttl_s)

    @rule(id=ids)
    def use(self, id: str) -> None:
        chain = self.chain(id)
        if chain is not None:
            self.store.use("a", id, self.now)
            for each in chain:
                continues, ttl_s, _ = self.known[each]
                self.known[each] = (continues, ttl_s, self.now + ttl_s)

    @rule(id=ids)
    def delete(self, id: str) -> None:
        there = id in self.known and self.known[id][2] > self.now
        assert self.store.delete("a", id, self.now) == there
        self.known.pop(id, None)

    @rule(seconds=st.integers(1, 15))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        self.store.sweep(self.now)

    @invariant()
    def every_chain_is_found(self) -> None:
        for id in map(str, range(6)):
            chain = self.chain(id)
            wanted = None if chain is None else [each.encode() for each in chain]
            assert self.store.chain("a", id, self.now, _MIB) == wanted

    def teardown(self) -> None:
        self.store.close()


TestDocuments = Documents.TestCase
TestDocuments.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
