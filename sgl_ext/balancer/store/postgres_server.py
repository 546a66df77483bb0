"""The connections to PostgreSQL 13 or later, and the schema `sgl_ext`, which is made when missing.

documents    one row each; TOAST holds the content apart, so that a use does not rewrite it
listed       the names of documents that lists show
held         changes of each tenant's bytes, which triggers insert and a sweep adds up: an
             account in one row would make all writers wait for each other
limits, balancers, newest    what balancers share; unlogged, so a crash of the server empties them
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from psycopg import errors
from psycopg_pool import AsyncConnectionPool

from sgl_ext.balancer.store.calls import settle
from sgl_ext.balancer.store.documents import WAIT_S, StoreUnreachable, StoreUnusable
from sgl_ext.settings.secrets import StoreAddress

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


class PostgresServer:
    """The connections of one process, which are made when they are used."""

    def __init__(self, address: StoreAddress, connections: int = _CONNECTIONS) -> None:
        self.address = address
        self._connections = connections
        self.options: dict[str, Any] = {
            "connect_timeout": 2,
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
            " to_regclass('sgl_ext.listed') IS NOT NULL"
        )
        is_ours, exists, has_listed = await cursor.fetchone()
        if not exists:
            await connection.execute(_TABLES)
        elif not is_ours:
            return 0
        if not has_listed:
            await connection.execute(_LISTED)
        cursor = await connection.execute("SELECT version FROM sgl_ext.format")
        return int((await cursor.fetchone())[0])
