"""Raw clients and workers for a balancer: their bytes are sent unchanged."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from sgl_ext.balancer.cluster.peers import PeerGroup
from sgl_ext.balancer.server import Balancer
from sgl_ext.settings.schema import BalancerSettings
from tests.waiting import HANG_S

PATH = b"/v1/messages"


def request(
    body: bytes = b"{}", *lines: bytes, path: bytes = PATH, version: bytes = b"HTTP/1.1"
) -> bytes:
    """A JSON request."""
    framing = b"content-length: %d" % len(body)
    start = b"POST %b %b" % (path, version)
    return b"\r\n".join([start, b"content-type: application/json", *lines, framing, b"", body])


def answer(body: bytes) -> bytes:
    """A JSON answer."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> list[bytes]:
    """Each chunk in a piece of its own."""
    return [*(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks), end]


def sse(*events: bytes, end: bytes = b"0\r\n\r\n") -> list[bytes]:
    """A streamed answer, each event in a piece of its own; without `end` it stays open."""
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    return [head, *chunked(*events, end=end)]


async def until(condition: Callable[[], object]) -> None:
    """Lets the loop run until the condition holds."""
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event of its own
            await asyncio.sleep(0)


AT_ONCE = {"drain_s": 0, "drain_min_s": 0, "resend_s": 0.0}
"""Settings of a balancer that waits for no client, neither at its end nor to send again."""


class Wire:
    """A client's bare connection: what it writes is what is sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, data: bytes) -> tuple[bytes, bytes]:
        """Sends bytes and reads one answer: its head and its body."""
        self.writer.write(data)
        return await self.answer()

    async def answer(self) -> tuple[bytes, bytes]:
        """Reads one answer with a length."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        _, _, length = head.partition(b"content-length: ")
        size = int(length.partition(b"\r\n")[0]) if length else 0
        return head, await self.reader.readexactly(size)

    async def stream(self) -> tuple[bytes, bytes]:
        """Reads one answer in chunks: its head and its body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        body = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body.append(await self.reader.readexactly(size))
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return head, b"".join(body)

    async def rest(self) -> bytes:
        """Everything until the balancer closes."""
        return await self.reader.read()


class Raw:
    """A worker that sends bytes as they are, one list of pieces a request, and keeps requests.

    A piece is bytes; None closes the connection. An answer that is not scripted
    is `GOOD`. Requests must come with their head in one read.
    """

    GOOD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"

    def __init__(self, *answers: list[bytes | None]) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self.url = ""

    def go_on(self, data: bytes) -> None:
        """Sends more on the connection that asked last."""
        assert self._writer is not None
        self._writer.write(data)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        used = False
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                is_probe = b"x-sgl-ext-purpose: probe" in head
                if is_probe or head.startswith((b"GET /ready", b"GET /sgl_ext/")):
                    status = b"200 OK" if head.startswith(b"GET /ready") else b"404 Not Found"
                    writer.write(b"HTTP/1.1 %b\r\nconnection: close\r\n\r\n" % status)
                    return
                self._writer = writer
                self.connections += not used
                used = True
                _, _, length = head.lower().partition(b"content-length: ")
                body = await reader.readexactly(int(length.partition(b"\r\n")[0] or 0))
                self.requests.append(head + body)
                for piece in self.answers.pop(0) if self.answers else [self.GOOD]:
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()
        finally:
            writer.close()


def process_groups(count: int) -> list[PeerGroup]:
    """Those of `count` processes of one balancer, which all run in this process."""
    sockets = []
    for _ in range(count):
        sockets.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        sockets[-1].bind(("127.0.0.1", 0))
    return [PeerGroup(number, b"0123456789abcdef", tuple(sockets)) for number in range(count)]


@asynccontextmanager
async def running(
    *workers: Raw,
    interval_s: float = 0.1,
    group: PeerGroup | None = None,
    folder: Path | None = None,
    **config: Any,
) -> AsyncIterator[Balancer]:
    """Raw workers that do not run yet, and a balancer over all. group, folder: as of a Balancer."""
    async with AsyncExitStack() as stack:
        if group is not None:
            stack.callback(group.mine.close)
        for worker in [w for w in workers if not w.url]:
            server = await asyncio.start_server(worker.serve, "127.0.0.1", 0)
            stack.callback(server.close)
            worker.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        urls = tuple(worker.url for worker in workers)
        settings = {"workers": urls, "port": 0, **AT_ONCE, **config}
        balancer = Balancer(BalancerSettings(**settings), group, folder, interval_s=interval_s)
        await balancer.start()
        stack.push_async_callback(balancer.stop)
        yield balancer


@asynccontextmanager
async def connected(balancer: Balancer) -> AsyncIterator[Wire]:
    """A bare connection to a balancer."""
    wire = Wire(*await asyncio.open_connection("127.0.0.1", balancer.port))
    try:
        yield wire
    finally:
        # Not closed, which would wait for what the balancer does not read.
        wire.writer.transport.abort()
