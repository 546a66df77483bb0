"""The store that a setting names. Redis' and PostgreSQL's clients are imported only for them."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.documents import Documents, StoreUnreachable, StoreUnusable
from sgl_ext.balancer.store.shared_state import SharedState, UsageTable
from sgl_ext.balancer.store.sqlite import DocumentStore, SqliteDocuments, SqliteUsage, StoreThread
from sgl_ext.settings.schema import IN_MEMORY
from sgl_ext.settings.secrets import StoreAddress, read_store

if TYPE_CHECKING:
    from sgl_ext.balancer.store.postgres import PostgresServer
    from sgl_ext.balancer.store.redis import RedisServer

_SHARED_CONNECTIONS = 4
"""Leases are small, and do not wait for documents."""
_EXTRAS = {"redis": "redis", "psycopg": "postgres", "psycopg_pool": "postgres"}
log = logging.getLogger(__name__)


def check_store(store: str | None, limit_bytes: int, *, is_restart: bool = False) -> None:
    """Raises StoreUnusable if the store cannot be used, is corrupt or cannot be reached.

    is_restart: a server that cannot be reached is logged only, as requests need no store.
    """
    if store in (None, IN_MEMORY):
        return
    address = read_store(store)
    if address.is_shared:
        try:
            with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop
                thread.submit(lambda: asyncio.run(_check(address))).result()
        except StoreUnreachable as error:
            if not is_restart:
                raise
            log.error("%s", error)
    elif limit_bytes:
        with closing(DocumentStore(address.url, limit_bytes)) as file:
            file.check()


async def _check(address: StoreAddress) -> None:
    server = open_server(address)
    try:
        await server.check()
    finally:
        await server.close()


def open_server(address: StoreAddress) -> "RedisServer | PostgresServer":
    """A server's connections, which are made when they are used. Raises StoreUnusable."""
    try:
        if address.kind == "redis":
            from sgl_ext.balancer.store.redis import RedisServer

            return RedisServer(address)
        from sgl_ext.balancer.store.postgres import PostgresServer

        return PostgresServer(address)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        extra = _EXTRAS[error.name]
        reason = f"needs the package {error.name}: pip install 'sgl-ext[{extra}]'"
        raise StoreUnusable(f"store={address.shown!r}: {reason}") from None


class Store(NamedTuple):
    """A store, as a process uses it.

    documents, usage: None without a store. shared: what balancers share; None without a server.
    """

    documents: Documents | None = None
    shared: SharedState | None = None
    usage: UsageTable | None = None


def open_store(store: str | None, limit_bytes: int, metrics: Metrics, folder: Path | None) -> Store:
    """Opens a store. There are no documents if `limit_bytes` is 0.

    folder: that of the processes of this balancer, for a store that ends with them. A server that
    cannot be reached is no error here. Raises StoreUnusable.
    """
    address = read_store(store or IN_MEMORY)
    if not address.is_shared:
        path = address.url
        if path == IN_MEMORY and folder is not None:
            path = str(folder / "store.sqlite")
        if not limit_bytes:
            return Store()
        thread = StoreThread(DocumentStore(path, limit_bytes), metrics)
        return Store(SqliteDocuments(thread), usage=SqliteUsage(thread))
    documents: Documents
    shared: SharedState
    usage: UsageTable
    if address.kind == "redis":
        from sgl_ext.balancer.store.redis import (
            RedisDocuments,
            RedisServer,
            RedisShared,
            RedisUsage,
        )

        documents = RedisDocuments(RedisServer(address), limit_bytes, metrics)
        server = RedisServer(address, _SHARED_CONNECTIONS)
        shared = RedisShared(server, metrics.background_failed)
        usage = RedisUsage(server, metrics.background_failed)
    else:
        from sgl_ext.balancer.store.postgres import (
            PostgresDocuments,
            PostgresServer,
            PostgresShared,
            PostgresUsage,
        )

        documents = PostgresDocuments(PostgresServer(address), limit_bytes, metrics)
        postgres = PostgresServer(address, _SHARED_CONNECTIONS)
        shared = PostgresShared(postgres, metrics.background_failed)
        usage = PostgresUsage(postgres, metrics.background_failed)
    return Store(documents if limit_bytes else None, shared, usage)
