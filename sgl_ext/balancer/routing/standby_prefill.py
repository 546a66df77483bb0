"""Has a session's prompt computed on a second worker, before its own is too busy for the next turn.

The same body goes to that worker's `/v1/prefill`, which answers at once and computes it while it
has nothing else to do. Nobody waits for it, and if it fails only a chance is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus

from cachetools import TTLCache

from scheduler.standby import WorkerLoad, choose_standby, is_strained
from sgl_ext.balancer.http.request_head import RequestHead
from sgl_ext.balancer.http.response_head import ResponseHead
from sgl_ext.balancer.http.upstream import ConnectionPool, UpstreamConnection
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.attempt import Attempt
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.workers import Worker
from sgl_ext.protocols.registry import of_path
from sgl_ext.protocols.routes import PREFILL

# A session is looked at again after so long; then its prompt is another one.
AGAIN_S = 30.0
_MOST_SESSIONS = 10_000


class StandbyPrefill:
    """Looks after the sessions whose requests are placed. `pool` gives a worker's connections."""

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
        self._warmed: TTLCache[int, None] = TTLCache(_MOST_SESSIONS, AGAIN_S, clock)

    def look(self, attempt: Attempt, head: RequestHead, body: bytes | bytearray) -> None:
        """A request of a known session, with this head and body, is on its flight home."""
        routing = attempt.routing
        protocol = of_path(head.path)
        if not protocol.name or routing.session is None or routing.is_final:
            return
        if not is_strained(routing.prompt_tokens, self._standing(attempt.worker, 0, attempt)):
            return
        if routing.session in self._warmed:
            return
        spare = self._spare(attempt)
        if spare is None:
            return
        self._warmed[routing.session] = None
        target = b"%b?wait=false&protocol=%b" % (PREFILL.encode(), protocol.name.encode())
        _Errand(self._pool(spare), target, head.upstream_lines, bytes(body), self._metrics).go()

    def _spare(self, attempt: Attempt) -> Worker | None:
        routing, views = attempt.routing, self._router.views(attempt.routing.chain)
        standings = {
            worker: self._standing(worker, view.held_tokens, attempt) for worker, view in views
        }
        home = standings.pop(attempt.worker, None)
        if home is None:
            return None
        name = choose_standby(routing.prompt_tokens, routing.prefix, home, list(standings.values()))
        return next((worker for worker in standings if worker.url == name), None)

    def _standing(self, worker: Worker, held_tokens: int, attempt: Attempt) -> WorkerLoad:
        there = worker.in_flight + worker.peer_load.in_flight
        pending = worker.total_pending_tokens(self._clock())
        if worker is attempt.worker:
            pending = max(pending - attempt.uncached_tokens, 0)
        capacity = worker.capacity
        running = None
        if capacity is not None:
            running = 1.0 if capacity.queues else there / capacity.limit
        return WorkerLoad(worker.url, held_tokens, pending, running, there == 0 and not pending)


class _Errand:
    """One request for the balancer itself: only its status is looked at."""

    def __init__(
        self, pool: ConnectionPool, target: bytes, lines: bytes, body: bytes, metrics: Metrics
    ) -> None:
        self._pool = pool
        self._head = pool.request_line("POST", target) + lines
        self._head += b"content-length: %d\r\n\r\n" % len(body)
        self._body = body
        self._metrics = metrics
        self._status = 0

    def go(self) -> None:
        """Sends it over a connection that was kept, or over a new one."""
        kept = self._pool.take()
        if kept is None:
            self._pool.connect(self)
        else:
            self.connected(kept)

    def connected(self, connection: UpstreamConnection) -> None:
        connection.send(self, self._head, self._body, "POST")

    def connect_failed(self, reason: str) -> None:
        self._count("failed")

    def response_head(self, head: ResponseHead) -> None:
        self._status = head.status

    def response_data(self, data: bytes) -> None:
        """What it says besides is of no use here."""

    def response_end(self) -> None:
        self._count("taken" if self._status == HTTPStatus.ACCEPTED else "refused")

    def upstream_lost(self, reason: str) -> None:
        self._count("failed")

    def _count(self, result: str) -> None:
        self._metrics.standby_prefills.counts[(result,)] += 1
