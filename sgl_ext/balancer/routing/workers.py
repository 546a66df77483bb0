"""The table of workers: which engines there are, which have left, and which a probe finds ready."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

import aiohttp
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.breaker import State
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.supervision import Failed, supervise

log = logging.getLogger(__name__)

_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=10)
# So many probes in a row that an engine accepted and left without an answer show that it hangs.
SILENT_PROBES = 3
_GENERATE_TIMEOUT = aiohttp.ClientTimeout(total=30)
# Each metric of a worker: its help text and its value at a time.
_GAUGES: dict[str, tuple[str, Callable[[Worker, float], int]]] = {
    "ready": ("Whether the worker is ready for requests.", lambda worker, now_s: worker.ready),
    "draining": (
        "Whether the worker drains: it gets no new requests and leaves after its last one.",
        lambda worker, now_s: worker.draining,
    ),
    "breaker_open": (
        "Whether the worker's circuit breaker is open.",
        lambda worker, now_s: worker.breaker.state is State.OPEN,
    ),
    "in_flight": (
        "Requests that the worker is answering for this balancer.",
        lambda worker, now_s: worker.in_flight,
    ),
    "pending_tokens": (
        "Estimate of the prompt tokens that the worker still has to compute.",
        Worker.total_pending_tokens,
    ),
    "pinned_tokens": (
        "Tokens of the prefixes that are pinned in the worker's cache.",
        lambda worker, now_s: worker.pinned_tokens,
    ),
}


class Workers(Collector):
    """All engines, and their metrics.

    changed_s: when the table last changed, by the clock of this machine.
    on_leave: called with each worker that is removed or no longer ready.
    """

    def __init__(
        self, urls: Iterable[str], metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.all: list[Worker] = []
        self._clock = clock
        self.on_leave: list[Callable[[Worker], None]] = []
        metrics.registry.register(self)
        for url in urls:
            self.add(url).recovered_s = None
        self.changed_s = 0.0

    def collect(self) -> Iterable[Metric]:
        now_s = self._clock()
        for name, (help_text, value) in _GAUGES.items():
            family = GaugeMetricFamily(f"sgl_ext_worker_{name}", help_text, labels=["worker"])
            for worker in self.all:
                family.add_metric([worker.url], value(worker, now_s))
            yield family

    @property
    def ready(self) -> list[Worker]:
        """The workers that are ready and do not drain."""
        return [worker for worker in self.all if worker.ready and not worker.draining]

    def find(self, url: str) -> Worker | None:
        """The worker with this URL."""
        return next((worker for worker in self.all if worker.url == url.rstrip("/")), None)

    def add(self, url: str) -> Worker:
        """Adds a worker, or takes a draining one back."""
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
        """Stops sending requests to a worker. It is removed after its last request has ended."""
        worker.draining = True
        self.changed_s = self._clock()

    def adopt(self, changed_s: float, table: dict[str, bool]) -> None:
        """Takes over a peer's table, from URL to whether it drains, if it is newer than ours."""
        if changed_s <= self.changed_s:
            return
        for url, draining in table.items():
            self.add(url).draining = draining
        for worker in self.all:
            worker.draining = worker.draining or worker.url not in table
        self.changed_s = changed_s

    def remove_drained(self) -> None:
        """Removes the draining workers whose requests have ended. Call it periodically."""
        for worker in [w for w in self.all if w.draining and not w.in_flight]:
            self.all.remove(worker)
            self._left(worker)

    def mark(self, worker: Worker, *, ready: bool) -> None:
        """Records whether a worker is ready, as a probe or a request found."""
        if ready and not worker.ready:
            # A worker that was there from the start has a warm cache; one that comes later has not.
            worker.recovered_s = self._clock() if worker.recovered_s is not None else None
            worker.breaker.succeeded()
        elif worker.ready and not ready:
            worker.recovered_s = self._clock()
            self._left(worker)
        worker.ready = ready

    def _left(self, worker: Worker) -> None:
        for action in self.on_leave:
            action(worker)


@dataclass(frozen=True, eq=False)
class WorkerProbes:
    """Probes every worker once an interval, each in a task of its own: none delays another.

    failed: called with the task's name when a probe raises; the next one is made all the same.
    """

    workers: Workers
    session: aiohttp.ClientSession
    failed: Failed
    interval_s: float = 1.0

    async def run(self) -> None:
        """Probes until cancelled."""
        probing: dict[Worker, asyncio.Task[None]] = {}
        try:
            while True:
                for worker in probing.keys() - self.workers.all:
                    probing.pop(worker).cancel()
                for worker in self.workers.all:
                    if worker not in probing:
                        probe = partial(self.probe, worker)
                        probing[worker] = asyncio.create_task(
                            supervise("probe", self.failed, probe, self.interval_s)
                        )
                await asyncio.sleep(self.interval_s)
        finally:
            for task in probing.values():
                task.cancel()

    async def probe(self, worker: Worker) -> None:
        """Asks a worker if it is ready. A worker that has stalled, or whose requests keep
        failing, must also generate a token."""
        if worker.is_hung or worker.has_stalled(time.monotonic()):
            generates = await self._generates(worker)
            worker.last_heard_s = time.monotonic()
            self._set_hung(worker, not generates)
        elif worker.ready and worker.breaker.wants_trial(time.monotonic()):
            await self._try_breaker(worker)
        if worker.is_hung:
            return
        try:
            status = await self._status(f"{worker.url}/ready", _PROBE_TIMEOUT)
        except TimeoutError:
            status = None
            worker.silent_probes += 1
        else:
            worker.silent_probes = 0
        self.workers.mark(worker, ready=status == HTTPStatus.OK)
        if worker.silent_probes >= SILENT_PROBES:
            self._set_hung(worker, True)

    async def _try_breaker(self, worker: Worker) -> None:
        took_requests = worker.breaker.takes_requests
        if await self._generates(worker):
            worker.breaker.succeeded()
        else:
            worker.breaker.trial_failed(time.monotonic())
        if took_requests is not worker.breaker.takes_requests:
            state = "gets no requests, it keeps failing" if took_requests else "works again"
            log.warning("%s %s", worker.url, state)

    def _set_hung(self, worker: Worker, is_hung: bool) -> None:
        if is_hung is not worker.is_hung:
            log.warning("%s %s", worker.url, "hangs" if is_hung else "works again")
        worker.is_hung = is_hung
        worker.silent_probes = 0
        if is_hung:
            self.workers.mark(worker, ready=False)
            # Those that a failed abandonment left are abandoned after the next probe.
            for attempt in tuple(worker.attempts):
                attempt.abandon("the engine hangs")

    async def _generates(self, worker: Worker) -> bool:
        try:
            status = await self._status(f"{worker.url}/health_generate", _GENERATE_TIMEOUT)
        except TimeoutError:
            return False
        return status == HTTPStatus.OK

    async def _status(self, url: str, limit: aiohttp.ClientTimeout) -> int | None:
        """The status of an answer, None if the connection is refused or breaks. Raises TimeoutError
        if nothing comes in time."""
        try:
            async with self.session.get(url, timeout=limit) as response:
                return response.status
        except TimeoutError:  # some of aiohttp's are a ClientError, too
            raise
        except aiohttp.ClientError:
            return None
