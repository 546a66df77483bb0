"""The parts of the balancer that all exchanges and the control plane use."""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp

from scheduler.breaker import RetryBudget
from sgl_ext.balancer.access.authentication import SentSecret
from sgl_ext.balancer.access.rate_limits import RateLimits
from sgl_ext.balancer.cluster.launcher import Launcher
from sgl_ext.balancer.conversations import contexts
from sgl_ext.balancer.conversations.conversation_store import ConversationStore
from sgl_ext.balancer.conversations.expansion import Found, Named
from sgl_ext.balancer.conversations.response_turns import LaneTurns
from sgl_ext.balancer.http.downstream import RawResponse
from sgl_ext.balancer.http.upstream import ConnectionPool
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.relay.large_bodies import LargeBodies
from sgl_ext.balancer.relay.patience import MOST_LEFT, Heartbeats, Resends
from sgl_ext.balancer.relay.reading import (
    BodyReader,
    HintRules,
    Reading,
    ReadPlan,
    read_registration,
)
from sgl_ext.balancer.reporting.activity import Activity, HitRates
from sgl_ext.balancer.reporting.cache_turns import CacheTurns
from sgl_ext.balancer.reporting.request_log import RequestLog, SampledLog
from sgl_ext.balancer.reporting.spans import SpanExport
from sgl_ext.balancer.routing.admission import AdmissionQueue, Trials
from sgl_ext.balancer.routing.readiness import Readiness
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.standby_prefill import StandbyPrefill
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.limits.bounds import LARGE_BODY_BYTES
from sgl_ext.limits.byte_account import ByteAccount
from sgl_ext.protocols import routes
from sgl_ext.protocols.errors import BalancerError, error_headers, wire_status
from sgl_ext.protocols.registry import errors_of
from sgl_ext.protocols.request_ids import id_line, new_request_id
from sgl_ext.reading.strip import HeaderStrip
from sgl_ext.supervision import Guard
from sgl_ext.wire.headers import rank_line


@dataclass(eq=False)
class Services:
    """The router, the admission queue, the connections to workers and the rest.

    secret: by which the workers know this balancer.
    session: for the balancer's own requests to workers; it sends the secret.
    page: renders the metrics of all processes. Call it in a thread.
    divergences: the findings of all processes; None if prompts are not compared.
    readiness: whether the prefix index is warm.
    worker_sources: the state of each source of workers.
    launcher: the launcher of this node, if one started this balancer.
    activity: what this process answered of late.
    other_parts: what the other processes of this balancer tell for the state of all.
    control: the connections to the control plane, which is made after this.
    draining: new requests are rejected.
    span_export: exports the spans of requests; None if there is no collector.
    hint_rules: the operator's default hints.
    reload: reads the settings again: `cluster.reloads`.
    """

    router: Router
    admission_queue: AdmissionQueue
    request_log: RequestLog
    metrics: Metrics
    strip: HeaderStrip
    rate_limits: RateLimits
    conversations: ConversationStore
    secret: SentSecret
    session: aiohttp.ClientSession
    account: ByteAccount
    page: Callable[[], bytes]
    divergences: Callable[[], dict[str, Any] | None]
    readiness: Readiness
    worker_sources: Callable[[], list[dict[str, Any]]]
    launcher: Launcher
    activity: Activity
    other_parts: Callable[[], list[bytes]]
    control: ConnectionPool = field(init=False)
    draining: bool = field(default=False, init=False)
    span_export: SpanExport | None = field(default=None, init=False)
    reload: Callable[[], Awaitable[dict[str, Any]]] = field(init=False)
    hint_rules: HintRules = field(default_factory=HintRules, init=False)

    def __post_init__(self) -> None:
        self.workers = self.router.workers
        self.retries = RetryBudget()
        cached, prompt = self.metrics.reported_tokens, self.metrics.prompt_tokens
        self.hit_rates = HitRates(cached.counts, prompt.counts)
        self.sampled_log = SampledLog()
        self.context_guard = Guard("making a context", self.metrics.background_failed)
        self.cache_turns = CacheTurns(self.metrics, self.request_log.detector)
        self.heartbeats = Heartbeats(self.metrics.background_failed)
        self.resends = Resends(self.metrics.background_failed)
        self.metrics.tables.add("left_requests", self.resends.__len__, lambda: MOST_LEFT)
        self.trials = Trials(self.router, lambda: self.admission_queue.timeout_s)
        self.standby_prefill = StandbyPrefill(self.router, self.metrics, self.session)
        settings = {
            "sort_tools": self.router.sort_tools,
            "keeps_turns": self.conversations.documents.exist,
        }
        self.body_reader = BodyReader(self.strip, **settings)
        blocks = self.body_reader.expander.blocks
        size, limit = (lambda: blocks.used_bytes), (lambda: blocks.limit_bytes)
        self.metrics.tables.add("parsed_contexts", size, limit, "bytes")
        failed = self.metrics.background_failed
        self.large_bodies = LargeBodies(self.account, failed, self.strip, **settings)
        self._pools: dict[Worker, ConnectionPool] = {}
        self.workers.on_leave.append(self._drop_pool)

    @property
    def status(self) -> str:
        """Whether requests are served: "ok", or why they are not."""
        if self.draining:
            return "draining"
        return "ok" if self.workers.ready else "no engine is ready"

    async def read_body(
        self,
        tenant: str,
        plan: ReadPlan,
        body: bytes | bytearray,
        named: Named | None = None,
        turns: LaneTurns | None = None,
    ) -> Reading:
        """Reads a body with what it names, in another process if that is large.

        named: what it names, if that is known. turns: what its connection remembers. As
        `BodyReader.read`; raises BalancerError 503 if the store fails, or if the process fails or
        has no room.
        """
        reading: Reading | Named = named or await self._read_body(tenant, plan, body, None)
        if isinstance(reading, Named):
            found = await self.conversations.find(reading, plan.tenant, turns)
            reading = await self._read_body(tenant, plan, body, found)
        assert not isinstance(reading, Named), "what it names was found"
        return reading

    async def read_registration(self, tenant: str, body: bytes) -> contexts.Registration:
        """As `reading.read_registration`, in another process if it is large."""
        if len(body) <= LARGE_BODY_BYTES:
            return contexts.Registration(*read_registration(body))
        about, items = await self.large_bodies.call(tenant, body, read_registration)
        assert items is not None, "a context has blocks"
        return contexts.Registration(about, items)

    async def _read_body(
        self, tenant: str, plan: ReadPlan, body: bytes | bytearray, found: Found | None
    ) -> Reading | Named:
        size_bytes = len(body) + (0 if found is None else found.size_bytes)
        if size_bytes > LARGE_BODY_BYTES:
            return await self.large_bodies.read(tenant, plan, body, found)
        return self.body_reader.read(plan, body, found)

    def pool(self, worker: Worker) -> ConnectionPool:
        """The connections to a worker."""
        pool = self._pools.get(worker)
        if pool is None:
            pool = self._pools[worker] = ConnectionPool(worker.url, self._lines_for(worker))
        return pool

    def _lines_for(self, worker: Worker) -> bytes:
        """The header lines of each request to a worker. An engine of one rank ignores that."""
        return self.secret.line + rank_line(worker.rank)

    def reload_secret(self) -> None:
        """Sends a changed secret from now on. Call it periodically."""
        if self.secret.reload_if_changed():
            self.secret.put_into(self.session)
            for worker, pool in self._pools.items():
                pool.add_to_each(self._lines_for(worker))

    def sample_hit_rates(self) -> None:
        """Notes the engines' hit rates. Call it periodically."""
        self.hit_rates.sample(time.monotonic(), [worker.id for worker in self.workers.all])

    def pools(self) -> list[ConnectionPool]:
        """Every connection pool."""
        return [self.control, *self._pools.values()]

    def error_response(
        self, error: BalancerError, path: str, request_id: str = "", *, is_stated: bool = False
    ) -> RawResponse:
        """A counted `error_response`. Health checks are not counted."""
        response = error_response(path, error, request_id, is_stated=is_stated)
        if path not in routes.HEALTH:
            self.metrics.requests.counts[routes.label_of(path), response[0]] += 1
            self._log_rejection(error, path, request_id)
        return response

    def _log_rejection(self, error: BalancerError, path: str, request_id: str) -> None:
        status = HTTPStatus(error.status)
        is_load = status == HTTPStatus.TOO_MANY_REQUESTS or status >= 500
        # Other messages quote requests, so there would be a cause for each request.
        cause = error.message if status == HTTPStatus.SERVICE_UNAVAILABLE else status.phrase
        self.sampled_log.add(
            logging.WARNING if is_load else logging.INFO,
            "request rejected",
            cause,
            status=int(status),
            path=path,
            request_id=request_id,
            message_sent=error.message,
        )

    def _drop_pool(self, worker: Worker) -> None:
        """Closes the idle connections to a worker that is gone. Its running requests may still
        end well."""
        if worker in self._pools:
            self._pools[worker].close_idle()
            if worker not in self.workers.all:
                del self._pools[worker]


def error_response(
    path: str, error: BalancerError, request_id: str = "", *, is_stated: bool = False
) -> RawResponse:
    """An error in the protocol of a path, "" for bytes that are no request.

    is_stated: the client sent this id.
    """
    shape, request_id = errors_of(path), request_id or new_request_id()
    status, reason = wire_status(shape, error.status)
    lines = b"content-type: application/json\r\n" + id_line(shape, request_id, is_stated=is_stated)
    for name, value in error_headers(error).items():
        lines += f"{name}: {value}\r\n".encode()
    body = shape.body(status, error.message, request_id, error.code, error.param)
    return status, reason, lines, body
