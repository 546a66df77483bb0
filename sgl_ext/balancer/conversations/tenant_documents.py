"""The documents of tenants by their kind: what is counted, and what fails when the store does.

A method raises BalancerError 503 if the store fails. Without a store it finds nothing.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from http import HTTPStatus
from typing import Any, TypeVar

from sgl_ext.balancer.conversations.document_store import Document, DocumentStore
from sgl_ext.balancer.conversations.store_thread import StoreFailed, StoreThread
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.protocols.errors import BalancerError

_RETRY_AFTER_S = 5
_T = TypeVar("_T")


class TenantDocuments:
    """Each tenant has its own: a document of another tenant is unknown.

    clock: seconds since the epoch.
    """

    def __init__(
        self,
        store: StoreThread | None,
        metrics: Metrics,
        limit_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """limit_bytes: the largest chain."""
        self._store = store
        self._events = metrics.store_events.counts
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def exist(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    async def get(self, kind: str, tenant: str, id: str) -> Document | None:
        """The document of this id, which does not count as used; None if it is unknown."""
        now = self._clock()
        return await self._read(lambda store: store.get(_owner(kind, tenant), id, now))

    async def chain(self, kind: str, tenant: str, id: str) -> list[bytes] | None:
        """The items of a document and of those that it continues, the oldest first; None if one is
        unknown. Raises BalancerError 413 above the limit."""
        owner, now = _owner(kind, tenant), self._clock()

        def read(store: DocumentStore) -> list[bytes] | BalancerError | None:
            try:
                return store.chain(owner, id, now, self._limit_bytes)
            except BalancerError as too_large:
                return too_large

        found: list[bytes] | BalancerError | None = await self._read(read)
        if isinstance(found, BalancerError):
            raise found
        return found

    async def use(self, kind: str, tenant: str, id: str) -> list[bytes] | None:
        """As `chain`; all of it counts as used."""
        owner, now = _owner(kind, tenant), self._clock()
        found = await self.chain(kind, tenant, id)
        self._events[("unknown" if found is None else "found",)] += 1
        if found is not None and self._store is not None:
            self.later(self._store.tidy(lambda store: store.use(owner, id, now)))
        return found

    async def put(self, kind: str, tenant: str, document: Document, ttl_s: float) -> bool:
        """Whether the store has room for a document, which it then has."""
        owner, now = _owner(kind, tenant), self._clock()
        size_bytes = len(document.items) + len(document.about)
        evicted = await self._write(
            lambda store: store.put(owner, document, ttl_s, now), size_bytes
        )
        self._events[("stored" if evicted is not None else "too_large",)] += 1
        if evicted:
            self._events[("evicted",)] += evicted
        return evicted is not None

    async def delete(self, kind: str, tenant: str, id: str) -> bool:
        """False if the document is unknown."""
        owner, now = _owner(kind, tenant), self._clock()
        return bool(await self._write(lambda store: store.delete(owner, id, now)))

    def later(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[None]:
        """Runs what no answer depends on; its failure is counted already."""

        async def run() -> None:
            with suppress(BalancerError):
                await work

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def sweep(self) -> None:
        """Deletes expired documents and shortens the write-ahead log. Call it periodically."""
        if self._store is not None:
            now = self._clock()
            gone = await self._store.tidy(lambda store: store.sweep(now))
            self._events[("expired",)] += gone or 0
            await self._store.checkpoint()

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()

    async def _read(self, query: Callable[[DocumentStore], _T | None]) -> _T | None:
        try:
            return None if self._store is None else await self._store.read(query)
        except StoreFailed:
            raise _unavailable() from None

    async def _write(
        self, query: Callable[[DocumentStore], _T | None], size_bytes: int = 0
    ) -> _T | None:
        try:
            return None if self._store is None else await self._store.write(query, size_bytes)
        except StoreFailed:
            raise _unavailable() from None


def _owner(kind: str, tenant: str) -> str:
    """A document's owner in the document store."""
    return f"{kind} {tenant}"


def _unavailable() -> BalancerError:
    message = "The store of responses and contexts is unavailable."
    return BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message, _RETRY_AFTER_S)
