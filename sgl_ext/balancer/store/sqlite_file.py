"""Documents in one SQLite file that several balancer processes share; `documents.py` has the rules.

The table `documents` is small, and `content` has the bytes, so that a use rewrites no content.
`listed` repeats the short `about` of what lists show: in `content` it follows the bytes of the
items, all of which SQLite would read.
With a write-ahead log processes can read while one writes. The log is not synced on each write:
after a power failure the file is consistent but may lack the last seconds.
"""

import os
import sqlite3
from pathlib import Path
from typing import NamedTuple

from sgl_ext.balancer.store import sqlite_shares
from sgl_ext.balancer.store.documents import (
    LONGEST_CHAIN,
    SWEEP_BATCH,
    Document,
    Found,
    Listed,
    StoreUnusable,
)
from sgl_ext.balancer.store.write_ahead_log import BUSY_S, LONG_BYTES, WriteAheadLog
from sgl_ext.protocols.errors import body_too_large

IN_MEMORY = ":memory:"
_FORMAT = 0x5E4E0002  # in the file's header: it is ours, and of this version
_TABLES = (
    """CREATE TABLE documents (
        number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, continues TEXT,
        items_bytes INTEGER NOT NULL,
        ttl_s REAL NOT NULL, used_s REAL NOT NULL, expires_s REAL NOT NULL, UNIQUE (owner, id))""",
    "CREATE INDEX by_use ON documents (used_s)",
    "CREATE INDEX by_expiry ON documents (expires_s)",
    "CREATE TABLE content (number INTEGER PRIMARY KEY, items BLOB NOT NULL, about BLOB NOT NULL)",
    """CREATE TRIGGER delete_content AFTER DELETE ON documents
        BEGIN DELETE FROM content WHERE number = old.number; END""",
    f"PRAGMA application_id = {_FORMAT}",
)
# Files of earlier versions lack it.
_LISTED = (
    """CREATE TABLE IF NOT EXISTS listed (
        number INTEGER PRIMARY KEY, about BLOB NOT NULL)""",
    """CREATE TRIGGER IF NOT EXISTS delete_listed AFTER DELETE ON documents
        BEGIN DELETE FROM listed WHERE number = old.number; END""",
)
_CHAIN = """
WITH RECURSIVE chain (number, continues, items_bytes, ttl_s, used_s, depth) AS (
    SELECT number, continues, items_bytes, ttl_s, used_s, 0 FROM documents
        WHERE owner = :owner AND id = :id AND expires_s > :now
    UNION ALL
    SELECT k.number, k.continues, k.items_bytes, k.ttl_s, k.used_s, depth + 1
        FROM chain JOIN documents k
        ON k.owner = :owner AND k.id = chain.continues AND k.expires_s > :now
        WHERE depth < :longest
)
SELECT number, continues, items_bytes, ttl_s, used_s FROM chain ORDER BY depth DESC
"""


class _Link(NamedTuple):
    """A document of a chain, without its content."""

    number: int
    continues: str | None
    items_bytes: int
    ttl_s: float
    used_s: float


class DocumentStore:
    """One process's connection to the file. It must not be used after a fork, nor by two threads
    at once.

    Methods raise sqlite3.Error if the disk is full or fails, or if another process has been
    writing for over a second. `now` is in seconds since the epoch.

    used_bytes: the size at the last sweep.
    """

    def __init__(self, path: str, limit_bytes: int) -> None:
        """Opens or creates the file. Raises StoreUnusable with its path."""
        self._path = path
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.log = WriteAheadLog(path)
        self._open()

    def _open(self) -> None:
        path = self._path
        try:
            if path != IN_MEMORY:
                Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                # Only the owner may read prompts. SQLite gives its other files the same mode.
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(
                path, timeout=BUSY_S, isolation_level="IMMEDIATE", check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from None
        try:
            self._prepare()
        except sqlite3.Error as error:
            self.close()
            raise self._unusable(error) from None
        self._inode = self._inode_now()

    def require_file(self) -> None:
        """Opens the file again if it was removed or replaced, so that nothing is written to a
        file without a name. Raises StoreUnusable."""
        if self._inode != self._inode_now():
            self.close()
            self._inode = -1  # until it is open again
            self._open()

    def _inode_now(self) -> int | None:
        """The inode of the file at the path; None if there is none."""
        try:
            return None if self._path == IN_MEMORY else Path(self._path).stat().st_ino
        except OSError:
            return None

    def _unusable(self, reason: object) -> StoreUnusable:
        return StoreUnusable(f"store={self._path!r}: cannot be used: {reason}")

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(f"PRAGMA journal_size_limit = {LONG_BYTES}")
        # An automatic one would make queries wait for the disk; see WriteAheadLog.
        self._db.execute("PRAGMA wal_autocheckpoint = 0")
        self._page_bytes = self._number("PRAGMA page_size")
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            if self._number("PRAGMA application_id") != _FORMAT:
                if self._number("SELECT count(*) FROM sqlite_master"):
                    raise sqlite3.DatabaseError("it belongs to another program or another version")
                for statement in _TABLES:
                    self._db.execute(statement)
            for statement in _LISTED:
                self._db.execute(statement)
            sqlite_shares.prepare(self._db)

    def check(self) -> None:
        """Reads the whole file. Raises StoreUnusable if it is corrupt."""
        try:
            found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.Error as error:
            found = error
        if found != "ok":
            raise self._unusable(found)

    def close(self) -> None:
        self._db.close()

    def put(self, owner: str, document: Document, ttl_s: float, now: float) -> int | None:
        """Stores a document, in place of the one with its id.

        Returns how many others were evicted for it, None if it is larger than its tenant's share.
        """
        if len(document.items) + len(document.about) > self.limit_bytes:
            return None
        self.log.require_room()
        with self._db:
            self._db.execute(_DELETE, (owner, document.id))
            row = (owner, document.id, document.continues, len(document.items))
            number = self._db.execute(
                "INSERT INTO documents"
                " (owner, id, continues, items_bytes, ttl_s, used_s, expires_s)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*row, ttl_s, now, now + ttl_s),
            ).lastrowid
            self._db.execute(
                "INSERT INTO content VALUES (?, ?, ?)", (number, document.items, document.about)
            )
            if document.is_listed:
                self._db.execute("INSERT INTO listed VALUES (?, ?)", (number, document.about))
            evicted = 0
            while self._used_bytes() > self.limit_bytes:
                gone = sqlite_shares.evict(self._db, owner, number)
                if not gone:  # it does not fit even alone, so none is evicted for it
                    self._db.rollback()
                    return None
                evicted += gone
        return evicted

    def get(self, owner: str, id: str, now: float) -> Found | None:
        """The document of this id. This does not count as a use."""
        row = self._db.execute(
            "SELECT items, about, expires_s"
            " FROM documents JOIN content USING (number)"
            " WHERE owner = ? AND id = ? AND expires_s > ?",
            (owner, id, now),
        ).fetchone()
        return None if row is None else Found(*row)

    def chain(self, owner: str, id: str, now: float, limit_bytes: int) -> list[bytes] | None:
        """The items of a document and of those that it continues, the oldest first.

        None if a document of the chain is missing. Raises BalancerError 413 if the items are
        larger than `limit_bytes`.
        """
        links = self._links(owner, id, now)
        if not links or links[0].continues is not None:
            return None
        if sum(link.items_bytes for link in links) > limit_bytes:
            raise body_too_large(limit_bytes)
        numbers = [link.number for link in links]
        places = ",".join("?" * len(numbers))
        read = f"SELECT number, items FROM content WHERE number IN ({places})"
        found = dict(self._db.execute(read, numbers).fetchall())
        return [found[number] for number in numbers] if len(found) == len(numbers) else None

    def listing(self, owner: str, after: str, limit: int, now: float) -> list[Listed]:
        """The owner's listed documents whose ids follow `after`, in the order of their ids."""
        rows = self._db.execute(
            "SELECT id, about, items_bytes, used_s, expires_s"
            " FROM documents JOIN listed USING (number)"
            " WHERE owner = ? AND id > ? AND expires_s > ? ORDER BY id LIMIT ?",
            (owner, after, now, limit),
        )
        return [Listed(*row) for row in rows]

    def use(self, owner: str, id: str, now: float) -> None:
        """Renews a document and those that it continues.

        To save writes, a document that was used within a hundredth of its TTL is not renewed.
        """
        links = self._links(owner, id, now)
        stale = [(now, now, k.number) for k in links if (now - k.used_s) * 100 >= k.ttl_s]
        if stale:
            with self._db:
                self._db.executemany(
                    "UPDATE documents SET used_s = ?, expires_s = ? + ttl_s WHERE number = ?", stale
                )

    def delete(self, owner: str, id: str, now: float) -> bool:
        """Deletes a document. False if it is unknown."""
        with self._db:
            found = self._db.execute(f"{_DELETE} AND expires_s > ?", (owner, id, now))
        return found.rowcount > 0

    def sweep(self, now: float) -> int:
        """Deletes some expired documents and returns how many. Notes what is used."""
        self.used_bytes = self._used_bytes()
        expired = "SELECT number FROM documents WHERE expires_s <= ? LIMIT ?"
        if self._db.execute(expired, (now, 1)).fetchone() is None:
            return 0
        with self._db:
            gone = self._db.execute(
                f"DELETE FROM documents WHERE number IN ({expired})", (now, SWEEP_BATCH)
            )
        return gone.rowcount

    def _links(self, owner: str, id: str, now: float) -> list[_Link]:
        named = {"owner": owner, "id": id, "now": now, "longest": LONGEST_CHAIN}
        return [_Link(*row) for row in self._db.execute(_CHAIN, named)]

    def _used_bytes(self) -> int:
        pages = self._number("PRAGMA page_count") - self._number("PRAGMA freelist_count")
        return pages * self._page_bytes

    def _number(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])


_DELETE = "DELETE FROM documents WHERE owner = ? AND id = ?"
