"""The documents of tenants by their kind: what is counted, and what fails when the store does.

A method raises BalancerError 503 if the store fails. Without a store it finds nothing.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.documents import Document, Documents, Found, Listed, StoreFailed
from sgl_ext.protocols.errors import BalancerError, body_too_large

_RETRY_AFTER_S = 5


class TenantDocuments:
    """Each tenant has its own: a document of another tenant is unknown.

    clock: seconds since the epoch.
    """

    def __init__(
        self,
        store: Documents | None,
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

    async def get(self, kind: str, tenant: str, id: str) -> Found | None:
        """The document of this id, which does not count as used; None if it is unknown."""
        if self._store is None:
            return None
        with _answering():
            return await self._store.get(_owner(kind, tenant), id, self._clock())

    async def chain(self, kind: str, tenant: str, id: str) -> list[bytes] | None:
        """The items of a document and of those that it continues, the oldest first; None if one is
        unknown. Raises BalancerError 413 above the limit."""
        if self._store is None:
            return None
        owner, now = _owner(kind, tenant), self._clock()
        with _answering():
            return await self._store.chain(owner, id, now, self._limit_bytes)

    async def listing(self, kind: str, tenant: str, after: str, limit: int) -> list[Listed]:
        """The listed documents of the tenant whose ids follow `after`, in the order of their ids,
        at most `limit`."""
        if self._store is None:
            return []
        with _answering():
            return await self._store.listing(_owner(kind, tenant), after, limit, self._clock())

    def require_small(self, size_bytes: int) -> None:
        """Raises BalancerError 413 for more bytes than a chain may have."""
        if size_bytes > self._limit_bytes:
            raise body_too_large(self._limit_bytes)

    async def use(self, kind: str, tenant: str, id: str) -> list[bytes] | None:
        """As `chain`; all of it counts as used."""
        owner, now = _owner(kind, tenant), self._clock()
        found = await self.chain(kind, tenant, id)
        self._events[("unknown" if found is None else "found",)] += 1
        if found is not None and self._store is not None:
            self.later(self._store.use(owner, id, now))
        return found

    async def renew(self, kind: str, tenant: str, id: str) -> bool:
        """Uses a document that continues none. False if it is unknown."""
        if self._store is None or await self.get(kind, tenant, id) is None:
            return False
        self.later(self._store.use(_owner(kind, tenant), id, self._clock()))
        return True

    async def put(self, kind: str, tenant: str, document: Document, ttl_s: float) -> bool:
        """Whether the store has room for a document, which it then has."""
        evicted = None
        if self._store is not None:
            with _answering():
                owner, now = _owner(kind, tenant), self._clock()
                evicted = await self._store.put(owner, document, ttl_s, now)
        self._events[("stored" if evicted is not None else "too_large",)] += 1
        if evicted:
            self._events[("evicted",)] += evicted
        return evicted is not None

    async def delete(self, kind: str, tenant: str, id: str) -> bool:
        """False if the document is unknown."""
        if self._store is None:
            return False
        with _answering():
            return await self._store.delete(_owner(kind, tenant), id, self._clock())

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
        """Deletes expired documents. Call it periodically."""
        if self._store is not None and (gone := await self._store.sweep(self._clock())):
            self._events[("expired",)] += gone

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()


def _owner(kind: str, tenant: str) -> str:
    """A document's owner in the document store."""
    return f"{kind} {tenant}"


@contextmanager
def _answering() -> Iterator[None]:
    """Turns a failure of the store into the error that clients get."""
    try:
        yield
    except StoreFailed:
        message = "The store of responses and contexts is unavailable."
        raise BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message, _RETRY_AFTER_S) from None
