"""Sends a session's prompt to a second worker ahead, before its own is too busy for the next turn.

The same body goes to that worker's `/v1/prefill`, which responds at once and computes the prompt
while the worker is idle. No client waits for it, and if it fails only the head start is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus

import aiohttp
from cachetools import TTLCache

from scheduler.standby import WorkerLoad, choose_standby, is_strained
from sgl_ext.balancer.http.request_head import RequestHead
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.attempts import Attempt
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.protocols.registry import of_path
from sgl_ext.protocols.routes import PREFILL

# How long a session is not considered again.
REPEAT_S = 30.0
_MOST_SESSIONS = 10_000
_TIMEOUT = aiohttp.ClientTimeout(total=30)


class StandbyPrefill:
    """Considers the sessions whose requests are placed."""

    def __init__(
        self,
        router: Router,
        metrics: Metrics,
        session: aiohttp.ClientSession,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._metrics = metrics
        self._session = session
        self._clock = clock
        self._sending: set[asyncio.Task[None]] = set()
        self._sent: TTLCache[int, None] = TTLCache(_MOST_SESSIONS, REPEAT_S, clock)

    def consider(self, attempt: Attempt, head: RequestHead, body: bytes | bytearray) -> None:
        """Sends a request's prompt to a standby if its session, placed at home, needs one."""
        routing = attempt.routing
        protocol = of_path(head.path)
        if not protocol.name or routing.session is None or routing.is_final:
            return
        if not is_strained(routing.prompt_tokens, self._load_of(attempt.worker, 0, attempt)):
            return
        if routing.session in self._sent:
            return
        standby = self._choose(attempt)
        if standby is None:
            return
        self._sent[routing.session] = None
        url = f"{standby.url}{PREFILL}?wait=false&protocol={protocol.name}"
        task = asyncio.create_task(self._send(url, head.upstream_lines, bytes(body)))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def _choose(self, attempt: Attempt) -> Worker | None:
        routing = attempt.routing
        loads = {
            worker: self._load_of(worker, view.held_tokens, attempt)
            for worker, view in self._router.views(routing.chain)
            if worker is not attempt.worker
        }
        name = choose_standby(routing.prompt_tokens, routing.prefix, list(loads.values()))
        return next((worker for worker in loads if worker.url == name), None)

    def _load_of(self, worker: Worker, held_tokens: int, attempt: Attempt) -> WorkerLoad:
        in_flight = worker.in_flight + worker.peer_load.in_flight
        pending = worker.total_pending_tokens(self._clock())
        if worker is attempt.worker:
            pending = max(pending - attempt.uncached_tokens, 0)
        capacity, running = worker.capacity, None
        if capacity is not None:
            running = 1.0 if capacity.queues else in_flight / capacity.limit
        is_idle = in_flight == 0 and not pending
        return WorkerLoad(worker.url, held_tokens, pending, running, is_idle)

    async def _send(self, url: str, lines: bytes, body: bytes) -> None:
        headers = dict(line.split(": ", 1) for line in lines.decode("latin-1").split("\r\n")[:-1])
        result = "failed"
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.post(
                url, data=body, headers=headers, timeout=_TIMEOUT
            ) as answer:
                result = "accepted" if answer.status == HTTPStatus.ACCEPTED else "rejected"
        self._metrics.standby_prefills.counts[(result,)] += 1
