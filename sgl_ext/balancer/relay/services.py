"""The parts of the balancer that all exchanges and the control plane use."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp

from scheduler.breaker import RetryBudget
from sgl_ext.balancer.access.authentication import SentSecret
from sgl_ext.balancer.access.rate_limits import RateLimits
from sgl_ext.balancer.cluster.launcher import Launcher, Reloads
from sgl_ext.balancer.http.downstream import RawResponse
from sgl_ext.balancer.http.upstream import ConnectionPool, EngineConnections
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.relay.bodies import Bodies
from sgl_ext.balancer.relay.heartbeats import Heartbeats
from sgl_ext.balancer.relay.resends import MOST_LEFT, MOST_LEFT_ELSEWHERE, Resends
from sgl_ext.balancer.reporting.activity import Activity, HitRates
from sgl_ext.balancer.reporting.cache_turns import CacheTurns
from sgl_ext.balancer.reporting.diagnosis import remembering
from sgl_ext.balancer.reporting.event_log import EventLog
from sgl_ext.balancer.reporting.request_log import RequestLog, SampledLog
from sgl_ext.balancer.reporting.spans import SpanExport
from sgl_ext.balancer.reporting.whole_balancer import WholeBalancer
from sgl_ext.balancer.routing.models import Models
from sgl_ext.balancer.routing.readiness import Readiness
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.balancer.routing.workers import WorkerSources
from sgl_ext.limits.byte_account import ByteAccount
from sgl_ext.protocols import routes
from sgl_ext.protocols.errors import BalancerError, error_headers, wire_status
from sgl_ext.protocols.registry import errors_of
from sgl_ext.protocols.request_ids import id_line, new_request_id
from sgl_ext.supervision import Guard


@dataclass(eq=False)
class Services:
    """What all exchanges and the control plane use.

    secret: by which the workers know this balancer.
    session: for the balancer's own requests to workers; it sends the secret.
    activity: what this process answered of late.
    whole: what all processes of this balancer report together.
    readiness: whether the prefix index is warm.
    sources: where the workers come from.
    reloads: reads the settings again.
    launcher: the launcher of this node, if one started this balancer.
    span_export: exports the spans of requests; None if there is no collector.
    make_control: makes the connections to the control plane, which is in this process.
    draining: new requests are rejected.
    events: what happened on the node.
    """

    metrics: Metrics
    account: ByteAccount
    models: Models
    rate_limits: RateLimits
    bodies: Bodies
    secret: SentSecret
    session: aiohttp.ClientSession
    request_log: RequestLog
    activity: Activity
    whole: WholeBalancer
    readiness: Readiness
    sources: WorkerSources
    reloads: Reloads
    launcher: Launcher
    span_export: SpanExport | None
    make_control: "Callable[[Services], ConnectionPool]"

    def __post_init__(self) -> None:
        failed = self.metrics.background_failed
        self.draining = False
        self.events = EventLog()
        self.workers = self.models.workers
        self.tenants = self.models.default.router.tenants
        self.connections = EngineConnections(self.secret.line)
        self.workers.on_leave.append(self._disconnect)
        self.retries = RetryBudget()
        self.heartbeats = Heartbeats(failed)
        self.resends = Resends(failed)
        elsewhere = self.resends.elsewhere.__len__
        self.metrics.tables.add("left_requests", self.resends.__len__, lambda: MOST_LEFT)
        self.metrics.tables.add("left_elsewhere", elsewhere, lambda: MOST_LEFT_ELSEWHERE)
        self.cache_turns = CacheTurns(self.metrics, remembering(self.request_log.detector))
        cached, prompt = self.metrics.reported_tokens, self.metrics.prompt_tokens
        self.hit_rates = HitRates(cached.counts, prompt.counts)
        self.sampled_log = SampledLog()
        self.context_guard = Guard("making a context", failed)
        self.control = self.make_control(self)

    @property
    def router(self) -> Router:
        """The router of the model that is meant where none is named."""
        return self.models.default.router

    @property
    def status(self) -> str:
        """Whether requests are served: "ok", "degraded" if some engines are not ready, or why they
        are not served."""
        if self.draining:
            return "draining"
        if not any(self.workers.is_ready_in_all(worker) for worker in self.workers.ready):
            return "no engine is ready"
        ready, wanted = self.workers.readiness()
        return "ok" if ready == wanted else "degraded"

    def drain(self) -> None:
        """New requests are rejected from now on."""
        self.draining = True

    def reload_secret(self) -> None:
        """Sends a changed secret from now on. Call it periodically."""
        if self.secret.reload_if_changed():
            self.secret.put_into(self.session)
            self.connections.change_lines(self.secret.line)

    def sample_hit_rates(self) -> None:
        """Notes the engines' hit rates. Call it periodically."""
        self.hit_rates.sample(time.monotonic(), [worker.id for worker in self.workers.all])

    def sweep_connections(self) -> None:
        """Closes connections that were idle for too long. Call it once a second."""
        self.control.sweep()
        self.connections.sweep()

    def close(self) -> None:
        """Closes the connections, and ends what runs beside the balancer."""
        self.control.close()
        self.connections.close()
        self.bodies.close()

    def _disconnect(self, worker: Worker) -> None:
        self.connections.leave(worker, is_gone=worker not in self.workers.all)

    def error_response(
        self, error: BalancerError, path: str, request_id: str = "", *, is_stated: bool = False
    ) -> RawResponse:
        """A counted `error_response`. Health checks are not counted."""
        response = error_response(path, error, request_id, is_stated=is_stated)
        if path not in routes.HEALTH:
            self.metrics.requests.counts[routes.label_of(path), response[0]] += 1
            self._log_rejection(error, response[0], path, request_id)
        return response

    def _log_rejection(
        self, error: BalancerError, answered: int, path: str, request_id: str
    ) -> None:
        """answered: the status that the client gets, by its protocol."""
        status = HTTPStatus(error.status)
        is_load = status == HTTPStatus.TOO_MANY_REQUESTS or status >= 500
        # Other messages quote requests, so there would be a cause for each request.
        cause = error.message if status == HTTPStatus.SERVICE_UNAVAILABLE else status.phrase
        self.sampled_log.add(
            logging.WARNING if is_load else logging.INFO,
            "request rejected",
            cause,
            status=answered,
            path=path,
            request_id=request_id,
            message_sent=error.message,
        )


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
