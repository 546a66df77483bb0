"""Listening to what engines hold: one connection to each, begun anew whenever it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import aiohttp

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.prefix_events import EventStreamBroken, Fault, PrefixEventReader
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.workers import Worker

log = logging.getLogger(__name__)

EVENTS_PATH = "/sgl_ext/events"
LONGEST_LINE_BYTES = 64 * 1024 * 1024
_AGAIN_S = 0.5
_AGAIN_WITHOUT_EVENTS_S = 30.0
# The engine says something at least this often, if only that it lives.
_SILENCE_S = 60.0
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=_SILENCE_S)


class EventSubscribers:
    """A listener for each worker that there is."""

    def __init__(self, session: aiohttp.ClientSession, router: Router, metrics: Metrics) -> None:
        self._session = session
        self._router = router
        self._metrics = metrics
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._tried: dict[Worker, asyncio.Event] = {}
        self._told: set[Worker] = set()
        router.workers.on_leave(self._begin_anew)

    def sync(self) -> None:
        """Starts listening to workers that have joined, and stops with those that have left."""
        there = set(self._router.workers.all)
        for worker in self._tasks.keys() - there:
            self._tasks.pop(worker).cancel()
            del self._tried[worker]
            self._told.discard(worker)
        for worker in there - self._tasks.keys():
            self._tried[worker] = asyncio.Event()
            self._tasks[worker] = asyncio.create_task(self._listen(worker))

    async def wait_until_tried(self, timeout_s: float) -> None:
        """Returns when each worker has told what it holds, or could not, or `timeout_s` is over."""
        waiting = [asyncio.create_task(tried.wait()) for tried in self._tried.values()]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=timeout_s)
            for task in late:
                task.cancel()

    def _begin_anew(self, worker: Worker) -> None:
        """What was known of the worker was forgotten, so it has to tell everything again."""
        worker.publishes = False
        if (task := self._tasks.pop(worker, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        """Stops listening."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _listen(self, worker: Worker) -> None:
        while True:
            pause_s = _AGAIN_S
            self._told.discard(worker)
            try:
                pause_s = await self._hear(worker)
            except EventStreamBroken as broken:
                self._metrics.prefix_event_faults.counts[worker.url, str(broken.fault)] += 1
                log.warning("%s: prefix events: %s; asking for all", worker.url, broken.fault)
            except (aiohttp.ClientError, TimeoutError):
                pass
            except Exception:
                log.exception("%s: prefix events", worker.url)
            if worker not in self._told:
                # A connection that breaks is begun anew at once; now that told nothing either.
                worker.clear_load()
                self._router.capacity_changed()
            self._tried[worker].set()
            await asyncio.sleep(pause_s)

    async def _hear(self, worker: Worker) -> float:
        """Listens to one connection until it ends; how long to wait before the next."""
        url = worker.url + EVENTS_PATH
        async with self._session.get(url, timeout=_TIMEOUT) as answer:
            worker.publishes = answer.status == 200
            if not worker.publishes:
                return _AGAIN_WITHOUT_EVENTS_S
            index, expected = self._router.index, self._router.expected
            feed = PrefixEventReader(worker.slot, index, expected, worker.pins)
            async for line in _lines(answer.content):
                feed.apply(line, asyncio.get_running_loop().time())
                self._tried[worker].set()
                self._note(worker, feed)
        return _AGAIN_S

    def _note(self, worker: Worker, feed: PrefixEventReader) -> None:
        if feed.told:
            worker.last_heard_s = asyncio.get_running_loop().time()
            self._router.confirmed(worker)
        self._metrics.prefix_events.counts[(worker.url,)] += 1
        for fault, count in ((Fault.ORPHAN, feed.orphans), (Fault.REPEATED, feed.repeated)):
            if count:
                self._metrics.prefix_event_faults.counts[worker.url, str(fault)] += count
        feed.orphans = feed.repeated = 0
        if feed.load is not None:
            worker.apply_load(feed.load, asyncio.get_running_loop().time())
            feed.load = None
            self._told.add(worker)
            self._router.capacity_changed()


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Whole lines. Raises EventStreamBroken at one that is longer than an engine would send."""
    parts: list[bytes] = []
    size = 0
    async for chunk in content.iter_any():
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            parts.append(line)
            if joined := b"".join(parts):
                yield joined
            parts, size = [], 0
        parts.append(rest)
        size += len(rest)
        if size > LONGEST_LINE_BYTES:
            raise EventStreamBroken(Fault.MALFORMED)
