"""Probes that find out which workers are ready, and whether their schedulers work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import aiohttp

from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.balancer.routing.workers import Workers

log = logging.getLogger(__name__)

_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=10)
_GENERATE_TIMEOUT = aiohttp.ClientTimeout(total=30)


class WorkerProbes:
    """Probes every worker once an interval, each in a task of its own."""

    def __init__(
        self,
        workers: Workers,
        session: aiohttp.ClientSession,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._session = session
        self._interval_s = interval_s
        self._clock = clock

    async def probe_all(self) -> None:
        """Probes every worker once."""
        await asyncio.gather(*(self.probe(worker) for worker in self._workers.all))

    async def run(self) -> None:
        """Probes until cancelled. A slow worker delays no other; a failed probe is logged."""
        running: dict[Worker, asyncio.Task[None]] = {}
        try:
            while True:
                running = {worker: task for worker, task in running.items() if not task.done()}
                for worker in self._workers.all:
                    if worker not in running:
                        running[worker] = asyncio.create_task(self._probe_safely(worker))
                await asyncio.sleep(self._interval_s)
        finally:
            for task in running.values():
                task.cancel()

    async def probe(self, worker: Worker) -> None:
        """Asks a worker if it is ready. A worker that has stalled, or whose requests keep
        failing, must also generate a token."""
        if worker.is_hung or worker.has_stalled(self._clock()):
            await self._probe_scheduler(worker)
        elif worker.ready and worker.breaker.wants_trial(self._clock()):
            await self._try_breaker(worker)
        if worker.is_hung:
            return
        ready = await self._is_ok(f"{worker.url}/ready", _PROBE_TIMEOUT)
        self._workers.mark(worker, ready=ready)

    async def _probe_safely(self, worker: Worker) -> None:
        try:
            await self.probe(worker)
        except Exception:
            log.exception("%s: the probe failed", worker.url)

    async def _try_breaker(self, worker: Worker) -> None:
        took_requests = worker.breaker.takes_requests
        if await self._generates(worker):
            worker.breaker.succeeded()
        else:
            worker.breaker.trial_failed(self._clock())
        if took_requests is not worker.breaker.takes_requests:
            state = "gets no requests, it keeps failing" if took_requests else "works again"
            log.warning("%s %s", worker.url, state)

    async def _probe_scheduler(self, worker: Worker) -> None:
        generates = await self._generates(worker)
        worker.last_heard_s = self._clock()
        if generates is not worker.is_hung:
            return
        worker.is_hung = not generates
        log.warning("%s %s", worker.url, "hangs" if worker.is_hung else "works again")
        if worker.is_hung:
            self._workers.mark(worker, ready=False)
            for attempt in tuple(worker.attempts):
                attempt.abandon("the engine hangs")

    async def _generates(self, worker: Worker) -> bool:
        return await self._is_ok(f"{worker.url}/health_generate", _GENERATE_TIMEOUT)

    async def _is_ok(self, url: str, limit: aiohttp.ClientTimeout) -> bool:
        try:
            async with self._session.get(url, timeout=limit) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False
