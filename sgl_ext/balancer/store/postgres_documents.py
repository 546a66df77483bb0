"""Documents in PostgreSQL. A chain is read by one recursive query; a write is one transaction.

Who stores a document adds up the account, and evicts if it exceeds the limit. That takes a lock,
which writers below the limit do not need. What others are writing at that moment is not seen, so
the limit can be exceeded by that much.
"""

from typing import Any

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.calls import Calls
from sgl_ext.balancer.store.documents import (
    LONGEST_CHAIN,
    SWEEP_BATCH,
    Document,
    Found,
    Listed,
    key_of,
    tenant_of,
    victim_of,
)
from sgl_ext.balancer.store.postgres_server import LOCK, PostgresServer
from sgl_ext.protocols.errors import body_too_large

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
