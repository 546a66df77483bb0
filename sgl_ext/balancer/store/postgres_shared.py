"""What balancers share through PostgreSQL: buckets, presence, versions, and notifications.

A notification is text of at most 8,000 bytes. So a message is sent in parts, in base64, all in one
transaction: then they arrive together and in order.
"""

import base64
import os
from collections.abc import AsyncGenerator, Iterator, Sequence
from itertools import count
from typing import Any

import psycopg

from sgl_ext.balancer.store.calls import Calls, settle
from sgl_ext.balancer.store.postgres_server import PostgresServer
from sgl_ext.balancer.store.shared_state import CALL_S, PRESENT_S, Lease, Leased
from sgl_ext.supervision import Failed

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
