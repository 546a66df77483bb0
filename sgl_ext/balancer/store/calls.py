"""Calls of a store's server: bounded in number, bytes and time, and counted when they fail.

While the server fails, one call at a time tries it, and the others fail at once. So an outage costs
one call its time, and the end of the outage is seen by the next call.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from sgl_ext.balancer.store.documents import MAX_QUEUED, MAX_QUEUED_BYTES, WAIT_S, StoreFailed
from sgl_ext.supervision import Failed, Guard

_CLIENTS = ("redis", "psycopg", "psycopg_pool")
_T = TypeVar("_T")


class Calls:
    """Calls of one kind, reading or writing: that one fails says nothing about the other.

    Of failures in a row the first is logged.
    """

    def __init__(self, what: str, failed: Failed, wait_s: float = WAIT_S) -> None:
        """what: what the calls do, for the log. failed: called with it for each failure."""
        self._what = what
        self._failed = failed
        self._guard = Guard(what, failed)
        self._wait_s = wait_s
        self._running = 0
        self._bytes = 0
        self._is_failing = False

    async def run(self, call: Callable[[], Coroutine[Any, Any, _T]], size_bytes: int = 0) -> _T:
        """The result of a call that sends `size_bytes`. Raises StoreFailed after `wait_s` at most;
        the call then goes on until the server answers or its connection ends."""
        with self._guard:
            return await self._run(call, size_bytes)
        raise StoreFailed

    async def tidy(self, call: Callable[[], Coroutine[Any, Any, _T]]) -> _T | None:
        """As `run`, for what no answer depends on: None if it failed, which is not logged."""
        with suppress(StoreFailed):
            try:
                return await self._run(call, 0)
            except Exception:
                self._failed(self._what)
        return None

    async def _run(self, call: Callable[[], Coroutine[Any, Any, _T]], size_bytes: int) -> _T:
        is_full = self._running == MAX_QUEUED or self._bytes + size_bytes > MAX_QUEUED_BYTES
        if self._running and (self._is_failing or is_full):
            raise StoreFailed("too many calls wait for it" if is_full else "it fails")
        self._running += 1
        self._bytes += size_bytes

        def done(ended: asyncio.Task[_T]) -> None:
            self._running -= 1
            self._bytes -= size_bytes
            self._is_failing = ended.cancelled() or ended.exception() is not None

        running = asyncio.create_task(call())
        running.add_done_callback(done)
        try:
            # Shielded: a cancelled query would first wait for the server to confirm that.
            async with asyncio.timeout(self._wait_s):
                return await asyncio.shield(running)
        except TimeoutError:
            self._is_failing = True
            raise StoreFailed("it is too slow") from None
        except Exception as error:
            raise failure_of(error) from None


def failure_of(error: Exception) -> Exception:
    """What a client's exception says about the server, without its traceback, which does not help;
    any other exception is a fault of ours, and stays as it is."""
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _CLIENTS:
        return StoreFailed(f"{type(error).__name__}: {' '.join(str(error).split())}")
    return error


async def settle(work: Awaitable[object], wait_s: float = 1.0) -> None:
    """Waits for the end of a connection, which a server that hangs would delay."""
    with suppress(Exception):
        async with asyncio.timeout(wait_s):
            await work
