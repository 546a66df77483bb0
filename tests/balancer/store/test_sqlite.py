"""The document store: persistence, eviction, chains, and files that stop the start."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from sgl_ext_cpu.node import free_port

from sgl_ext.balancer.store.documents import Document, Found, StoreUnusable
from sgl_ext.balancer.store.opening import check_store
from sgl_ext.balancer.store.sqlite import DocumentStore
from sgl_ext.node.children import make_children
from sgl_ext.node.hardware import Hardware
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
    assert found == Found(b"r1" * 10, b"about r1", 160.0)
    first.close()
    second.close()
    assert opened().get("a", "r1", now=159.9) == found


def test_the_file_stays_within_its_limit(opened: Open, tmp_path: Path) -> None:
    store = opened(limit_bytes=_MIB)
    for number in range(200):
        store.put("a", turn(f"r{number}", size=5000), 1e6, now=float(number))
    store.log._checkpoint()
    assert (tmp_path / "kept" / "store.sqlite").stat().st_size <= 1.1 * _MIB
    assert store.get("a", "r199", now=200.0) is not None


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


_NAMES = ("let_go", "hold", "held", "by_tenant")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store.sqlite")


@pytest.fixture
def store(path: str) -> Iterator[DocumentStore]:
    made = DocumentStore(path, 4 * _MIB)
    yield made
    made.close()


def put(store: DocumentStore, owner: str, id: str, size: int, now: float) -> int | None:
    return store.put(owner, Document(id, b"x" * size, b"about"), 1e6, now)


def held(db: sqlite3.Connection) -> tuple[dict[str, int], dict[str, int]]:
    """Each tenant's bytes, by the account and by its documents."""
    rows = db.execute(
        "SELECT owner, 256 + length(items) + length(about)"
        " FROM documents JOIN content USING (number)"
    )
    counted: dict[str, int] = {}
    for owner, size in rows:
        tenant = owner.partition(" ")[2]
        counted[tenant] = counted.get(tenant, 0) + size
    return dict(db.execute("SELECT tenant, bytes FROM held")), counted


def test_the_account_is_that_of_the_documents(store: DocumentStore) -> None:
    random = Random(7)
    owners = [
        f"{kind} {tenant}" for kind in ("responses", "contexts") for tenant in ("ann", "b c", "")
    ]
    for step in range(400):
        owner, id, now = random.choice(owners), f"d{random.randrange(40)}", float(step)
        if random.random() < 0.8:
            document = Document(id, b"x" * random.randrange(60_000), b"y" * random.randrange(9))
            store.put(owner, document, random.choice([20.0, 1e6]), now)
        elif random.random() < 0.5:
            store.delete(owner, id, now)
        else:
            store.sweep(now)
        account, counted = held(store._db)
        assert account == counted


def test_a_store_of_an_earlier_version_gets_the_account(path: str) -> None:
    first = DocumentStore(path, 4 * _MIB)
    put(first, "contexts ann", "a", 1000, now=0.0)
    put(first, "responses ben", "b", 2000, now=0.0)
    before = held(first._db)[0]
    with first._db:
        for name in _NAMES:
            (kind,) = first._db.execute(
                "SELECT type FROM sqlite_master WHERE name = ?", (name,)
            ).fetchone()
            first._db.execute(f"DROP {kind} {name}")
    first.close()
    again = DocumentStore(path, 4 * _MIB)
    assert held(again._db)[0] == before
    assert again.get("contexts ann", "a", now=1.0) is not None
    put(again, "contexts ann", "a2", 10, now=1.0)
    account, counted = held(again._db)
    assert account == counted
    again.close()
