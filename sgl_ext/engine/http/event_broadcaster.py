"""`GET /sgl_ext/events`: what the engine's cache holds, and then each change, as lines of JSON.

The HTTP process mirrors the scheduler's cache from its events, so it serves a new subscriber a
snapshot without the scheduler. Lines are numbered for each connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import islice
from typing import Any

import orjson
import zmq
import zmq.asyncio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
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
    """The lines that are not sent yet to one subscriber."""

    def __init__(self, buffer_bytes: int) -> None:
        self.ended = asyncio.Event()
        self.slow = False
        self._lines: list[bytes] = []
        self._bytes = 0
        self._limit = buffer_bytes
        self._some = asyncio.Event()

    def put(self, line: bytes) -> None:
        """Adds a line. A subscriber with too many unsent bytes is dropped."""
        self._lines.append(line)
        self._bytes += len(line)
        self._some.set()
        if self._bytes > self._limit and not self.slow:
            self.slow = True
            counter("slow_event_subscribers").inc()
            self.ended.set()

    async def take(self) -> list[bytes]:
        """Waits for lines, and returns all of them."""
        await self._some.wait()
        self._some.clear()
        lines, self._lines, self._bytes = self._lines, [], 0
        return lines


class EventBroadcaster:
    """Mirrors what the scheduler's cache holds, and sends its events to all subscribers."""

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._mirror = PrefixIndex()
        self._load: dict[str, int] = {}
        self.pins = PinMirror()
        self._subscribers: set[Subscriber] = set()
        self._on_cleared: list[Callable[[], None]] = []
        self._buffer_bytes = buffer_bytes

    def apply(self, line: bytes) -> None:
        """Applies one line of the scheduler, and sends it on. Raises ValueError on a wrong one."""
        event = orjson.loads(line)
        if event.get("cleared"):
            # A new engine begins with such a line, and has nothing to clear.
            for action in self._on_cleared if len(self._mirror) else ():
                action()
            self._mirror.clear(0)
        for segment in event.get("removed", ()):
            self._mirror.remove(0, int(segment, 16))
        for segment, parent, tokens in event.get("stored", ()):
            above = None if parent is None else int(parent, 16)
            if not self._mirror.store(0, above, int(segment, 16), tokens):
                raise ValueError(f"segment {segment} is stored below {parent}, which is not held")
        self._load = event.get("load", self._load)
        self.pins.apply(event, time.monotonic())
        counter("event_lines").inc()
        for subscriber in self._subscribers:
            subscriber.put(line)

    def on_cleared(self, action: Callable[[], None]) -> None:
        """Calls `action` when the cache was emptied."""
        self._on_cleared.append(action)

    def snapshot(self) -> Iterator[bytes]:
        """Lines, without their numbers, that describe the present state to a new subscriber."""
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
        """A subscriber to all lines from now on, until `unsubscribe`."""
        subscriber = Subscriber(self._buffer_bytes)
        self._subscribers.add(subscriber)
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.discard(subscriber)

    def close(self) -> None:
        """Ends all streams: a server that shuts down waits for them."""
        for subscriber in self._subscribers:
            subscriber.ended.set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Applies the scheduler's lines while the block runs."""
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
                # The next snapshot may lack it, which costs a cache miss.
                counter("event_lines_unreadable").inc()
                _logger.exception("sgl-ext: a line of prefix events could not be applied")


class EventStream(Response):
    """A response that ends when its subscriber leaves or is dropped, or when the server ends."""

    media_type = "application/x-ndjson"

    def __init__(self, broadcaster: EventBroadcaster) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._broadcaster = broadcaster

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        subscriber = self._broadcaster.subscribe()
        tasks = [
            asyncio.create_task(self._send_lines(subscriber, self._broadcaster.snapshot(), send)),
            asyncio.create_task(_left(receive)),
            asyncio.create_task(subscriber.ended.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._broadcaster.unsubscribe(subscriber)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not subscriber.slow:  # one that does not read does not read an end either
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
    """The next lines; after QUIET_S without any, a line that shows that the engine is alive."""
    try:
        return await asyncio.wait_for(subscriber.take(), QUIET_S)
    except TimeoutError:
        return [b'{"alive":true}']


def _numbered(number: int, line: bytes) -> bytes:
    return b'{"seq":%d,%b\n' % (number, line[1:])


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event_route(broadcaster: EventBroadcaster) -> Route:
    """The route of the stream."""

    async def stream(_: Request) -> Response:
        return EventStream(broadcaster)

    return Route(PATH, stream, methods=["GET"])
