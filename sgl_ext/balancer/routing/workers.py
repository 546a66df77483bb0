"""The engines behind the balancer: who may be sent a request, and who carries how much."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import aiohttp

from scheduler.breaker import Breaker, State
from scheduler.capacity import Capacity, InFlight
from scheduler.decaying_sum import DecayingSum
from scheduler.placement import RECENT_S
from sgl_ext.balancer.metrics.registry import Metrics, WorkerSeries
from sgl_ext.pin_mirror import PinMirror

log = logging.getLogger(__name__)

PROBE_INTERVAL_S = 1.0
SLOW_START_S = 20.0
# An engine that works says so several times a second; one that says nothing for so long is asked.
STALL_S = 60.0
SETTLED_S = 0.5
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=10)
_GENERATE_TIMEOUT = aiohttp.ClientTimeout(total=30)


class Load(NamedTuple):
    """What requests make of a worker: how many run, how many of them decode, what is to prefill."""

    in_flight: int = 0
    decoding: int = 0
    pending_tokens: int = 0


class Worker:
    """One engine. It starts out not ready; a probe finds it.

    slot: its bit in the prefix index; another worker may have it once this one has left.
    pending_tokens: what it still has to prefill of the requests sent to it from here.
    heard_s: when its scheduler last said something, or was first given something to do.
    hung: it takes connections, and its scheduler does nothing.
    flights: the requests that run there.
    running: those of them that its scheduler runs, and their tokens, by priority.
    capacity: what it can run at once and what queues there; None if it does not report it.
    elsewhere: the load that other balancers of this node put on it.
    recent: what it was given to prefill in the last seconds, done or not.
    pins: the prefixes it keeps for their clients.
    """

    def __init__(self, url: str, slot: int) -> None:
        self.url = url.rstrip("/")
        self.slot = slot
        self.ready = False
        self.draining = False
        self.breaker = Breaker()
        self.in_flight = 0
        self.decoding = 0
        self.pending_tokens = 0
        self.running = InFlight()
        self.capacity: Capacity | None = None
        self.peer_load = Load()
        self._correction = _Correction()
        self.recent_prefill = DecayingSum(RECENT_S)
        self.pins = PinMirror()
        self.publishes = False
        self.is_hung = False
        self.last_heard_s = 0.0
        self.attempts: set[Any] = set()
        self.recovered_s: float | None = None
        self.pinned_tokens = 0

    @property
    def is_available(self) -> bool:
        """Whether a request may be sent to it."""
        return self.ready and not self.draining and self.breaker.takes_requests

    def has_stalled(self, now_s: float) -> bool:
        """Whether it has something to do and has not shown for long that it does it."""
        return self.publishes and self.in_flight > 0 and now_s - self.last_heard_s > STALL_S

    def warmth(self, now_s: float) -> float:
        """From 0 to 1 over the first seconds after it came back; 1 if it always was there."""
        if self.recovered_s is None:
            return 1.0
        return min((now_s - self.recovered_s) / SLOW_START_S, 1.0)

    def apply_load(self, load: dict[str, int], now_s: float) -> None:
        """The engine's own account of its load: what differs from ours is corrected by it."""
        self.pinned_tokens = load.get("pinned_tokens", 0)
        ours = self.pending_tokens + self.peer_load.pending_tokens
        differs = load.get("pending_tokens", 0) - ours
        self._correction = _Correction(differs, self._correction.tokens, now_s)
        tokens, max_running = load.get("capacity_tokens", 0), load.get("max_running", 0)
        known = tokens > 0 and max_running > 0
        self.capacity = Capacity(tokens, max_running, load.get("queued", 0)) if known else None

    def clear_load(self) -> None:
        """It reports nothing any more: what it said of its load counts no longer."""
        self.pinned_tokens = 0
        self.capacity = None
        self._correction = _Correction()

    def total_pending_tokens(self, now_s: float) -> int:
        """What it still has to prefill, by our account and its own."""
        ours = self.pending_tokens + self.peer_load.pending_tokens
        return max(ours + self._correction.at(now_s), 0)

    @property
    def load(self) -> Load:
        """The load put on it from here."""
        return Load(self.in_flight, self.decoding, self.pending_tokens)


class _Correction(NamedTuple):
    """By how much an engine's account of its pending tokens differs from ours.

    A report may be older than what we have sent or seen finish since, so a new one counts
    only as far as the one before it agrees, until it has stood for a moment.
    """

    tokens: int = 0
    before: int = 0
    reported_s: float = 0.0

    def at(self, now_s: float) -> int:
        if now_s - self.reported_s >= SETTLED_S:
            return self.tokens
        if (self.tokens < 0) is not (self.before < 0):
            return 0
        return min(self.tokens, self.before, key=abs)


class Workers:
    """All engines, probed once a second. A refused connection counts at once, without a probe."""

    def __init__(
        self,
        urls: Iterable[str],
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.all: list[Worker] = []
        self.changed_s = 0.0
        self._clock = clock
        self._on_leave: list[Callable[[Worker], None]] = []
        metrics.watch_workers(self._series)
        for url in urls:
            self.add(url).recovered_s = None
        self.changed_s = 0.0

    def _series(self) -> dict[str, WorkerSeries]:
        return {
            worker.url: WorkerSeries(
                ready=worker.ready,
                draining=worker.draining,
                breaker_open=worker.breaker.state is State.OPEN,
                in_flight=worker.in_flight,
                pending_tokens=worker.total_pending_tokens(self._clock()),
                pinned_tokens=worker.pinned_tokens,
            )
            for worker in self.all
        }

    @property
    def ready(self) -> list[Worker]:
        """Those that take requests: one that drains does not, however well it is."""
        return [worker for worker in self.all if worker.ready and not worker.draining]

    def find(self, url: str) -> Worker | None:
        return next((worker for worker in self.all if worker.url == url.rstrip("/")), None)

    def add(self, url: str) -> Worker:
        """Takes a worker in, or back if it is draining."""
        worker = self.find(url)
        if worker is None:
            taken = {other.slot for other in self.all}
            slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
            worker = Worker(url, slot)
            worker.recovered_s = self._clock()
            self.all.append(worker)
        worker.draining = False
        self.changed_s = self._clock()
        return worker

    def drain(self, worker: Worker) -> None:
        """Sends nothing new to a worker; once what runs there has ended, it is let go."""
        worker.draining = True
        self.changed_s = self._clock()

    def adopt(self, changed_s: float, table: dict[str, bool]) -> None:
        """Takes over a table of workers, URL and whether it drains, if it is newer than ours.

        `changed_s` is when somebody last changed it, by the clock of this machine.
        """
        if changed_s <= self.changed_s:
            return
        for url, draining in table.items():
            self.add(url).draining = draining
        for worker in self.all:
            worker.draining = worker.draining or worker.url not in table
        self.changed_s = changed_s

    def remove_drained(self) -> None:
        """Takes out the workers that were to drain and have. Run it now and then."""
        for worker in [w for w in self.all if w.draining and not w.in_flight]:
            self.all.remove(worker)
            self._left(worker)

    def _left(self, worker: Worker) -> None:
        for leave in self._on_leave:
            leave(worker)

    def on_leave(self, action: Callable[[Worker], None]) -> None:
        """Has `action` called with every worker that leaves or is found to be gone."""
        self._on_leave.append(action)

    def mark(self, worker: Worker, *, ready: bool) -> None:
        """Records what a probe or a request found out about a worker."""
        if ready and not worker.ready:
            # One that was there when we came has its cache; one that comes later must warm up.
            worker.recovered_s = self._clock() if worker.recovered_s is not None else None
            worker.breaker.succeeded()
        elif worker.ready and not ready:
            worker.recovered_s = self._clock()
            self._left(worker)
        worker.ready = ready

    async def probe(self, session: aiohttp.ClientSession) -> None:
        """Asks every worker once whether it is ready."""
        await asyncio.gather(*(self.probe_one(session, worker) for worker in self.all))

    async def probe_forever(self, session: aiohttp.ClientSession) -> None:
        """Probes until cancelled. A worker that is slow to answer keeps no other one waiting;
        a probe that breaks is logged, and the next one comes."""
        running: dict[Worker, asyncio.Task[None]] = {}
        try:
            while True:
                running = {worker: task for worker, task in running.items() if not task.done()}
                for worker in self.all:
                    if worker not in running:
                        running[worker] = asyncio.create_task(self._probe_well(session, worker))
                await asyncio.sleep(PROBE_INTERVAL_S)
        finally:
            for task in running.values():
                task.cancel()

    async def _probe_well(self, session: aiohttp.ClientSession, worker: Worker) -> None:
        try:
            await self.probe_one(session, worker)
        except Exception:
            log.exception("a probe broke")

    async def probe_one(self, session: aiohttp.ClientSession, worker: Worker) -> None:
        """Asks one worker whether it is ready, and one that has stalled, or that requests keep
        failing at, whether it generates."""
        if worker.is_hung or worker.has_stalled(self._clock()):
            await self._probe_scheduler(session, worker)
        elif worker.ready and worker.breaker.wants_trial(self._clock()):
            await self._try(session, worker)
        if worker.is_hung:
            return
        try:
            async with session.get(f"{worker.url}/ready", timeout=_PROBE_TIMEOUT) as answer:
                self.mark(worker, ready=answer.status == 200)
        except (aiohttp.ClientError, TimeoutError):
            self.mark(worker, ready=False)

    async def _try(self, session: aiohttp.ClientSession, worker: Worker) -> None:
        """The trial of a breaker."""
        took_requests = worker.breaker.takes_requests
        if await _generates(session, worker):
            worker.breaker.succeeded()
        else:
            worker.breaker.trial_failed(self._clock())
        if took_requests is not worker.breaker.takes_requests:
            log.warning("%s %s", worker.url, "is shut out" if took_requests else "works again")

    async def _probe_scheduler(self, session: aiohttp.ClientSession, worker: Worker) -> None:
        generates = await _generates(session, worker)
        worker.last_heard_s = self._clock()
        if generates is not worker.is_hung:
            return
        worker.is_hung = not generates
        log.warning("%s %s", worker.url, "hangs" if worker.is_hung else "works again")
        if worker.is_hung:
            self.mark(worker, ready=False)
            for attempt in tuple(worker.attempts):
                attempt.worker_failed("the engine hangs")


async def _generates(session: aiohttp.ClientSession, worker: Worker) -> bool:
    """Whether its scheduler shows within the timeout that it works."""
    url = f"{worker.url}/health_generate"
    try:
        async with session.get(url, timeout=_GENERATE_TIMEOUT) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
