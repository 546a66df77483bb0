"""A full store evicts the documents of tenants that hold more than their share."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from sgl_ext.balancer.store.sqlite_file import Document, DocumentStore

_MIB = 1 << 20
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
