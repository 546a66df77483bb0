"""Sends a session's prompt to a second worker ahead, before its own is too busy for the next turn.

The same body goes to that worker's `/v1/prefill`, which responds at once and computes the prompt
while the worker is idle. No client waits for it, and if it fails only the head start is lost.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
from cachetools import TTLCache

from scheduler.placement import choose_standby, is_strained
from sgl_ext.balancer.http.request_head import RequestHead
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.worker import Attempt, Worker
from sgl_ext.protocols.registry import of_path
from sgl_ext.protocols.request_ids import HEADER
from sgl_ext.protocols.routes import PREFILL
from sgl_ext.supervision import Guard
from sgl_ext.wire.headers import PURPOSE_HEADER, conversation_line, header_line, rank_line

# How long a session is not considered again.
REPEAT_S = 30.0
_MOST_SESSIONS = 10_000
# Of the bodies that are being sent. They are copies.
_MOST_SENDING_BYTES = 32 << 20
_NAMED_LINES = header_line(HEADER, b"%b") + header_line(PURPOSE_HEADER, b"standby")
_TIMEOUT = aiohttp.ClientTimeout(total=30)


@dataclass(eq=False)
class StandbyPrefill:
    """Considers the sessions whose requests are placed."""

    router: Router
    metrics: Metrics
    session: aiohttp.ClientSession

    def __post_init__(self) -> None:
        self._guard = Guard("standby_prefill", self.metrics.background_failed)
        self._sending: set[asyncio.Task[None]] = set()
        self._sending_bytes = 0
        self._sent: TTLCache[int, None] = TTLCache(_MOST_SESSIONS, REPEAT_S)
        add_table = self.metrics.tables.add
        add_table("standby_sessions", self._sent.__len__, lambda: _MOST_SESSIONS)
        add_table(
            "standby_bodies", lambda: self._sending_bytes, lambda: _MOST_SENDING_BYTES, "bytes"
        )

    def consider(
        self, attempt: Attempt, head: RequestHead, body: bytes | bytearray, request_id: str
    ) -> None:
        """Sends a request's prompt to a standby if its session, placed at home, needs one. There
        are several workers."""
        routing, home = attempt.routing, attempt.worker
        if routing.session is None or routing.is_final:
            return
        if attempt.decoder is not None:  # such an engine prefills nothing ahead
            return
        protocol = of_path(head.path)
        if not protocol.name:
            return
        pending_tokens = home.total_pending_tokens(time.monotonic()) - attempt.uncached_tokens
        if not is_strained(routing.prompt_tokens, max(pending_tokens, 0), _running(home)):
            return
        if routing.session in self._sent:
            return
        if self._sending_bytes + len(body) > _MOST_SENDING_BYTES:
            self.metrics.standby_prefills.counts[("too_many",)] += 1
            return
        others = [(w, view) for w, view in self.router.views(routing.chain) if w is not home]
        held_tokens = {view.name: view.held_tokens for _, view in others}
        idle = [v.name for w, v in others if not v.pending_tokens and not _in_flight(w)]
        standby = choose_standby(routing.prompt_tokens, routing.prefix, held_tokens, idle)
        if standby is None:
            return
        self._sent[routing.session] = None
        worker = next(w for w, _ in others if w.id == standby)
        url = f"{worker.url}{PREFILL}?wait=false&protocol={protocol.name}"
        named = _NAMED_LINES % request_id.encode() + rank_line(worker.rank)
        named += conversation_line(routing.agent)
        lines = head.upstream_lines + named
        task = asyncio.create_task(self._send(url, lines, bytes(body)))
        self._sending.add(task)
        self._sending_bytes += (size := len(body))
        task.add_done_callback(lambda task: self._sent_to_end(task, size))

    def _sent_to_end(self, task: asyncio.Task[None], size: int) -> None:
        self._sending.discard(task)
        self._sending_bytes -= size

    async def _send(self, url: str, lines: bytes, body: bytes) -> None:
        headers = dict(line.split(": ", 1) for line in lines.decode("latin-1").split("\r\n")[:-1])
        result = "failed"
        with self._guard, suppress(aiohttp.ClientError, TimeoutError):
            async with self.session.post(
                url, data=body, headers=headers, timeout=_TIMEOUT
            ) as answer:
                result = "accepted" if answer.status == HTTPStatus.ACCEPTED else "rejected"
        self.metrics.standby_prefills.counts[(result,)] += 1


def _in_flight(worker: Worker) -> int:
    return worker.in_flight + worker.peer_load.in_flight


def _running(worker: Worker) -> float | None:
    """The share of a worker's request slots in use, 1 if it queues, None if unknown."""
    capacity = worker.capacity
    if capacity is None:
        return None
    return 1.0 if capacity.queues(worker.running) else _in_flight(worker) / capacity.limit
