"""Subscriptions to the engines' prefix events: one connection to each, reopened if it ends."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from http import HTTPStatus

import aiohttp

from radix.residency import Tier
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.prefix.prefix_events import (
    EventStreamBroken,
    Fault,
    PrefixEventReader,
    Tiers,
)
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.supervision import Guard, supervise
from sgl_ext.wire.events import EVENTS_PATH, PREFIXES, Event

log = logging.getLogger(__name__)

LONGEST_LINE_BYTES = 64 * 1024 * 1024
_RECONNECT_S = 0.5
_SYNCS_TO_PUBLISH = 3
_RECONNECT_UNSUPPORTED_S = 30.0
# Engines send a line at least every 20 s, if only to show that they are alive.
_SILENCE_S = 60.0
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=_SILENCE_S)


class EventSubscribers:
    """A subscriber for each worker."""

    def __init__(self, session: aiohttp.ClientSession, router: Router, metrics: Metrics) -> None:
        self._session = session
        self._router = router
        self._metrics = metrics
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._tried: dict[Worker, asyncio.Event] = {}
        self._reporting: set[Worker] = set()
        self._complete: set[Worker] = set()
        self._unpublished: dict[Worker, int] = {}
        router.workers.on_leave.append(self._restart)

    def sync(self) -> None:
        """Subscribes to workers that have joined, and unsubscribes from those that have left or
        have drained: an engine without subscribers may end."""
        workers = {each for each in self._router.workers.all if each.in_flight or not each.draining}
        for worker in self._tried.keys() - workers:
            if worker in self._tasks:
                self._tasks.pop(worker).cancel()
            del self._tried[worker]
            self._reporting.discard(worker)
            self._complete.discard(worker)
            self._unpublished.pop(worker, None)
        for worker in workers - self._tasks.keys():
            self._tried[worker] = asyncio.Event()
            failed = self._metrics.background_failed
            step = partial(self._subscribe, worker, Guard("prefix_events", failed))
            task = supervise("subscription", failed, step, _RECONNECT_S)
            self._tasks[worker] = asyncio.create_task(task)
        for worker in self._router.workers.ready:
            self._note_unpublished(worker)

    def _note_unpublished(self, worker: Worker) -> None:
        """Logs once that a ready worker publishes no prefixes. Its scheduler may say that it does
        a moment after the snapshot."""
        times = self._unpublished.get(worker, 0)
        if not worker.unpublished:
            self._unpublished.pop(worker, None)
        elif times < _SYNCS_TO_PUBLISH and self._tried[worker].is_set():
            self._unpublished[worker] = times + 1
            if times + 1 == _SYNCS_TO_PUBLISH:
                log.warning("%s %s", worker.id, worker.unpublished)

    async def wait_until_tried(self, timeout_s: float) -> None:
        """Waits until each worker has sent its snapshot or failed to, for at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for tried in tuple(self._tried.values()):
                    await tried.wait()

    def incomplete(self) -> list[Worker]:
        """The ready workers whose snapshot is not in the index in full, as far as this process
        knows, without those that send none."""
        return [worker for worker in self._router.workers.ready if worker not in self._complete]

    def _restart(self, worker: Worker) -> None:
        """Ends a subscription, because the router has forgotten what the worker holds. `sync`
        begins another, which starts with a snapshot."""
        worker.publishes = False
        self._complete.discard(worker)
        if (task := self._tasks.pop(worker, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        """Ends all subscriptions."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _subscribe(self, worker: Worker, guard: Guard) -> None:
        """Applies the events of one connection until it ends."""
        pause_s = 0.0
        self._reporting.discard(worker)
        with guard:
            try:
                pause_s = await self._receive(worker)
            except EventStreamBroken as broken:
                self._metrics.prefix_event_faults.counts[worker.id, str(broken)] += 1
                log.warning("%s: prefix events: %s; reconnecting", worker.id, broken)
            except (aiohttp.ClientError, TimeoutError):
                pass
        if worker not in self._reporting:
            # One connection may break; a second one without a report ends the engine's report.
            worker.clear_load()
            self._router.capacity_changed()
        self._tried[worker].set()
        await asyncio.sleep(pause_s)

    async def _receive(self, worker: Worker) -> float:
        """Applies the events of one connection until it ends; returns what the pause before the
        next is longer than usual."""
        url = worker.url + EVENTS_PATH + (f"?rank={worker.rank}" if worker.rank else "")
        async with self._session.get(url, timeout=_TIMEOUT) as response:
            if response.status == HTTPStatus.UNAUTHORIZED:  # until the secrets agree again
                return 0.0
            if response.status != HTTPStatus.OK:
                worker.publishes = False
                self._complete.add(worker)
                return _RECONNECT_UNSUPPORTED_S
            prefixes = self._router.prefixes
            reader = PrefixEventReader(
                worker.slot,
                prefixes.written,
                prefixes.in_flight,
                worker.pins,
                partial(self._find_tiers, worker),
            )
            async for line in _lines(response.content):
                now_s = asyncio.get_running_loop().time()
                event = reader.apply(line, now_s)
                self._tried[worker].set()
                self._metrics.prefix_event_bytes.counts[(worker.id,)] += len(line) + 1
                self._note(worker, event, reader, now_s)
        return 0.0

    def _find_tiers(self, worker: Worker, event: Event) -> Tiers:
        workers = self._router.workers
        before = workers.slots_of(worker)
        has_host = Tier.HOST in (event.publishes or ())
        workers.set_tiers(worker, has_host=has_host, machine=event.machine)
        for slot in {*before}.difference(workers.slots_of(worker)):
            self._router.prefixes.forget_worker(slot)
        return worker.host_slot, worker.shared_slot

    def _note(self, worker: Worker, event: Event, reader: PrefixEventReader, now_s: float) -> None:
        if event.complete and self._router.prefixes.written is not None:
            self._complete.add(worker)
        if event.publishes is not None:
            worker.publishes = PREFIXES in event.publishes
        if not event.alive:
            worker.heard(now_s)
            self._router.attempts.confirm(worker)
        self._metrics.prefix_events.counts[(worker.id,)] += 1
        for fault, count in ((Fault.ORPHAN, reader.orphans), (Fault.REPEATED, reader.repeated)):
            if count:
                self._metrics.prefix_event_faults.counts[worker.id, str(fault)] += count
        reader.orphans = reader.repeated = 0
        if event.snapshot or event.caches_off is not None:
            worker.caches_off = event.caches_off or []
        if event.snapshot:
            worker.degraded = event.degraded
        worker.load_share = event.load_share or worker.load_share
        worker.shared_share = event.shared_share or worker.shared_share
        if event.load is not None:
            worker.apply_load(event.load, now_s)
            self._reporting.add(worker)
            self._router.load_reported(worker)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Complete lines. Raises EventStreamBroken at a line that is longer than engines send."""
    parts: list[bytes] = []
    size = 0
    async for chunk in content.iter_any():
        *complete, rest = chunk.split(b"\n")
        for line in complete:
            parts.append(line)
            if joined := b"".join(parts):
                yield joined
            parts, size = [], 0
        parts.append(rest)
        size += len(rest)
        if size > LONGEST_LINE_BYTES:
            raise EventStreamBroken(Fault.MALFORMED)
