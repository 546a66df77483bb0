"""A load generator: some connections, each sending its next request when the last is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import cast

import uvloop


@dataclass
class Load:
    """What one run saw. Times in seconds, one a request; `span_s` is the whole run's."""

    first_byte_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    failed: int = 0
    span_s: float = 0.0


def run_load(port: int, requests: Sequence[bytes], count: int, connections: int) -> Load:
    """Sends `count` of the prepared requests in turn and times their answers."""
    load = Load()
    uvloop.run(_run(load, port, requests, count, connections))
    return load


async def _run(
    load: Load, port: int, requests: Sequence[bytes], count: int, connections: int
) -> None:
    loop = asyncio.get_running_loop()
    run = _Run(load, cycle(requests), count, loop.create_future())
    started = time.perf_counter()
    clients = []
    for _ in range(connections):
        _, client = await loop.create_connection(lambda: _Client(run), "127.0.0.1", port)
        clients.append(client)
    for client in clients:
        client.send()
    await run.done
    load.span_s = time.perf_counter() - started
    for client in clients:
        client.transport.close()


@dataclass
class _Run:
    load: Load
    requests: cycle[bytes]
    left: int
    done: asyncio.Future[None]
    running: int = 0


class _Client(asyncio.Protocol):
    """One connection. An answer ends where its length says, or its last chunk."""

    transport: asyncio.Transport

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._data = b""
        self._size: int | None = None
        self._first = 0.0
        self._sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is one in all but name.
        self.transport = cast(asyncio.Transport, transport)

    def send(self) -> None:
        """Sends the next request, or ends if there is none."""
        run = self._run
        if not run.left:
            if not run.running and not run.done.done():
                run.done.set_result(None)
            return
        run.left -= 1
        run.running += 1
        self._data = b""
        self._size = None
        self._first = 0.0
        self._sent = time.perf_counter()
        self.transport.write(next(run.requests))

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._size is None:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._data[:end].lower()
            at = head.find(b"\r\ncontent-length:")
            self._size = 0 if at < 0 else int(head[at + 17 :].partition(b"\r\n")[0]) + end + 4
            self._event_at = end + 4
        if not self._first and len(self._data) > self._event_at:
            self._first = time.perf_counter()
        whole = (
            self._data.endswith(b"0\r\n\r\n") if not self._size else len(self._data) == self._size
        )
        if whole:
            self._answered()

    def _answered(self) -> None:
        run = self._run
        run.running -= 1
        if not self._data.startswith(b"HTTP/1.1 200"):
            run.load.failed += 1
        run.load.total_s.append(time.perf_counter() - self._sent)
        run.load.first_byte_s.append(self._first - self._sent)
        self.send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._run.done.done():
            self._run.done.set_exception(error or ConnectionError("the proxy closed a connection"))
