"""`GET /sgl_ext/events`: what the engine holds, and then every change, a line of JSON each.

The HTTP process mirrors what the scheduler tells it, so a new subscriber is served
without asking the scheduler. Lines are numbered for each connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from itertools import islice
from typing import Any

import orjson
import zmq
import zmq.asyncio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radix.index import PrefixIndex
from sgl_ext.engine.core.channels import events_address
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.event_lines import stored_lines
from sgl_ext.pin_mirror import PinMirror

PATH = "/sgl_ext/events"
BUFFER_BYTES = 16 * 2**20
QUIET_S = 20.0
_logger = logging.getLogger(__name__)


class Subscriber:
    """One reader's lines that are not sent yet."""

    def __init__(self, buffer_bytes: int) -> None:
        self.ended = asyncio.Event()
        self.slow = False
        self._lines: list[bytes] = []
        self._bytes = 0
        self._limit = buffer_bytes
        self._some = asyncio.Event()

    def put(self, line: bytes) -> None:
        """Adds a line; a reader that is too far behind is given up."""
        self._lines.append(line)
        self._bytes += len(line)
        self._some.set()
        if self._bytes > self._limit and not self.slow:
            self.slow = True
            counter("event_subscribers_slow").inc()
            self.ended.set()

    async def take(self) -> list[bytes]:
        """Waits for lines, and hands over all there are."""
        await self._some.wait()
        self._some.clear()
        lines, self._lines, self._bytes = self._lines, [], 0
        return lines


class Hub:
    """The mirror of what the scheduler holds, and whoever listens to it."""

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._mirror = PrefixIndex()
        self._load: dict[str, int] = {}
        self.pins = PinMirror()
        self._subscribers: set[Subscriber] = set()
        self._on_cleared: list[Callable[[], None]] = []
        self._buffer_bytes = buffer_bytes

    def apply(self, line: bytes) -> None:
        """Takes one line of the scheduler's, and hands it on. Raises ValueError on any other."""
        told = orjson.loads(line)
        if told.get("cleared"):
            for act in self._on_cleared if len(self._mirror) else ():  # a new engine begins with it
                act()
            self._mirror.clear(0)
        for segment in told.get("removed", ()):
            self._mirror.remove(0, int(segment, 16))
        for segment, parent, tokens in told.get("stored", ()):
            above = None if parent is None else int(parent, 16)
            if not self._mirror.store(0, above, int(segment, 16), tokens):
                raise ValueError(f"segment {segment} is stored below {parent}, which is not held")
        self._load = told.get("load", self._load)
        self.pins.apply(told, time.monotonic())
        counter("event_lines").inc()
        for subscriber in self._subscribers:
            subscriber.put(line)

    def on_cleared(self, action: Callable[[], None]) -> None:
        """Has `action` called when the cache was emptied."""
        self._on_cleared.append(action)

    def snapshot(self) -> Iterator[bytes]:
        """Lines, without their numbers, that tell a new subscriber everything as of now."""
        held = [(segment, parent, tokens) for parent, segment, tokens in self._mirror.snapshot(0)]
        load, lines = self._load, stored_lines(held)
        pins = self.pins.rows(time.monotonic())

        def render() -> Iterator[bytes]:
            first: dict[str, Any] = {"snapshot": True, "cleared": True}
            yield orjson.dumps(first | {"load": load} if load else first)
            yield from map(orjson.dumps, lines)
            if pins:
                yield orjson.dumps({"pinned": pins})

        return render()

    def subscribe(self) -> Subscriber:
        """A subscriber to every line from now on, until `unsubscribe`."""
        subscriber = Subscriber(self._buffer_bytes)
        self._subscribers.add(subscriber)
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.discard(subscriber)

    def close(self) -> None:
        """Ends every stream: a server that shuts down waits for them."""
        for subscriber in self._subscribers:
            subscriber.ended.set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Applies the scheduler's lines for as long as the server runs."""
        socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        socket.bind(events_address())
        reader = asyncio.create_task(self._read(socket))
        try:
            yield
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader
            socket.close(linger=0)

    async def _read(self, socket: Any) -> None:
        while True:
            line = await socket.recv()
            try:
                self.apply(line)
            except Exception:
                # The next subscriber's snapshot may lack it; a cache miss, and no more.
                counter("event_lines_unreadable").inc()
                _logger.exception("sgl-ext: a line of prefix events could not be applied")


class EventStream(Response):
    """An answer that goes on until the reader leaves, falls behind, or the server ends."""

    media_type = "application/x-ndjson"

    def __init__(self, hub: Hub) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        subscriber = self._hub.subscribe()
        tasks = [
            asyncio.create_task(self._send_lines(subscriber, self._hub.snapshot(), send)),
            asyncio.create_task(_left(receive)),
            asyncio.create_task(subscriber.ended.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._hub.unsubscribe(subscriber)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not subscriber.slow:  # one that does not read cannot be sent an end either
            await send({"type": "http.response.body", "body": b""})

    async def _send_lines(
        self, subscriber: Subscriber, snapshot: Iterator[bytes], send: Send
    ) -> None:
        number = 0
        while lines := list(islice(snapshot, 1)) or await _next(subscriber):
            body = b"".join(_numbered(number + at, line) for at, line in enumerate(lines))
            number += len(lines)
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.sleep(0)


async def _next(subscriber: Subscriber) -> list[bytes]:
    """What comes next; if for long nothing does, a line that says no more than that we live."""
    try:
        return await asyncio.wait_for(subscriber.take(), QUIET_S)
    except TimeoutError:
        return [b'{"alive":true}']


def _numbered(number: int, line: bytes) -> bytes:
    return b'{"seq":%d,%b\n' % (number, line[1:])


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@cache
def hub() -> Hub:
    """This process's hub."""
    return Hub()
