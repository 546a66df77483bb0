"""A TCP relay before an engine, that can cut the connections which carry prefix events."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

_FEED = b"GET /sgl_ext/events"
_READ_BYTES = 1 << 16


class FeedRelay:
    """An asynchronous context manager; `url` is the relay's own."""

    def __init__(self, engine: str) -> None:
        address = urlsplit(engine)
        self._engine = (address.hostname, address.port)
        self._feeds: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FeedRelay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Breaks the feeds, and each that is opened from now on."""
        self._is_cut = True
        for writer in tuple(self._feeds):
            writer.transport.abort()

    def mend(self) -> None:
        """Lets feeds through again."""
        self._is_cut = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a server's callback is a task"
        self._tasks.add(task)
        try:
            await self._relay(reader, writer)
        except OSError:
            pass  # either side is gone, and so is the other one now
        finally:
            self._tasks.discard(task)
            self._feeds.discard(writer)
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, to_engine = await asyncio.open_connection(*self._engine)
        back = asyncio.create_task(self._copy(upstream, writer))
        try:
            while data := await reader.read(_READ_BYTES):
                if _FEED in data[: len(_FEED)]:
                    if self._is_cut:
                        return
                    self._feeds.add(writer)
                to_engine.write(data)
                await to_engine.drain()
        finally:
            back.cancel()
            to_engine.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                writer.write(data)
                await writer.drain()
        writer.close()
