"""The queue over real connections: thousands wait for a slow engine, and half disconnect."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from sgl_ext.balancer.relay.exchange import Exchange
from sgl_ext.balancer.server import Balancer
from tests.balancer.conftest import Serve
from tests.balancer.wire import Raw, answer, request, until

MAX_RUNNING = 64
AHEAD = MAX_RUNNING // 8
LIMIT = 1_280
CLIENTS = 1_500


class Slow(Raw):
    """An engine that reports how much it can run, and answers nothing before its gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.seen = 0
        self.most = 0
        self._running = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET /ready"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                elif head.startswith(b"GET /sgl_ext/events"):
                    writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + snapshot())
                else:
                    await self._answer(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        _, _, length = head.lower().partition(b"content-length: ")
        await reader.readexactly(int(length.partition(b"\r\n")[0]))
        self.seen += 1
        self._running += 1
        self.most = max(self.most, self._running)
        await self.gate.wait()
        self._running -= 1
        writer.write(answer(b"{}"))


def snapshot() -> bytes:
    load = {"capacity_tokens": 1_000_000, "max_running": MAX_RUNNING, "queued": 0}
    line = {"seq": 1, "snapshot": True, "cleared": True, "publishes": ["prefixes"], "load": load}
    return orjson.dumps(line) + b"\n"


class Client(asyncio.Protocol):
    """Sends one request as it connects, and keeps the head of what comes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.answered = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self._data)

    def data_received(self, data: bytes) -> None:
        if not self.answered.done():
            self.answered.set_result(data)


async def come(balancer: Balancer, number: int) -> Client:
    messages = [{"role": "user", "content": f"Task {number}"}]
    data = request(orjson.dumps({"messages": messages}))
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: Client(data), "127.0.0.1", balancer.port)
    return client


def exchanges() -> int:
    gc.collect()
    return sum(type(one) is Exchange for one in gc.get_objects())


@pytest.fixture
def clients() -> Iterator[list[Client]]:
    """Clients whose connections end with the test, however it ends."""
    clients: list[Client] = []
    yield clients
    for client in clients:
        client.transport.abort()


@pytest.mark.long
async def test_many_wait_half_disconnect_and_the_rest_are_answered(
    serve: Serve, clients: list[Client]
) -> None:
    before = exchanges()
    engine = Slow()
    # Nobody sends a request again, so those who leave make room at once.
    balancer = await serve(engine, queue_limit=LIMIT, resend_s=0.0)
    admission_queue = balancer._services.models.default.queue
    for first in range(0, CLIENTS, 100):
        clients += await asyncio.gather(*(come(balancer, first + n) for n in range(100)))
    sent = MAX_RUNNING + AHEAD
    await until(lambda: engine.seen == sent)
    await until(lambda: done(clients) == CLIENTS - sent - LIMIT)
    assert len(admission_queue) == LIMIT
    for client in clients:
        if client.answered.done():
            head = client.answered.result()
            assert head.startswith(b"HTTP/1.1 529 ")
            assert b"\r\nretry-after: 5\r\n" in head.lower()
    waiting = [client for client in clients if not client.answered.done()]
    for client in waiting[::2]:
        client.transport.abort()
    await until(lambda: len(balancer._connections) == CLIENTS - len(waiting[::2]))
    engine.gate.set()
    heads = await asyncio.gather(*(client.answered for client in waiting[1::2]))
    assert Counter(head[:12] for head in heads) == {b"HTTP/1.1 200": len(heads)}
    assert engine.most <= sent, "it never had to queue more than a few"
    assert len(admission_queue) == 0
    for client in clients:
        client.transport.abort()
    await until(lambda: not balancer._connections)
    assert exchanges() == before, "nothing is kept of any of them"


def done(clients: list[Client]) -> int:
    return sum(client.answered.done() for client in clients)
