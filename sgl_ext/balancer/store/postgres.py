"""Documents, and what balancers share, in PostgreSQL 13 or later.

The schema `sgl_ext` is made when it is missing:

    documents    one row each; TOAST holds the content apart, so that a use does not rewrite it
    listed       the names of documents that lists show
    held         changes of each tenant's bytes, which triggers insert and a sweep adds up: an
                 account in one row would make all writers wait for each other
    limits, balancers, newest
                 what balancers share; unlogged, so a crash of the server empties them

A chain is read by one recursive query; a write is one transaction. Who stores a document adds up
the account, and evicts if it exceeds the limit. That takes a lock, which writers below the limit do
not need. What others are writing at that moment is not seen, so the limit can be exceeded by that
much.

Balancers share buckets, presence, versions and notifications. A notification is text of at most
8,000 bytes. So a message is sent in parts, in base64, all in one transaction: then they arrive
together and in order.
"""

import base64
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import psycopg
from psycopg import errors
from psycopg_pool import AsyncConnectionPool

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.calls import Calls, settle
from sgl_ext.balancer.store.documents import (
    LONGEST_CHAIN,
    SWEEP_BATCH,
    WAIT_S,
    Document,
    Found,
    Listed,
    StoreUnreachable,
    StoreUnusable,
    key_of,
    tenant_of,
    victim_of,
)
from sgl_ext.balancer.store.shared_state import CALL_S, PRESENT_S, Batch, Lease, Leased, Use
from sgl_ext.protocols.errors import body_too_large
from sgl_ext.settings.secrets import StoreAddress
from sgl_ext.supervision import Failed

log = logging.getLogger(__name__)
logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)  # failed calls are logged, once

_FORMAT = 1
_LEAST_VERSION = 130_000
_CONNECTIONS = 8
_REFUSALS = ("authentication failed", "no password", "does not exist", "denied", "no pg_hba.conf")
LOCK = 0x5E4E0001
"""The advisory lock of a connection that makes the schema, evicts, or adds up the account."""
_DOCUMENT_BYTES = 256  # a row and its places in the indexes
_TABLES = f"""
CREATE SCHEMA IF NOT EXISTS sgl_ext;
CREATE TABLE sgl_ext.format (version int NOT NULL);
INSERT INTO sgl_ext.format VALUES ({_FORMAT});
CREATE TABLE sgl_ext.documents (
    key bytea PRIMARY KEY, continues bytea, tenant text NOT NULL, number bigserial,
    ttl_s float8 NOT NULL, used_s float8 NOT NULL, expires_s float8 NOT NULL,
    bytes bigint GENERATED ALWAYS AS ({_DOCUMENT_BYTES} + length(items) + length(about)) STORED,
    items bytea STORAGE EXTERNAL NOT NULL, about bytea STORAGE EXTERNAL NOT NULL);
CREATE INDEX ON sgl_ext.documents (tenant, used_s, number DESC);
CREATE INDEX ON sgl_ext.documents (expires_s);
CREATE TABLE sgl_ext.held (tenant text NOT NULL, bytes bigint NOT NULL);
CREATE FUNCTION sgl_ext.account() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP <> 'INSERT' THEN
        INSERT INTO sgl_ext.held VALUES (old.tenant, -old.bytes);
    END IF;
    IF TG_OP <> 'DELETE' THEN
        INSERT INTO sgl_ext.held VALUES (new.tenant, new.bytes);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER account AFTER INSERT OR DELETE OR UPDATE OF items, about ON sgl_ext.documents
    FOR EACH ROW EXECUTE FUNCTION sgl_ext.account();
CREATE UNLOGGED TABLE sgl_ext.limits (
    name text PRIMARY KEY, level float8 NOT NULL, granted float8 NOT NULL,
    filled timestamptz NOT NULL) WITH (fillfactor = 50);
CREATE UNLOGGED TABLE sgl_ext.balancers (id text PRIMARY KEY, seen timestamptz NOT NULL);
CREATE UNLOGGED TABLE sgl_ext.newest (
    name text PRIMARY KEY, version bigint NOT NULL, data bytea NOT NULL);
""".replace(" STORAGE EXTERNAL", "")  # PostgreSQL 16 and later only
_TABLES += """
ALTER TABLE sgl_ext.documents ALTER items SET STORAGE EXTERNAL, ALTER about SET STORAGE EXTERNAL;
"""
# Schemas of earlier versions lack it, and their balancers need not know it.
_LISTED = """
CREATE TABLE sgl_ext.listed (
    key bytea PRIMARY KEY REFERENCES sgl_ext.documents ON DELETE CASCADE,
    owner text NOT NULL, id text COLLATE "C" NOT NULL, UNIQUE (owner, id));
"""


_USAGE = """
CREATE TABLE sgl_ext.usage (
    period text COLLATE "C" NOT NULL, tenant text NOT NULL, key text NOT NULL,
    requests bigint NOT NULL, tokens bigint NOT NULL, PRIMARY KEY (period, tenant, key));
CREATE TABLE sgl_ext.usage_writers (
    writer text PRIMARY KEY, number bigint NOT NULL, period text COLLATE "C" NOT NULL);
"""


class PostgresServer:
    """The connections of one process, which are made when they are used."""

    def __init__(self, address: StoreAddress, connections: int = _CONNECTIONS) -> None:
        self.address = address
        self._connections = connections
        self.options: dict[str, Any] = {
            "connect_timeout": round(WAIT_S),
            "application_name": "sgl-ext",
            # A server that vanishes without a word is noticed within seconds.
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": 10_000,
            "autocommit": True,
        }
        try:
            psycopg.conninfo.conninfo_to_dict(address.url)
        except psycopg.Error:  # whose message has the URL
            raise StoreUnusable(self._named("is not a URL of PostgreSQL")) from None
        self._pool: AsyncConnectionPool[Any] | None = None
        self._is_prepared = False

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        """A connection for one call. Raises psycopg.Error."""
        if self._pool is None:
            self._pool = AsyncConnectionPool(
                self.address.url,
                kwargs=self.options,
                min_size=1,
                max_size=self._connections,
                timeout=WAIT_S,
                reconnect_timeout=WAIT_S,
                check=AsyncConnectionPool.check_connection,
                open=False,
            )
            await self._pool.open()
        async with self._pool.connection() as connection:
            if not self._is_prepared:
                await prepare(connection)
                self._is_prepared = True
            try:
                yield connection
            except (errors.UndefinedTable, errors.InvalidSchemaName):
                self._is_prepared = False  # the database was made again
                raise

    async def check(self) -> None:
        """Raises StoreUnusable if the server cannot be used, and logs what it does not promise."""
        try:
            async with await psycopg.AsyncConnection.connect(
                self.address.url, **self.options
            ) as connection:
                if connection.info.server_version < _LEAST_VERSION:
                    raise StoreUnusable(self._named("PostgreSQL must be 13 or later"))
                version = await prepare(connection)
                cursor = await connection.execute(
                    "SELECT current_setting('fsync'), current_setting('synchronous_commit')"
                )
                row = await cursor.fetchone()
        except psycopg.OperationalError as error:
            reason = " ".join(str(error).split())
            if not any(refusal in reason for refusal in _REFUSALS):
                raise StoreUnreachable(self._named(f"cannot be reached: {reason}")) from None
            raise StoreUnusable(self._named(f"the server refuses this user: {reason}")) from None
        except psycopg.Error as error:
            reason = " ".join(str(error).split())
            raise StoreUnusable(self._named(f"cannot be used: {reason}")) from None
        if version != _FORMAT:
            reason = "its schema sgl_ext belongs to another program or another version"
            raise StoreUnusable(self._named(reason))
        if row is not None and "off" in row:
            reason = (
                "fsync or synchronous_commit is off: a crash of the server loses the last turns"
            )
            log.warning(self._named(reason))

    async def close(self) -> None:
        if self._pool is not None:
            await settle(self._pool.close(timeout=1.0))

    def _named(self, reason: str) -> str:
        return f"store={self.address.shown!r}: {reason}"


async def prepare(connection: Any) -> int:
    """Makes the schema if it is missing. Returns its version, 0 if it is not ours."""
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK,))
        cursor = await connection.execute(
            "SELECT to_regclass('sgl_ext.format') IS NOT NULL,"
            " EXISTS (SELECT FROM pg_namespace WHERE nspname = 'sgl_ext'),"
            " to_regclass('sgl_ext.listed') IS NOT NULL,"
            " to_regclass('sgl_ext.usage') IS NOT NULL"
        )
        is_ours, exists, has_listed, has_usage = await cursor.fetchone()
        if not exists:
            await connection.execute(_TABLES)
        elif not is_ours:
            return 0
        if not has_listed:
            await connection.execute(_LISTED)
        if not has_usage:
            await connection.execute(_USAGE)
        cursor = await connection.execute("SELECT version FROM sgl_ext.format")
        return int((await cursor.fetchone())[0])


_CHAIN = f"""
WITH RECURSIVE chain (key, continues, ttl_s, used_s, bytes, depth) AS (
    SELECT key, continues, ttl_s, used_s, length(items), 0 FROM sgl_ext.documents
        WHERE key = %(key)s AND expires_s > %(now)s
    UNION ALL
    SELECT k.key, k.continues, k.ttl_s, k.used_s, length(k.items), depth + 1
        FROM chain JOIN sgl_ext.documents k ON k.key = chain.continues AND k.expires_s > %(now)s
        WHERE depth < {LONGEST_CHAIN}
)
"""
_LINKS = _CHAIN + "SELECT key, continues, bytes FROM chain ORDER BY depth DESC"
_ITEMS = "SELECT key, items FROM sgl_ext.documents WHERE key = ANY(%s)"
# What another one renews or deletes now is left to it, so that no two wait for each other.
_USE = f"""
{_CHAIN}, stale AS MATERIALIZED (
    SELECT key FROM sgl_ext.documents WHERE key IN
        (SELECT key FROM chain WHERE (%(now)s - used_s) * 100 >= ttl_s) FOR UPDATE SKIP LOCKED)
UPDATE sgl_ext.documents SET used_s = %(now)s, expires_s = %(now)s + ttl_s
    WHERE key IN (SELECT key FROM stale)
"""
_PUT = """
INSERT INTO sgl_ext.documents (key, continues, tenant, ttl_s, used_s, expires_s, items, about)
    VALUES (%b, %b, %s, %s, %s, %s, %b, %b)
    ON CONFLICT (key) DO UPDATE SET continues = excluded.continues, ttl_s = excluded.ttl_s,
        used_s = excluded.used_s, expires_s = excluded.expires_s, items = excluded.items,
        about = excluded.about, number = excluded.number
"""
_LIST = """
INSERT INTO sgl_ext.listed (key, owner, id) VALUES (%b, %s, %s) ON CONFLICT (key) DO NOTHING
"""
_LISTING = """
SELECT l.id, d.about, length(d.items), d.used_s, d.expires_s
    FROM sgl_ext.listed l JOIN sgl_ext.documents d USING (key)
    WHERE l.owner = %s AND l.id > %s AND d.expires_s > %s ORDER BY l.id LIMIT %s
"""
_HELD = "SELECT tenant, sum(bytes)::bigint FROM sgl_ext.held GROUP BY 1 HAVING sum(bytes) > 0"
# Of equal uses the end of a chain is evicted first, because it needs those before it.
_EVICT = """
DELETE FROM sgl_ext.documents WHERE key IN (
    SELECT key FROM sgl_ext.documents WHERE tenant = %s AND key <> %b
        ORDER BY used_s, number DESC LIMIT %s FOR UPDATE SKIP LOCKED)
    RETURNING bytes
"""
_SWEEP = f"""
DELETE FROM sgl_ext.documents WHERE key IN (
    SELECT key FROM sgl_ext.documents WHERE expires_s <= %s LIMIT {SWEEP_BATCH}
        FOR UPDATE SKIP LOCKED)
"""
_ADD_UP = """
WITH gone AS (DELETE FROM sgl_ext.held RETURNING tenant, bytes)
INSERT INTO sgl_ext.held SELECT tenant, sum(bytes) FROM gone GROUP BY 1 HAVING sum(bytes) <> 0
"""


class _DoesNotFit(Exception):
    """Rolls a transaction back."""


class PostgresDocuments:
    """`Documents` on a server; others may use it at the same time."""

    def __init__(self, server: PostgresServer, limit_bytes: int, metrics: Metrics) -> None:
        self._server = server
        self._limit_bytes = limit_bytes
        self._reading = Calls("reading the store of responses and contexts", metrics.store_failed)
        self._writing = Calls("writing the store of responses and contexts", metrics.store_failed)

    async def get(self, owner: str, id: str, now: float) -> Found | None:
        async def read() -> Found | None:
            async with self._server.connection() as db:
                cursor = await db.execute(
                    "SELECT items, about, expires_s FROM sgl_ext.documents"
                    " WHERE key = %b AND expires_s > %s",
                    (key_of(owner, id), now),
                    binary=True,
                )
                row = await cursor.fetchone()
            return None if row is None else Found(*row)

        return await self._reading.run(read)

    async def chain(self, owner: str, id: str, now: float, limit_bytes: int) -> list[bytes] | None:
        async def read() -> list[bytes] | int | None:
            named = {"key": key_of(owner, id), "now": now}
            async with self._server.connection() as db:
                links = await (await db.execute(_LINKS, named)).fetchall()
                if not links or links[0][1] is not None:
                    return None
                if (size := sum(link[2] for link in links)) > limit_bytes:
                    return int(size)
                keys = [link[0] for link in links]
                found = dict(await (await db.execute(_ITEMS, (keys,), binary=True)).fetchall())
            # One may have been evicted since.
            return [found[key] for key in keys] if len(found) == len(keys) else None

        found = await self._reading.run(read)
        if isinstance(found, int):
            raise body_too_large(limit_bytes)
        return found

    async def listing(self, owner: str, after: str, limit: int, now: float) -> list[Listed]:
        async def read() -> list[Listed]:
            async with self._server.connection() as db:
                found = (owner, after, now, limit)
                rows = await (await db.execute(_LISTING, found, binary=True)).fetchall()
            return [Listed(*row) for row in rows]

        return await self._reading.run(read)

    async def use(self, owner: str, id: str, now: float) -> None:
        async def renew() -> None:
            async with self._server.connection() as db:
                await db.execute(_USE, {"key": key_of(owner, id), "now": now})

        await self._writing.tidy(renew)

    async def put(self, owner: str, document: Document, ttl_s: float, now: float) -> int | None:
        sent_bytes = len(document.items) + len(document.about)
        if sent_bytes > self._limit_bytes:
            return None
        key, tenant, previous = key_of(owner, document.id), tenant_of(owner), document.continues
        parent = None if previous is None else key_of(owner, previous)

        async def write() -> int | None:
            row = (key, parent, tenant, ttl_s, now, now + ttl_s, document.items, document.about)
            try:
                async with self._server.connection() as db, db.transaction():
                    await db.execute(_PUT, row)
                    if document.is_listed:
                        await db.execute(_LIST, (key, owner, document.id))
                    return await self._make_room(db, tenant, key)
            except _DoesNotFit:
                return None

        return await self._writing.run(write, sent_bytes)

    async def _make_room(self, db: Any, tenant: str, key: bytes) -> int:
        """Evicts until the account is within the limit; returns how many."""
        held = await _held(db)
        if sum(held.values()) <= self._limit_bytes:
            return 0
        await db.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK,))
        held, evicted = await _held(db), 0
        while sum(held.values()) > self._limit_bytes:
            victim, batch = victim_of(held, tenant)
            gone = await (await db.execute(_EVICT, (victim, key, batch))).fetchall()
            if not gone:
                raise _DoesNotFit
            evicted += len(gone)
            held[victim] -= sum(row[0] for row in gone)
            held = {name: size for name, size in held.items() if size > 0}
        return evicted

    async def delete(self, owner: str, id: str, now: float) -> bool:
        async def remove() -> bool:
            async with self._server.connection() as db:
                cursor = await db.execute(
                    "DELETE FROM sgl_ext.documents WHERE key = %b AND expires_s > %s",
                    (key_of(owner, id), now),
                )
            return bool(cursor.rowcount)

        return await self._writing.run(remove)

    async def sweep(self, now: float) -> int:
        async def remove() -> int:
            async with self._server.connection() as db, db.transaction():
                row = await db.execute("SELECT pg_try_advisory_xact_lock(%s)", (LOCK,))
                if not (await row.fetchone())[0]:
                    return 0
                gone = await db.execute(_SWEEP, (now,))
                await db.execute(_ADD_UP)
            return int(gone.rowcount)

        return await self._writing.tidy(remove) or 0

    async def close(self) -> None:
        await self._server.close()


async def _held(db: Any) -> dict[str, int]:
    return dict(await (await db.execute(_HELD)).fetchall())


_PART_CHARS = 7_800
# One statement, which sees what the one before it left, however many run at once.
_LEASE = """
UPDATE sgl_ext.limits AS b SET (level, granted, filled) = (
    SELECT level - granted, granted, clock_timestamp() FROM (
        SELECT level, CASE WHEN level >= least(%(need)s, %(cap)s)
            THEN %(need)s + least(%(extra)s, greatest(level - %(need)s, 0)) ELSE 0 END AS granted
        FROM (SELECT least(%(cap)s, least(%(cap)s, b.level + %(cap)s / 60 *
            greatest(extract(epoch FROM clock_timestamp() - b.filled), 0)::float8) - %(take)s)
            AS level) AS filled) AS leased)
    WHERE name = %(name)s RETURNING granted, level
"""
_FULL = """
INSERT INTO sgl_ext.limits VALUES (%(name)s, %(cap)s, 0, clock_timestamp())
    ON CONFLICT DO NOTHING
"""
_PRESENT = """
WITH there AS (INSERT INTO sgl_ext.balancers VALUES (%s, clock_timestamp())
    ON CONFLICT (id) DO UPDATE SET seen = excluded.seen RETURNING id),
gone AS (DELETE FROM sgl_ext.balancers WHERE seen < clock_timestamp() - interval '1 hour')
SELECT 1 + count(*) FROM sgl_ext.balancers
    WHERE seen > clock_timestamp() - make_interval(secs => %s) AND id NOT IN (SELECT id FROM there)
"""
_SHARE = """
INSERT INTO sgl_ext.newest AS n VALUES (%s, %s, %b) ON CONFLICT (name)
    DO UPDATE SET version = excluded.version, data = excluded.data
    WHERE n.version < excluded.version
"""


class PostgresShared:
    """`SharedState` on a server."""

    def __init__(self, server: PostgresServer, failed: Failed) -> None:
        self._server = server
        self._calls = Calls("sharing state between balancers", failed, CALL_S)
        self._publishing = Calls("sending messages to other balancers", failed, CALL_S)
        self._sender = os.urandom(6).hex()
        self._numbers = count()

    async def lease(self, lease: Lease) -> Leased:
        numbers = zip(("cap", "take", "need", "extra"), map(float, lease[1:]), strict=True)
        named = {"name": lease.name, **dict(numbers)}

        async def call() -> Leased:
            async with self._server.connection() as db:
                while (row := await (await db.execute(_LEASE, named)).fetchone()) is None:
                    await db.execute(_FULL, named)
            return Leased(*row)

        return await self._calls.run(call)

    async def count_present(self, id: str) -> int:
        async def call() -> int:
            async with self._server.connection() as db:
                row = await (await db.execute(_PRESENT, (id, PRESENT_S))).fetchone()
            return int(row[0])

        return await self._calls.run(call)

    async def newer(self, name: str, version: int) -> tuple[int, bytes] | None:
        async def call() -> tuple[int, bytes] | None:
            async with self._server.connection() as db:
                cursor = await db.execute(
                    "SELECT version, data FROM sgl_ext.newest WHERE name = %s AND version > %s",
                    (name, version),
                    binary=True,
                )
                found: tuple[int, bytes] | None = await cursor.fetchone()
            return found

        return await self._calls.run(call)

    async def share(self, name: str, version: int, data: bytes) -> None:
        async def call() -> None:
            async with self._server.connection() as db:
                await db.execute(_SHARE, (name, version, data))

        await self._calls.run(call)

    async def publish(self, messages: Sequence[bytes]) -> None:
        parts = [part for message in messages for part in self._parts(message)]

        async def call() -> None:
            async with self._server.connection() as db:
                await db.execute(
                    "SELECT pg_notify('sgl_ext', part) FROM unnest(%s::text[]) AS part", (parts,)
                )

        await self._publishing.run(call, sum(map(len, parts)))

    async def messages(self) -> AsyncGenerator[bytes, None]:
        url, options = self._server.address.url, self._server.options
        db: Any = await psycopg.AsyncConnection.connect(url, **options)
        incomplete = ""
        try:
            await db.execute("LISTEN sgl_ext")
            async for note in db.notifies():
                about, _, part = note.payload.partition(" ")
                is_first, is_last = about[-2] == "f", about[-1] == "l"
                incomplete = part if is_first else incomplete + part
                if is_last:
                    yield base64.b64decode(incomplete)
        finally:
            await settle(db.close())

    def _parts(self, message: bytes) -> Iterator[str]:
        """The parts of a message. No two are equal: the server would send one of them."""
        text = base64.b64encode(message).decode()
        for at in range(0, max(len(text), 1), _PART_CHARS):
            ends = f"{'f' if at == 0 else '-'}{'l' if at + _PART_CHARS >= len(text) else '-'}"
            part = text[at : at + _PART_CHARS]
            yield f"{self._sender}.{next(self._numbers)}.{ends} {part}"

    async def close(self) -> None:
        await self._server.close()


_NUMBER = """
INSERT INTO sgl_ext.usage_writers AS w VALUES (%s, %s, %s) ON CONFLICT (writer)
    DO UPDATE SET number = excluded.number, period = excluded.period
    WHERE excluded.number > w.number
"""
# In an order, so that no two balancers wait for each other.
_ADD_USAGE = """
INSERT INTO sgl_ext.usage AS u VALUES (%s, %s, %s, %s, %s) ON CONFLICT (period, tenant, key)
    DO UPDATE SET requests = u.requests + excluded.requests, tokens = u.tokens + excluded.tokens
"""
_READ_USAGE = """
SELECT period, tenant, key, requests, tokens FROM sgl_ext.usage WHERE period BETWEEN %s AND %s
    ORDER BY period, tenant COLLATE "C", key COLLATE "C"
"""


class PostgresUsage:
    """`UsageTable` on a server."""

    def __init__(self, server: PostgresServer, failed: Failed) -> None:
        self._server = server
        self._reading = Calls("reading the usage of keys", failed)
        self._writing = Calls("writing the usage of keys", failed)

    async def add(self, batch: Batch) -> None:
        async def call() -> None:
            async with self._server.connection() as db, db.transaction():
                numbered = await db.execute(_NUMBER, (batch.writer, batch.number, batch.forgets))
                if not numbered.rowcount:
                    return
                async with db.cursor() as cursor:
                    await cursor.executemany(_ADD_USAGE, sorted(batch.uses))
                for table in ("usage", "usage_writers"):
                    forget = f"DELETE FROM sgl_ext.{table} WHERE period < %s"
                    await db.execute(forget, (batch.forgets,))

        await self._writing.run(call)

    async def read(self, period: str) -> list[Use]:
        return await self._between(period, period)

    async def days(self, month: str) -> list[Use]:
        return await self._between(f"{month}-01", f"{month}-31")

    async def _between(self, first: str, last: str) -> list[Use]:
        async def call() -> list[Use]:
            async with self._server.connection() as db:
                rows = await (await db.execute(_READ_USAGE, (first, last))).fetchall()
            return [Use(*row) for row in rows]

        return await self._reading.run(call)
