"""`GET /sgl_ext/events`: what the engine's cache holds, and then each change, as lines of JSON.

The HTTP process mirrors the scheduler's cache from its events, so it serves a new subscriber a
snapshot without the scheduler. Lines are numbered for each connection. With data parallelism each
rank has a scheduler, a cache and a stream of its own: `?rank=1`.

What the tier that engines share holds is announced once for all engines of the machine.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import orjson
import zmq
import zmq.asyncio
from starlette.types import Receive, Scope, Send

from radix.index import PrefixIndex
from radix.residency_changes import SharedSegments
from sgl_ext.engine.core.counters import background_failed, counter
from sgl_ext.engine.core.folder import address
from sgl_ext.engine.tiers.segment_notes import MOST_NOTES, NoteReader
from sgl_ext.pin_mirror import PinMirror
from sgl_ext.supervision import Guard, supervise
from sgl_ext.wire.events import EngineLoad, Line, encode, name_of, numbered, stored_lines


class SharedAnnouncer:
    """One engine's part in it. pages: where the tier has the pages of this engine's model."""

    limit_segments = MOST_NOTES

    def __init__(self, pages: Path) -> None:
        self._notes = NoteReader(pages)
        self._announces = False
        self._segments = SharedSegments()

    def __len__(self) -> int:
        return len(self._segments)

    def step(self) -> list[Line]:
        """The lines that announce what changed since the last call; none while another engine
        announces. This reads files for a while: call it in a thread."""
        if not self._announces:
            if not self._notes.may_publish():
                return []
            self._announces = True
            # What another engine announced before it ended may be gone.
            return [{"shared_cleared": True}, *self._changes()]
        return list(self._changes())

    def _changes(self) -> Iterator[Line]:
        removed, stored = self._segments.update(self._notes.segments())
        if removed:
            yield {"shared_removed": [*map(name_of, removed)]}
        yield from stored_lines(stored, "shared")

    def close(self) -> None:
        """Lets another engine announce."""
        self._notes.close()


BUFFER_BYTES = 16 * 2**20
QUIET_S = 20.0
_RETRY_S = 1.0
# The shared tier is looked at for a part of the time in so many.
_REST = 20
# The workers of the mirror. Besides what a slower tier has alone, it holds all that is above that.
_DEVICE, _HOST, _SHARED = 0, 1, 2
_TIERS = (
    (_DEVICE, "stored", "removed"),
    (_HOST, "host", "host_removed"),
    (_SHARED, "shared", "shared_removed"),
)
_logger = logging.getLogger(__name__)


class _Subscriber:
    """The lines that are not sent yet to one subscriber."""

    def __init__(self, limit_bytes: int) -> None:
        self.ended = asyncio.Event()
        self.is_slow = False
        self._lines: list[bytes] = []
        self.unsent_bytes = 0
        self._limit_bytes = limit_bytes
        self._some = asyncio.Event()

    def put(self, line: bytes) -> None:
        """Adds a line. A subscriber with too many unsent bytes is dropped."""
        self._lines.append(line)
        self.unsent_bytes += len(line)
        self._some.set()
        if self.unsent_bytes > self._limit_bytes and not self.is_slow:
            self.is_slow = True
            counter("slow_event_subscribers").inc()
            self.ended.set()

    async def take(self) -> list[bytes]:
        """Waits for lines, and returns all of them."""
        await self._some.wait()
        self._some.clear()
        lines, self._lines, self.unsent_bytes = self._lines, [], 0
        return lines


class EventBroadcaster:
    """Mirrors what one scheduler's cache holds, and sends its events to all subscribers.

    rank: the scheduler's data-parallel rank.
    degraded: features of SGLang with which this engine does less, from its start on.
    on_cleared: called when the cache was emptied.
    stored_all: set once the scheduler has stored what it holds in the shared tier.
    """

    def __init__(self, buffer_bytes: int = BUFFER_BYTES, rank: int = 0) -> None:
        self.rank = rank
        self._mirror = PrefixIndex()
        self._publishes: list[str] = []
        self._machine = ""
        self._shared_pages: Path | None = None
        self._announcer: SharedAnnouncer | None = None
        self._announces = False
        self._load: EngineLoad = {}
        self._shares: Line = {}
        self._caches_off: list[str] = []
        self._tiers_off: list[str] = []
        self.stored_all = asyncio.Event()
        self.degraded: tuple[str, ...] = ()
        self.pins = PinMirror()
        self.on_cleared: Callable[[], object] = lambda: None
        self._subscribers: set[_Subscriber] = set()
        self._buffer_bytes = buffer_bytes
        self._guard = Guard("event_streams", background_failed)

    def apply(self, line: bytes) -> None:
        """Applies one line of the scheduler, and sends it on. Raises ValueError on a wrong one."""
        event = orjson.loads(line)
        if event.get("cleared"):
            if len(self._mirror):  # a new engine begins with such a line, and has nothing to clear
                self.on_cleared()
            for tier in (_DEVICE, _HOST):
                self._mirror.clear(tier)
        if event.get("shared_cleared"):
            self._announces = True
            self._mirror.clear(_SHARED)
        if "shared_pages" in event:  # that is for this process
            self._shared_pages = Path(event.pop("shared_pages"))
            line = encode(event)
        if event.get("stored_all"):
            self.stored_all.set()
            return
        if "tiers_off" in event:  # they are shown with this process's caches
            tiers_off = event.pop("tiers_off")
            line = encode(event)
        else:
            tiers_off = self._tiers_off
        self._publishes = event.get("publishes", self._publishes)
        self._machine = event.get("machine", self._machine)
        for tier, _, removed in _TIERS:
            for segment in event.get(removed, ()):
                self._mirror.remove(tier, int(segment, 16))
        for tier, stored, _ in _TIERS:
            for row in event.get(stored, ()):
                self._store(tier, *row)
        self._load = event.get("load", self._load)
        if "load_share" in event:
            self._shares["load_share"] = event["load_share"]
        if "shared_share" in event:
            self._shares["shared_share"] = event["shared_share"]
        self.pins.apply(event, time.monotonic())
        counter("event_lines").inc()
        for subscriber in self._subscribers if event else ():
            subscriber.put(line)
        if tiers_off != self._tiers_off:
            own = [name for name in self._caches_off if name not in self._tiers_off]
            self._tiers_off = tiers_off
            self.show_caches_off(own)

    def _store(self, tier: int, segment: str, parent: str | None, tokens: int) -> None:
        above = None if parent is None else int(parent, 16)
        if tier != _DEVICE and above is not None:
            self._mirror.extend(tier, above)
        if not self._mirror.store(tier, above, int(segment, 16), tokens):
            raise ValueError(f"segment {segment} is stored below {parent}, which is not held")

    def show_caches_off(self, names: list[str]) -> None:
        """Sends the caches of this process that are off, and the tiers of the engine, if they are
        others than before."""
        names = [*names, *self._tiers_off]
        if names != self._caches_off:
            self._caches_off = names
            line = encode({"alive": True, "caches_off": names})
            for subscriber in self._subscribers:
                subscriber.put(line)

    def _snapshot(self) -> Iterator[bytes]:
        """Lines, without their numbers, that describe the present state to a new subscriber."""
        mirror = self._mirror
        held = {
            name: [
                (segment, above, tokens)
                for above, segment, tokens in mirror.snapshot(tier)
                if tier != _HOST or not mirror.holds(_DEVICE, segment)
            ]
            for tier, name, _ in _TIERS
        }
        first: Line = {"snapshot": True, "cleared": True, "publishes": self._publishes}
        first |= self._shares
        if self._load:
            first["load"] = self._load
        if self._machine:
            first["machine"] = self._machine
        if self._announces:
            first["shared_cleared"] = True
        if self._caches_off:
            first["caches_off"] = self._caches_off
        if self.degraded:
            first["degraded"] = self.degraded
        pins = self.pins.rows(time.monotonic())
        last: Line = {"pinned": pins, "complete": True} if pins else {"complete": True}
        lines = chain.from_iterable(stored_lines(rows, name) for name, rows in held.items())
        return map(encode, chain([first], lines, [last]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of the stream, which ends when its subscriber leaves or is dropped,
        or when the server ends."""
        headers = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        subscriber = _Subscriber(self._buffer_bytes)
        self._subscribers.add(subscriber)
        tasks = [
            asyncio.create_task(self._stream(subscriber, send)),
            asyncio.create_task(_left(receive)),
            asyncio.create_task(subscriber.ended.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._subscribers.discard(subscriber)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not subscriber.is_slow:  # one that does not read does not read an end either
            await send({"type": "http.response.body", "body": b""})

    @property
    def has_shared_tier(self) -> bool:
        """Whether the engine shares a tier with others."""
        return self._shared_pages is not None

    @property
    def subscriber_count(self) -> int:
        """How many subscribers there are."""
        return len(self._subscribers)

    def tables(self) -> Iterator[tuple[str, str, int, int]]:
        """Name, unit, size and bound of its tables; of the subscribers' buffers the largest."""
        mirror = self._mirror
        unsent = max((each.unsent_bytes for each in self._subscribers), default=0)
        yield "residency_mirror", "entries", len(mirror), mirror.limit_segments
        yield "unread_events", "bytes", unsent, self._buffer_bytes
        if (announcer := self._announcer) is not None:
            yield "shared_segments", "entries", len(announcer), announcer.limit_segments

    async def _stream(self, subscriber: _Subscriber, send: Send) -> None:
        """Sends lines until cancelled. After a failure the stream ends, and its subscriber begins
        another with a snapshot."""
        with self._guard:
            await _send_lines(subscriber, self._snapshot(), send)

    def close(self) -> None:
        """Ends all streams: a server that shuts down waits for them."""
        for subscriber in self._subscribers:
            subscriber.ended.set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Applies the scheduler's lines, and announces what the shared tier holds, while the block
        runs."""
        socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        socket.bind(address(f"events-{self.rank}"))
        works = ("event_lines", partial(self._read, socket)), ("shared_tier", self.announce)
        tasks = [
            asyncio.create_task(supervise(name, background_failed, work, _RETRY_S))
            for name, work in works
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            socket.close(linger=0)
            if self._announcer is not None:
                self._announcer.close()

    async def announce(self) -> None:
        """Announces what changed in the tier that engines share, unless another engine does."""
        if self._shared_pages is None:
            return
        began_s = time.monotonic()
        for line in await asyncio.to_thread(self._look, self._shared_pages):
            self.apply(encode(line))
        await asyncio.sleep(_REST * (time.monotonic() - began_s))

    def _look(self, pages: Path) -> list[Line]:
        if self._announcer is None:
            self._announcer = SharedAnnouncer(pages)
        return self._announcer.step()

    async def _read(self, socket: Any) -> None:
        while True:
            line = await socket.recv()
            try:
                self.apply(line)
            except Exception:
                # The next snapshot may lack it, which costs a cache miss.
                counter("event_lines_unreadable").inc()
                _logger.exception("sgl-ext: a line of prefix events could not be applied")


async def _send_lines(subscriber: _Subscriber, snapshot: Iterator[bytes], send: Send) -> None:
    number = 0
    while lines := list(islice(snapshot, 1)) or await _next(subscriber):
        body = b"".join([numbered(line, n) for n, line in enumerate(lines, number)])
        number += len(lines)
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await asyncio.sleep(0)


async def _next(subscriber: _Subscriber) -> list[bytes]:
    """The next lines; after QUIET_S without any, a line that shows that the engine is alive."""
    try:
        return await asyncio.wait_for(subscriber.take(), QUIET_S)
    except TimeoutError:
        return [encode({"alive": True})]


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
