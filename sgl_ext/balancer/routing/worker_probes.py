"""Probes of the workers: which of them are ready, hang, or work again."""

import asyncio
import logging
import os
import time
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

import aiohttp

from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.balancer.routing.workers import Workers
from sgl_ext.settings.reloading import SETTINGS_HEADER
from sgl_ext.supervision import Failed, supervise

log = logging.getLogger(__name__)

_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=10)
# So many probes in a row that an engine accepted and left without an answer show that it hangs.
SILENT_PROBES = 3
_GENERATE_TIMEOUT = aiohttp.ClientTimeout(total=30)


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
            status, number, cause = await self._ready(worker)
        except TimeoutError:
            status, cause = None, f"no answer for {_PROBE_TIMEOUT.total:g} s"
            worker.silent_probes += 1
        else:
            worker.silent_probes = 0
            worker.settings_number = number
        worker.is_reachable = status is not None
        self.workers.mark(worker, ready=status == HTTPStatus.OK, cause=cause)
        if status is not None:
            self.workers.note_secret(worker, refused=status == HTTPStatus.UNAUTHORIZED)
        # It says itself that it has been stopped, or it says nothing.
        if status == HTTPStatus.GATEWAY_TIMEOUT or worker.silent_probes >= SILENT_PROBES:
            self._set_hung(worker, True)

    async def _try_breaker(self, worker: Worker) -> None:
        took_requests = worker.breaker.takes_requests
        if await self._generates(worker):
            worker.breaker.succeeded()
        else:
            worker.breaker.trial_failed(time.monotonic())
        if took_requests is not worker.breaker.takes_requests:
            state = "gets no requests, it keeps failing" if took_requests else "works again"
            log.warning("engine %s", state, extra={"engine": worker.id})

    def _set_hung(self, worker: Worker, is_hung: bool) -> None:
        if is_hung is not worker.is_hung:
            state = "hangs" if is_hung else "works again"
            log.warning("engine %s", state, extra={"engine": worker.id})
        worker.is_hung = is_hung
        worker.silent_probes = 0
        if is_hung:
            self.workers.mark(worker, ready=False, cause="it hangs")
            # Those that a failed abandonment left are abandoned after the next probe.
            for attempt in tuple(worker.attempts):
                attempt.abandon("the engine hangs")

    async def _generates(self, worker: Worker) -> bool:
        try:
            status = await self._status(f"{worker.url}/health_generate", _GENERATE_TIMEOUT)
        except TimeoutError:
            return False
        # One that refuses the secret does not hang, and the next probe finds the reason.
        return status in (HTTPStatus.OK, HTTPStatus.UNAUTHORIZED)

    async def _ready(self, worker: Worker) -> tuple[int | None, int | None, str]:
        """The status of the answer, the version of reloaded settings that it states, and the status
        or the failure in words. As `_head`."""
        head, cause = await self._head(f"{worker.url}/ready", _PROBE_TIMEOUT)
        if head is None:
            return None, None, cause
        number = head.headers.get(SETTINGS_HEADER, "")
        return head.status, int(number) if number.isdecimal() else None, f"status {head.status}"

    async def _status(self, url: str, limit: aiohttp.ClientTimeout) -> int | None:
        """The status of the answer. As `_head`."""
        head, _ = await self._head(url, limit)
        return None if head is None else head.status

    async def _head(
        self, url: str, limit: aiohttp.ClientTimeout
    ) -> tuple[aiohttp.ClientResponse | None, str]:
        """An answer, or why the connection is refused or breaks. Raises TimeoutError if nothing
        comes in time."""
        try:
            async with self.session.get(url, timeout=limit) as response:
                return response, ""
        except TimeoutError:  # some of aiohttp's are a ClientError, too
            raise
        except aiohttp.ClientError as error:
            number = getattr(error, "errno", None)
            return None, os.strerror(number) if number else str(error) or type(error).__name__
