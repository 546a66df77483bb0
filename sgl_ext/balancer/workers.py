"""The engines behind the balancer: who is ready, and who carries how much."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial

import aiohttp

from scheduler.placement import WorkerLoad, place
from sgl_ext.balancer.metrics import Metrics

log = logging.getLogger(__name__)

PROBE_INTERVAL_S = 1.0
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=10)


class Worker:
    """One engine. It starts out not ready; a probe finds it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.ready = False
        self.in_flight = 0


class Workers:
    """All engines, probed once a second. A refused connection counts at once, without a probe."""

    def __init__(self, urls: Iterable[str], metrics: Metrics) -> None:
        self.all = [Worker(url) for url in urls]
        self._metrics = metrics
        for worker in self.all:
            self.mark(worker, ready=False)
            gauge = metrics.worker_in_flight.labels(worker.url)
            gauge.set_function(partial(getattr, worker, "in_flight"))

    @property
    def ready(self) -> list[Worker]:
        return [worker for worker in self.all if worker.ready]

    def choose(self, prefix: int | None, tried: set[Worker]) -> Worker | None:
        """A ready worker for a prefix, one not tried yet if there is one; None if none is ready."""
        candidates = {worker.url: worker for worker in self.ready}
        fresh = [worker for worker in candidates.values() if worker not in tried]
        loads = [WorkerLoad(w.url, w.in_flight) for w in fresh or candidates.values()]
        name = place(prefix, loads)
        return None if name is None else candidates[name]

    def mark(self, worker: Worker, *, ready: bool) -> None:
        """Records what a probe or a request found out about a worker."""
        worker.ready = ready
        self._metrics.worker_ready.labels(worker.url).set(ready)

    def take(self, worker: Worker) -> None:
        """A request runs at a worker from now on."""
        worker.in_flight += 1

    def release(self, worker: Worker) -> None:
        """A request runs there no longer."""
        worker.in_flight -= 1

    async def probe(self, session: aiohttp.ClientSession) -> None:
        """Asks every worker once whether it is ready."""
        await asyncio.gather(*(self._probe_one(session, worker) for worker in self.all))

    async def probe_forever(self, session: aiohttp.ClientSession) -> None:
        """Probes until cancelled; a probe that breaks is logged, and the next one comes."""
        while True:
            try:
                await self.probe(session)
            except Exception:
                log.exception("a probe broke")
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _probe_one(self, session: aiohttp.ClientSession, worker: Worker) -> None:
        try:
            async with session.get(f"{worker.url}/ready", timeout=_PROBE_TIMEOUT) as answer:
                self.mark(worker, ready=answer.status == 200)
        except (aiohttp.ClientError, TimeoutError):
            self.mark(worker, ready=False)
