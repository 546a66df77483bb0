"""An engine's prefix events: each line is checked and applied to the index.

A malformed line changes nothing. After it, or after a gap, the subscriber must connect again and
begin with a snapshot. There is one connection to each engine, and it is opened again if it ends.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from http import HTTPStatus

import aiohttp
import msgspec

from radix.in_flight_prefixes import InFlightPrefixes
from radix.index import PrefixIndex
from radix.residency import Tier
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.models import Models
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.pin_mirror import PinMirror
from sgl_ext.supervision import Guard, supervise
from sgl_ext.wire.events import (
    EVENTS_PATH,
    PREFIXES,
    Event,
    MalformedEvent,
    Rows,
    StoringEvent,
    read_event,
    runs_of,
)

log = logging.getLogger(__name__)


class Fault(StrEnum):
    """Why a line, or a part of it, was not applied."""

    MALFORMED = "malformed"
    GAP = "gap"
    REPEATED = "repeated"
    ORPHAN = "orphan"


class EventStreamBroken(Exception):
    """The stream cannot continue: connect again and begin with a snapshot. Its text is a Fault."""


Tiers = tuple[int | None, int | None]
"""The slots of a worker's host and of its machine's shared tier, if it has them."""


def _no_tiers(event: Event) -> Tiers:
    return None, None


@dataclass(slots=True, eq=False)
class PrefixEventReader:
    """Applies the events of one connection to one worker, in order.

    index: None if another process writes the index; then what was stored is not even parsed.
    find_tiers: the slots of the slower tiers that a line announces.
    orphans, repeated: how many segments and lines were not applied.
    """

    worker: int
    index: PrefixIndex | None
    in_flight: InFlightPrefixes
    pins: PinMirror
    find_tiers: Callable[[Event], Tiers] = _no_tiers
    orphans: int = 0
    repeated: int = 0
    _seq: int | None = None
    _tiers: Tiers = (None, None)

    def apply(self, line: bytes, now_s: float) -> Event:
        """Applies one line, received at `now_s`. The load that it reports is left to the caller.

        Raises EventStreamBroken if it is malformed or if lines before it are missing.
        """
        try:
            event, stored = read_event(line, with_stored=self.index is not None)
        except MalformedEvent:
            raise EventStreamBroken(Fault.MALFORMED) from None
        if self._seq is None:
            if event.snapshot is not True:
                raise EventStreamBroken(Fault.GAP)
        elif event.seq <= self._seq:
            self.repeated += 1
            return Event(event.seq, alive=True)
        elif event.seq != self._seq + 1:
            raise EventStreamBroken(Fault.GAP)
        self._seq = event.seq
        if event.publishes is not None or event.machine:
            self._tiers = self.find_tiers(event)
        if event.cleared:
            if self.index is not None:
                self.index.clear(self.worker)
                if (host := self._tiers[0]) is not None:
                    self.index.clear(host)
            if not event.snapshot:
                self.in_flight.forget_computed(self.worker)
        if event.shared_cleared and self.index is not None and self._tiers[1] is not None:
            self.index.clear(self._tiers[1])
        for segment in event.removed:
            number = int(segment, 16)
            if self.index is not None:
                self.index.remove(self.worker, number)
            self.in_flight.forget_segment(self.worker, number)
        if self.index is not None and isinstance(event, StoringEvent):
            self._store(self.index, stored)
            if event.host or event.host_removed or event.shared or event.shared_removed:
                self._store_tiers(self.index, event)
        self.pins.apply(msgspec.structs.asdict(event), now_s)
        return event

    def _store(self, index: PrefixIndex, rows: Rows) -> None:
        """Stores each run: segments in a row, where each is the parent of the next one. A line has
        few runs, and the segments of a run are stored together, which is faster."""
        segments, halves, parents, tokens, _ = rows
        for begin, end in runs_of(rows):
            parent = parents[begin]
            above = None if parent is None else int(parent, 16)
            own = halves[2 * begin : 2 * end]
            stored = index.store_chain(self.worker, above, own, tokens[begin:end])
            self.orphans += end - begin - stored
            if self.in_flight.expects(self.worker):
                for segment in segments[begin : begin + stored]:
                    self.in_flight.confirm(self.worker, int(segment, 16))

    def _store_tiers(self, index: PrefixIndex, event: StoringEvent) -> None:
        """A slower tier also has what is above a segment, or the device has it: lookups find both
        under the same slot."""
        tiers = (event.host_removed, event.host), (event.shared_removed, event.shared)
        for slot, (removed, stored) in zip(self._tiers, tiers, strict=True):
            if slot is None:
                self.orphans += len(stored)
                continue
            for segment in removed:
                index.remove(slot, int(segment, 16))
            for row in stored:
                above = None if row.parent is None else int(row.parent, 16)
                if above is not None:
                    index.extend(slot, above)
                if not index.store(slot, above, int(row.segment, 16), row.tokens):
                    self.orphans += 1


LONGEST_LINE_BYTES = 64 * 1024 * 1024
_RECONNECT_S = 0.5
_SYNCS_TO_PUBLISH = 3
_RECONNECT_UNSUPPORTED_S = 30.0
# Engines send a line at least every 20 s, if only to show that they are alive.
_SILENCE_S = 60.0
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=_SILENCE_S)


class EventSubscribers:
    """A subscriber for each worker."""

    def __init__(self, session: aiohttp.ClientSession, models: Models, metrics: Metrics) -> None:
        self._session = session
        self._models = models
        self._workers = models.workers
        self._metrics = metrics
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._tried: dict[Worker, asyncio.Event] = {}
        self._reporting: set[Worker] = set()
        self._complete: set[Worker] = set()
        self._unpublished: dict[Worker, int] = {}
        self._workers.on_leave.append(self._restart)
        models.on_move.append(self._restart)

    def sync(self) -> None:
        """Subscribes to workers that have joined, and unsubscribes from those that have left or
        have drained: an engine without subscribers may end."""
        workers = {each for each in self._workers.all if each.in_flight or not each.draining}
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
        for worker in self._workers.ready:
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
        return [worker for worker in self._workers.ready if worker not in self._complete]

    def _restart(self, worker: Worker) -> None:
        """Ends a subscription, because the router has forgotten what the worker holds. `sync`
        begins another, which starts with a snapshot."""
        worker.publish(prefixes=False)
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
            self._models.router_of(worker).capacity_changed()
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
                worker.publish(prefixes=False)
                self._complete.add(worker)
                return _RECONNECT_UNSUPPORTED_S
            prefixes = self._models.router_of(worker).prefixes
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
        workers = self._workers
        before = workers.slots_of(worker)
        has_host = Tier.HOST in (event.publishes or ())
        workers.set_tiers(worker, has_host=has_host, machine=event.machine)
        for slot in {*before}.difference(workers.slots_of(worker)):
            self._models.router_of(worker).prefixes.forget_worker(slot)
        return worker.host_slot, worker.shared_slot

    def _note(self, worker: Worker, event: Event, reader: PrefixEventReader, now_s: float) -> None:
        router = self._models.router_of(worker)
        if event.complete and router.prefixes.written is not None:
            self._complete.add(worker)
        if event.publishes is not None:
            worker.publish(prefixes=PREFIXES in event.publishes)
        if not event.alive:
            worker.heard(now_s)
            router.attempts.confirm(worker)
        self._metrics.prefix_events.counts[(worker.id,)] += 1
        for fault, count in ((Fault.ORPHAN, reader.orphans), (Fault.REPEATED, reader.repeated)):
            if count:
                self._metrics.prefix_event_faults.counts[worker.id, str(fault)] += count
        reader.orphans = reader.repeated = 0
        caches_off = (event.caches_off or []) if event.snapshot else event.caches_off
        worker.note_faults(caches_off, event.degraded if event.snapshot else None)
        worker.note_shares(event.load_share, event.shared_share)
        if event.load is not None:
            worker.apply_load(event.load, now_s)
            self._reporting.add(worker)
            router.load_reported(worker)


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
