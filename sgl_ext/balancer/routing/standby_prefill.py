"""Sends a session's prompt to a second worker ahead, before its own is too busy for the next turn.

The same body goes to that worker's `/v1/prefill`, which responds at once and computes the prompt
while the worker is idle. No client waits for it, and if it fails only the head start is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus

from cachetools import TTLCache

from scheduler.standby import WorkerLoad, choose_standby, is_strained
from sgl_ext.balancer.http.connection_pool import ConnectionPool
from sgl_ext.balancer.http.request_head import RequestHead
from sgl_ext.balancer.http.response_head import ResponseHead
from sgl_ext.balancer.http.upstream import UpstreamConnection
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.attempts import Attempt
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.protocols.registry import of_path
from sgl_ext.protocols.routes import PREFILL

# How long a session is not considered again.
REPEAT_S = 30.0
_MOST_SESSIONS = 10_000


class StandbyPrefill:
    """Considers the sessions whose requests are placed. `pool` returns a worker's connections."""

    def __init__(
        self,
        router: Router,
        metrics: Metrics,
        pool: Callable[[Worker], ConnectionPool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._metrics = metrics
        self._pool = pool
        self._clock = clock
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
        target = b"%b?wait=false&protocol=%b" % (PREFILL.encode(), protocol.name.encode())
        pool = self._pool(standby)
        pool.lease(_PrefillRequest(pool, target, head.upstream_lines, bytes(body), self._metrics))

    def _choose(self, attempt: Attempt) -> Worker | None:
        routing = attempt.routing
        loads = {
            worker: self._load_of(worker, view.held_tokens, attempt)
            for worker, view in self._router.views(routing.chain)
        }
        home = loads.pop(attempt.worker, None)
        if home is None:
            return None
        name = choose_standby(routing.prompt_tokens, routing.prefix, home, list(loads.values()))
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


class _PrefillRequest:
    """A request that the balancer sends for itself: only the status of its response matters."""

    def __init__(
        self, pool: ConnectionPool, target: bytes, lines: bytes, body: bytes, metrics: Metrics
    ) -> None:
        self._head = pool.request_line("POST", target) + lines
        self._head += b"content-length: %d\r\n\r\n" % len(body)
        self._body = body
        self._metrics = metrics
        self._status = 0

    def connected(self, connection: UpstreamConnection) -> None:
        connection.send(self, self._head, self._body, "POST")

    def connect_failed(self, reason: str) -> None:
        self._count("failed")

    def response_head(self, head: ResponseHead) -> None:
        self._status = head.status

    def response_data(self, data: bytes) -> None:
        """The body is not needed."""

    def response_end(self) -> None:
        self._count("accepted" if self._status == HTTPStatus.ACCEPTED else "rejected")

    def upstream_lost(self, reason: str) -> None:
        self._count("failed")

    def _count(self, result: str) -> None:
        self._metrics.standby_prefills.counts[(result,)] += 1
