"""Documents that outlive the balancer, in one SQLite file that several of its processes share.

A document has an owner and an id, and may continue another one of the same owner:

    resp_1 <- resp_2 <- resp_3      chain(resp_3) is all three, the oldest first

Each lives for its own time from its last use on; a use of one is a use of all that it
continues. Beyond `limit_bytes` those go whose last use is longest ago. A chain that lacks a
link is not known any more.

`kept` is small and says what there is, `content` holds the bytes, so that a use rewrites no
content. The write-ahead log lets some processes read while one writes; it is not synced with
each write, so after a power failure the file is sound and may lack the last seconds.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from sgl_ext.settings.schema import IN_MEMORY
from sgl_ext.settings.types import SettingsError

_FORMAT = 0x5E4E0001  # stands in the file's header: whose it is, and of which version
_BUSY_S = 1.0
_LONGEST_CHAIN = 5_000
_EXPIRED_AT_ONCE = 64
_EVICTED_AT_ONCE = 8
_USUAL_LOG_BYTES = 4 << 20
_LONG_LOG_BYTES = 64 << 20
_TABLES = (
    """CREATE TABLE kept (
        number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, continues TEXT,
        items_bytes INTEGER NOT NULL,
        ttl_s REAL NOT NULL, used_s REAL NOT NULL, expires_s REAL NOT NULL, UNIQUE (owner, id))""",
    "CREATE INDEX by_use ON kept (used_s)",
    "CREATE INDEX by_expiry ON kept (expires_s)",
    "CREATE TABLE content (number INTEGER PRIMARY KEY, items BLOB NOT NULL, about BLOB NOT NULL)",
    """CREATE TRIGGER let_go AFTER DELETE ON kept
        BEGIN DELETE FROM content WHERE number = old.number; END""",
    f"PRAGMA application_id = {_FORMAT}",
)
_CHAIN = """
WITH RECURSIVE chain (number, continues, items_bytes, ttl_s, used_s, depth) AS (
    SELECT number, continues, items_bytes, ttl_s, used_s, 0 FROM kept
        WHERE owner = :owner AND id = :id AND expires_s > :now
    UNION ALL
    SELECT k.number, k.continues, k.items_bytes, k.ttl_s, k.used_s, depth + 1
        FROM chain JOIN kept k
        ON k.owner = :owner AND k.id = chain.continues AND k.expires_s > :now
        WHERE depth < :longest
)
SELECT number, continues, items_bytes, ttl_s, used_s FROM chain ORDER BY depth DESC
"""


class Document(NamedTuple):
    """What is kept under an id: `items` for those that continue it, `about` is all else.

    continues: the id of the document that it continues.
    expires_s: seconds since the epoch, unless it is used before.
    """

    id: str
    items: bytes
    about: bytes
    continues: str | None = None
    expires_s: float = 0.0


class _Link(NamedTuple):
    """A document of a chain, without its content."""

    number: int
    continues: str | None
    items_bytes: int
    ttl_s: float
    used_s: float


class LongChain(Exception):
    """All that a document continues is more than was asked for."""


class _TooLarge(Exception):
    """A document does not fit even alone: nothing is to go for it."""


def require_store(path: str | None, limit_bytes: int) -> None:
    """Makes sure that the file, if it is one, can be used and is sound. Raises SettingsError."""
    if path in (None, IN_MEMORY) or not limit_bytes:
        return
    with closing(Store(path, limit_bytes)) as store:
        store.check()


class Store:
    """One process's connection to the file. It may not be carried across a fork.

    Its methods may raise sqlite3.Error: the disk is full or fails, or another process has
    been writing for longer than a second. `now` is in seconds since the epoch.
    """

    def __init__(self, path: str, limit_bytes: int) -> None:
        """Opens the file, or makes it. Raises SettingsError, naming it, if that cannot be."""
        self._path = path
        self._limit_bytes = limit_bytes
        try:
            if path != IN_MEMORY:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                # Prompts are nobody else's to read. What SQLite puts beside it has the same mode.
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from None
        try:
            self._prepare()
        except sqlite3.Error as error:
            self.close()
            raise self._unusable(error) from None

    def _unusable(self, reason: object) -> SettingsError:
        return SettingsError(f"store={self._path!r}: cannot be used: {reason}")

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(f"PRAGMA journal_size_limit = {_USUAL_LOG_BYTES}")
        self._db.execute("PRAGMA wal_autocheckpoint = 0")  # it syncs the disk: `checkpoint` does
        self._page_bytes = self._number("PRAGMA page_size")
        with self._writing():
            if self._number("PRAGMA application_id") != _FORMAT:
                if self._number("SELECT count(*) FROM sqlite_master"):
                    raise sqlite3.DatabaseError("it is another program's, or another version's")
                for statement in _TABLES:
                    self._db.execute(statement)

    def check(self) -> None:
        """Reads all of it. Raises SettingsError if it is corrupt."""
        try:
            found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.Error as error:
            found = error
        if found != "ok":
            raise self._unusable(found)

    def close(self) -> None:
        self._db.close()

    def put(self, owner: str, document: Document, ttl_s: float, now: float) -> int | None:
        """Keeps a document, in place of the one with its id; its `expires_s` is not read.

        Returns how many others had to go for it, None if it is too large to be kept.
        """
        if len(document.items) + len(document.about) > self._limit_bytes:
            return None
        with suppress(_TooLarge), self._writing():
            self._db.execute(_DELETE, (owner, document.id))
            row = (owner, document.id, document.continues, len(document.items))
            number = self._db.execute(
                "INSERT INTO kept (owner, id, continues, items_bytes, ttl_s, used_s, expires_s)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*row, ttl_s, now, now + ttl_s),
            ).lastrowid
            self._db.execute(
                "INSERT INTO content VALUES (?, ?, ?)", (number, document.items, document.about)
            )
            evicted = 0
            while self._used_bytes() > self._limit_bytes:
                gone = self._db.execute(_EVICT, (number, _EVICTED_AT_ONCE)).rowcount
                if not gone:
                    raise _TooLarge
                evicted += gone
            return evicted
        return None

    def get(self, owner: str, id: str, now: float) -> Document | None:
        """The document of that id; this is no use of it."""
        row = self._db.execute(
            "SELECT id, items, about, continues, expires_s FROM kept JOIN content USING (number)"
            " WHERE owner = ? AND id = ? AND expires_s > ?",
            (owner, id, now),
        ).fetchone()
        return None if row is None else Document(*row)

    def chain(self, owner: str, id: str, now: float, most_bytes: int) -> list[bytes] | None:
        """The items of all that a document continues, the oldest first, and its own.

        None if it is not known, or does not go back to its beginning. Raises LongChain.
        """
        links = self._links(owner, id, now)
        if not links or links[0].continues is not None:
            return None
        if sum(link.items_bytes for link in links) > most_bytes:
            raise LongChain
        numbers = [link.number for link in links]
        places = ",".join("?" * len(numbers))
        read = f"SELECT number, items FROM content WHERE number IN ({places})"
        found = dict(self._db.execute(read, numbers).fetchall())
        return [found[number] for number in numbers] if len(found) == len(numbers) else None

    def use(self, owner: str, id: str, now: float) -> None:
        """Lets a document and all that it continues live on from now.

        What was used a moment ago, a hundredth of its time, is not written again.
        """
        links = self._links(owner, id, now)
        unused = [(now, now, k.number) for k in links if (now - k.used_s) * 100 >= k.ttl_s]
        if unused:
            with self._writing():
                self._db.executemany(
                    "UPDATE kept SET used_s = ?, expires_s = ? + ttl_s WHERE number = ?", unused
                )

    def delete(self, owner: str, id: str, now: float) -> bool:
        """Lets a document go. False if it is not known."""
        with self._writing():
            known = self.get(owner, id, now) is not None
            self._db.execute(_DELETE, (owner, id))
        return known

    def sweep(self, now: float) -> int:
        """Lets some of what has expired go; returns how many."""
        expired = "SELECT number FROM kept WHERE expires_s <= ? LIMIT ?"
        if self._db.execute(expired, (now, 1)).fetchone() is None:
            return 0
        with self._writing():
            gone = self._db.execute(
                f"DELETE FROM kept WHERE number IN ({expired})", (now, _EXPIRED_AT_ONCE)
            ).rowcount
        return int(gone)

    def wants_checkpoint(self) -> bool:
        """Whether the log is long."""
        return self._path != IN_MEMORY and self._log_bytes() > _USUAL_LOG_BYTES

    def checkpoint(self) -> None:
        """Moves the log into the file. It waits for the disk: call it in another thread."""
        with closing(sqlite3.connect(self._path, timeout=_BUSY_S)) as db:
            db.execute(f"PRAGMA journal_size_limit = {_USUAL_LOG_BYTES}")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            if self._log_bytes() > _LONG_LOG_BYTES:
                # Written to faster than it is emptied: this makes writers wait.
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            # Who writes first to an emptied log waits for the disk once more. May it be this one.
            with db:
                db.execute(f"PRAGMA user_version = {int(time.monotonic())}")

    def _log_bytes(self) -> int:
        try:
            return Path(f"{self._path}-wal").stat().st_size
        except FileNotFoundError:
            return 0

    def _links(self, owner: str, id: str, now: float) -> list[_Link]:
        named = {"owner": owner, "id": id, "now": now, "longest": _LONGEST_CHAIN}
        return [_Link(*row) for row in self._db.execute(_CHAIN, named)]

    def _used_bytes(self) -> int:
        pages = self._number("PRAGMA page_count") - self._number("PRAGMA freelist_count")
        return pages * self._page_bytes

    def _number(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction: all of it, or nothing."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            # What a full disk fails has been rolled back already.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


_DELETE = "DELETE FROM kept WHERE owner = ? AND id = ?"
# Of one chain the last goes first, as it is of no use without those before it.
_EVICT = """DELETE FROM kept WHERE number IN
    (SELECT number FROM kept WHERE number != ? ORDER BY used_s, number DESC LIMIT ?)"""
