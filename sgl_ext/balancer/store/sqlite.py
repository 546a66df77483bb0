"""Documents in one SQLite file that several balancer processes share; `documents.py` has the rules.

The table `documents` is small, and `content` has the bytes, so that a use rewrites no content.
`listed` repeats the short `about` of what lists show: in `content` it follows the bytes of the
items, and SQLite would read them all. With a write-ahead log processes can read while one writes.
The log is not synced on each write: after a power failure the file is consistent but may lack the
last seconds.

A full store evicts the documents of tenants that hold more than their share. The share is an equal
part of what all tenants hold. A tenant that stores more than that evicts its own least recently
used documents, and one within its share those of the tenant that holds most. So no tenant can drive
out what another holds within its share.

A document's owner is its kind, a blank, and the tenant. The table `held` has each tenant's bytes.
Triggers keep it up to date, also for what a process of an earlier version writes.

All queries of a process run in one thread, so that nothing else waits for the disk. Queries run in
order. Their queue is bounded, and a query that has no result in time fails. While the thread is
late, new queries fail at once. After a write failed, new writes fail at once for a moment:
otherwise reads would wait behind writes that wait for a lock.
"""

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.documents import (
    LONGEST_CHAIN,
    MAX_QUEUED,
    MAX_QUEUED_BYTES,
    SWEEP_BATCH,
    WAIT_S,
    Document,
    Found,
    Listed,
    StoreFailed,
    StoreUnusable,
    victim_of,
)
from sgl_ext.balancer.store.shared_state import Batch, Use
from sgl_ext.protocols.errors import BalancerError, body_too_large
from sgl_ext.settings.schema import IN_MEMORY
from sgl_ext.supervision import Guard

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
_USAGE = (
    """CREATE TABLE IF NOT EXISTS usage (
        period TEXT NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL,
        requests INTEGER NOT NULL, tokens INTEGER NOT NULL,
        PRIMARY KEY (period, tenant, key)) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS usage_writers (
        writer TEXT PRIMARY KEY, number INTEGER NOT NULL, period TEXT NOT NULL) WITHOUT ROWID""",
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
            for statement in (*_LISTED, *_USAGE):
                self._db.execute(statement)
            prepare_shares(self._db)

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
                gone = evict_for(self._db, owner, number)
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

    def add_usage(self, batch: Batch) -> None:
        """As `UsageTable.add`."""
        with self._db:
            is_new = self._db.execute(_NUMBER, (batch.writer, batch.number, batch.forgets))
            if is_new.rowcount:
                self._db.executemany(_ADD, batch.uses)
                for table in ("usage", "usage_writers"):
                    self._db.execute(f"DELETE FROM {table} WHERE period < ?", (batch.forgets,))

    def usage(self, first: str, last: str) -> list[Use]:
        """The uses in these periods and those between them, in order."""
        found = self._db.execute(
            "SELECT * FROM usage WHERE period BETWEEN ? AND ? ORDER BY period, tenant, key",
            (first, last),
        )
        return [Use(*row) for row in found]

    def _links(self, owner: str, id: str, now: float) -> list[_Link]:
        named = {"owner": owner, "id": id, "now": now, "longest": LONGEST_CHAIN}
        return [_Link(*row) for row in self._db.execute(_CHAIN, named)]

    def _used_bytes(self) -> int:
        pages = self._number("PRAGMA page_count") - self._number("PRAGMA freelist_count")
        return pages * self._page_bytes

    def _number(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])


_NUMBER = """
INSERT INTO usage_writers VALUES (?, ?, ?) ON CONFLICT (writer)
    DO UPDATE SET number = excluded.number, period = excluded.period
    WHERE excluded.number > usage_writers.number
"""
_ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?) ON CONFLICT (period, tenant, key)
    DO UPDATE SET requests = requests + excluded.requests, tokens = tokens + excluded.tokens
"""
_DELETE = "DELETE FROM documents WHERE owner = ? AND id = ?"


BUSY_S = 1.0
"""How long a connection waits for another one's lock."""
LONG_BYTES = 4 << 20
LIMIT_BYTES = 64 << 20


class WriteAheadLog:
    """The log of the file at `path`."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def checkpoint_if_long(self) -> None:
        """Moves a long log into the file. Any thread may call it, and it waits for the disk."""
        if self._bytes() > LONG_BYTES:
            self._checkpoint()

    def require_room(self) -> None:
        """Empties a log that has reached its limit: a burst of large documents fills it before the
        next `checkpoint_if_long`. Raises sqlite3.OperationalError if a reader prevents that."""
        if self._bytes() > LIMIT_BYTES:
            self._checkpoint()
            if self._bytes() > LIMIT_BYTES:
                raise sqlite3.OperationalError("its write-ahead log is full")

    def _checkpoint(self) -> None:
        file = f"{self._path.absolute().as_uri()}?mode=rw"  # which makes no file
        with closing(sqlite3.connect(file, timeout=BUSY_S, uri=True)) as db:
            db.execute(f"PRAGMA journal_size_limit = {LONG_BYTES}")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            if self._bytes() > LIMIT_BYTES:
                # Writers fill the log faster than it empties; this makes them wait.
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            # The first write to an empty log waits for the disk. This thread makes that write.
            with db:
                db.execute(f"PRAGMA user_version = {int(time.monotonic())}")

    def _bytes(self) -> int:
        try:
            return Path(f"{self._path}-wal").stat().st_size
        except FileNotFoundError:
            return 0


# A document's own row and its places in the indexes.
_ROW_BYTES = 256


def _tenant(owner: str) -> str:
    return f"substr({owner}, instr({owner}, ' ') + 1)"


_SIZE = f"{_ROW_BYTES} + length(items) + length(about)"
_SHARE_TABLES = (
    f"CREATE INDEX IF NOT EXISTS by_tenant ON documents ({_tenant('owner')}, used_s)",
    "CREATE TABLE held (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL)",
    f"""INSERT INTO held SELECT {_tenant("owner")}, sum({_SIZE})
        FROM documents JOIN content USING (number) GROUP BY 1""",
    f"""CREATE TRIGGER hold AFTER INSERT ON content BEGIN
        INSERT INTO held
            SELECT {_tenant("owner")}, {_ROW_BYTES} + length(new.items) + length(new.about)
            FROM documents WHERE number = new.number
            ON CONFLICT (tenant) DO UPDATE SET bytes = bytes + excluded.bytes; END""",
    f"""CREATE TRIGGER let_go BEFORE DELETE ON documents BEGIN
        UPDATE held SET bytes = bytes -
            coalesce((SELECT {_SIZE} FROM content WHERE number = old.number), 0)
            WHERE tenant = {_tenant("old.owner")};
        DELETE FROM held WHERE tenant = {_tenant("old.owner")} AND bytes <= 0; END""",
)
# The last document of a chain is evicted first, because it needs those before it.
_EVICT = f"""DELETE FROM documents WHERE number IN
    (SELECT number FROM documents WHERE {_tenant("owner")} = ? AND number != ?
     ORDER BY used_s, number DESC LIMIT ?)"""


def prepare_shares(db: sqlite3.Connection) -> None:
    """Creates what is missing in a store, within a transaction."""
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'held'").fetchone() is None:
        for statement in _SHARE_TABLES:
            db.execute(statement)


def evict_for(db: sqlite3.Connection, owner: str, number: int | None) -> int:
    """Evicts a few documents for the owner's document of this number; returns how many.

    0 if there is none to evict: the document is larger than its tenant's share of a full store.
    """
    writer = owner[owner.find(" ") + 1 :]
    held: dict[str, int] = dict(db.execute("SELECT tenant, bytes FROM held"))
    tenant, batch = victim_of(held, writer)
    return db.execute(_EVICT, (tenant, number, batch)).rowcount


_WRITE_PAUSE_S = 1.0
_T = TypeVar("_T")


class StoreThread:
    """The document store of one process. Failures are counted; the first in a row is logged."""

    def __init__(
        self,
        store: DocumentStore,
        metrics: Metrics,
        wait_s: float = WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        metrics.tables.add("store", lambda: store.used_bytes, lambda: store.limit_bytes, "bytes")
        self._failed = metrics.store_failed
        self._wait_s = wait_s
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "store")
        self._queued = 0
        self._queued_bytes = 0
        self._is_late = False
        self._writes_from_s = -1.0
        self._reading = Guard("reading the store of responses and contexts", self._failed)
        self._writing = Guard("writing the store of responses and contexts", self._failed)

    async def read(self, query: Callable[[DocumentStore], _T]) -> _T:
        """The result of a query. Raises StoreFailed after `wait_s` at most."""
        with self._reading:
            return await self._run(query)
        raise StoreFailed

    async def write(self, query: Callable[[DocumentStore], _T], size_bytes: int = 0) -> _T:
        """The result of a query that writes `size_bytes`. Raises StoreFailed after `wait_s` at
        most; what had begun then may still be written."""
        with self._writing:
            return await self._run_write(query, size_bytes)
        raise StoreFailed

    async def tidy(self, query: Callable[[DocumentStore], _T]) -> _T | None:
        """The result of a query that writes if there is something to do, None if it failed. No
        answer depends on it, and its success says little, so it is not logged."""
        try:
            return await self._run_write(query, 0)
        except Exception:
            self._failed("tidy")
            return None

    async def checkpoint(self) -> None:
        """Shortens the write-ahead log in another thread, as that takes long."""
        await asyncio.to_thread(self._store.log.checkpoint_if_long)

    async def close(self) -> None:
        """Closes the store after the queries that wait, if that is soon."""
        # It may be closed already.
        with suppress(StoreFailed, TimeoutError, RuntimeError):
            await self._run(DocumentStore.close)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run_write(self, query: Callable[[DocumentStore], _T], size_bytes: int) -> _T:
        if self._clock() < self._writes_from_s:
            raise StoreFailed("it could not be written a moment ago")
        try:
            return await self._run(query, size_bytes)
        except Exception:
            self._writes_from_s = self._clock() + _WRITE_PAUSE_S
            raise

    async def _run(self, query: Callable[[DocumentStore], _T], size_bytes: int = 0) -> _T:
        is_full = self._queued == MAX_QUEUED or self._queued_bytes + size_bytes > MAX_QUEUED_BYTES
        if self._is_late or (self._queued and is_full):
            raise StoreFailed("too many queries wait for it")
        self._queued += 1
        self._queued_bytes += size_bytes
        expires_s = self._clock() + self._wait_s

        def run() -> _T:
            if self._clock() > expires_s:
                raise StoreFailed("it is too slow")
            self._store.require_file()
            return query(self._store)

        def done(ended: asyncio.Future[_T]) -> None:
            self._queued -= 1
            self._queued_bytes -= size_bytes
            self._is_late = False
            if not ended.cancelled():
                ended.exception()  # which may have no other reader

        running = asyncio.get_running_loop().run_in_executor(self._thread, run)
        running.add_done_callback(done)
        try:
            # Shielded: what waits counts until the thread is done with it.
            async with asyncio.timeout(self._wait_s):
                return await asyncio.shield(running)
        except TimeoutError:
            self._is_late = not running.done()
            raise


class SqliteDocuments:
    """`Documents`, which the thread of this process reads and writes."""

    def __init__(self, thread: StoreThread) -> None:
        self._thread = thread

    async def get(self, owner: str, id: str, now: float) -> Found | None:
        return await self._thread.read(lambda file: file.get(owner, id, now))

    async def chain(self, owner: str, id: str, now: float, limit_bytes: int) -> list[bytes] | None:
        def read(file: DocumentStore) -> list[bytes] | BalancerError | None:
            try:
                return file.chain(owner, id, now, limit_bytes)
            except BalancerError as too_large:  # which is no fault of the store
                return too_large

        found: list[bytes] | BalancerError | None = await self._thread.read(read)
        if isinstance(found, BalancerError):
            raise found
        return found

    async def listing(self, owner: str, after: str, limit: int, now: float) -> list[Listed]:
        return await self._thread.read(lambda file: file.listing(owner, after, limit, now))

    async def use(self, owner: str, id: str, now: float) -> None:
        await self._thread.tidy(lambda file: file.use(owner, id, now))

    async def put(self, owner: str, document: Document, ttl_s: float, now: float) -> int | None:
        size_bytes = len(document.items) + len(document.about)
        return await self._thread.write(
            lambda file: file.put(owner, document, ttl_s, now), size_bytes
        )

    async def delete(self, owner: str, id: str, now: float) -> bool:
        return await self._thread.write(lambda file: file.delete(owner, id, now))

    async def sweep(self, now: float) -> int:
        """Also shortens the write-ahead log."""
        gone = await self._thread.tidy(lambda file: file.sweep(now))
        await self._thread.checkpoint()
        return gone or 0

    async def close(self) -> None:
        await self._thread.close()


class SqliteUsage:
    """`UsageTable`, which the thread of this process reads and writes."""

    def __init__(self, thread: StoreThread) -> None:
        self._thread = thread

    async def add(self, batch: Batch) -> None:
        await self._thread.write(lambda file: file.add_usage(batch))

    async def read(self, period: str) -> list[Use]:
        return await self._thread.read(lambda file: file.usage(period, period))

    async def days(self, month: str) -> list[Use]:
        return await self._thread.read(lambda file: file.usage(f"{month}-01", f"{month}-31"))
