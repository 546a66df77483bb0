"""One thread for all queries of a document store, so that nothing else waits for the disk.

Queries run in order. Their queue is bounded, and a query that has no result in time fails. While
the thread is late, new queries fail at once. After a write failed, new writes fail at once for a
moment: otherwise reads would wait behind writes that wait for a lock.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.documents import (
    MAX_QUEUED,
    MAX_QUEUED_BYTES,
    WAIT_S,
    StoreFailed,
)
from sgl_ext.balancer.store.sqlite_file import DocumentStore
from sgl_ext.supervision import Guard

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
