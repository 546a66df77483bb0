"""How a request gets to a worker, and to another one if that fails.

    place -> [wait] -> connect -> send -> the response
      ^                   |                  |
      +-------------------+------------------+   connect_failed, upstream_lost, abandon:
                                                 until the first byte is sent to the client

A request whose worker fails before the first byte of its response was sent is retried elsewhere.
If it had been sent there, it may be the cause: then it waits for its trial (`routing.trials`), and
may be refused. After MAX_LOST such failures no request is retried.
The retry budget limits only the retries of requests that an engine answered with 503.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from enum import Enum
from functools import partial
from http import HTTPStatus

from sgl_ext.balancer.conversations.response_turns import LaneTurns
from sgl_ext.balancer.http.downstream import Client
from sgl_ext.balancer.http.request_reader import Request
from sgl_ext.balancer.http.upstream import ResponseHead, Upstream
from sgl_ext.balancer.relay.prefill_leg import PrefillLeg, hand_over_line
from sgl_ext.balancer.relay.services import Services
from sgl_ext.balancer.reporting.spans import RequestSpans
from sgl_ext.balancer.routing.attempts import NO_ROUTING, Attempt
from sgl_ext.balancer.routing.trials import fingerprint_of
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.protocols.errors import BalancerError, internal_error, no_engine
from sgl_ext.protocols.request_ids import lines_of_new, new_request_id, new_trace_id
from sgl_ext.wire.headers import REFUSED_LINE, queued_lines, retry_line

MAX_ATTEMPTS = 3
# How often a request may be at an engine that fails, although it was not found to be the cause.
MAX_LOST = 4


class Stage(Enum):
    """How far a request has come."""

    BEFORE_FIRST_BYTE = "nothing was sent to the client; it may be retried"
    WAITING = "the client was told to wait; it may be retried, and an error is an event"
    RELAYING = "a part of the response was sent to the client"
    ENDED = "the response is complete, or the client is gone"


BEFORE_FIRST_BYTE, WAITING, RELAYING, ENDED = Stage


class Delivery(ABC):
    """The attempts of one request. `tried`: the workers that it was sent to."""

    # How a request begins. Most requests change few of these.
    _stage = BEFORE_FIRST_BYTE
    _connection: Upstream | None = None
    _connecting: asyncio.Task[None] | None = None
    _attempt: Attempt | None = None
    _leg: PrefillLeg | None = None
    _last_attempt: Attempt | None = None  # whether it runs or has ended
    _attempts = 0
    _is_sent = False  # in this attempt
    _lost = 0  # attempts that were sent to a worker that failed
    _on_trial = False
    _fingerprint = ""  # if it was needed
    waits_since_s: float | None = None
    _wait_reason = ""
    _queued_s = 0.0
    _spans: RequestSpans | None = None
    _lines = b""  # for the engine, besides those of the head
    routing = NO_ROUTING

    def __init__(
        self,
        services: Services,
        client: Client,
        request: Request,
        turns: LaneTurns | None = None,
    ) -> None:
        """turns: what its connection remembers, if that is a WebSocket."""
        self._arrived_s = time.perf_counter()
        self._services = services
        self._client = client
        self._turns = turns
        self._request = request
        self._head = head = request.head
        self._pool = services.control
        self._request_id = head.identity.request_id or new_request_id()
        trace = head.identity.trace
        self._trace_id = new_trace_id() if trace is None else trace.trace_id
        self.tried: set[Worker] = set()
        if services.span_export is not None and head.route is not None:
            is_sampled = None if trace is None else trace.is_sampled
            if services.span_export.records(self._trace_id, is_sampled):
                self._spans = RequestSpans(head, self._trace_id, self._arrived_s)

    # What the exchange does with a response, or without one.

    @abstractmethod
    def response_head(self, head: ResponseHead) -> None: ...
    @abstractmethod
    def response_data(self, data: bytes) -> None: ...
    @abstractmethod
    def response_end(self, last: bytes) -> None: ...
    @abstractmethod
    def _forget_response(self) -> None: ...
    @abstractmethod
    def _cut(self, reason: str) -> None: ...
    @abstractmethod
    def _answer_error(self, error: BalancerError) -> None: ...

    # Place and send.

    def _place(self) -> None:
        if self._head.route is None:  # for the control plane
            self._connect()
            return
        if not self._on_trial and self._is_run and not self._services.trials.admits(self):
            return
        self._wait_reason = ""
        if self._spans is not None:
            self._spans.waits()
        if not self._services.admission_queue.place(self):
            self._wait_reason = "capacity"

    @property
    def _is_run(self) -> bool:
        """Whether a scheduler runs the request, so that it could end one."""
        return self.routing.runs or self.routing.warms

    @property
    def fingerprint(self) -> str:
        """As of a `Suspect`."""
        if not self._fingerprint:
            tenant, body = self._head.tenant, self._request.body
            self._fingerprint = fingerprint_of(tenant, self.routing, body)
        return self._fingerprint

    def release(self, *, on_trial: bool) -> None:
        """Places the request, which waited for its trial."""
        self._on_trial = on_trial
        self._place()

    def refuse(self, error: BalancerError) -> None:
        """Answers the request in place of an engine."""
        self._answer_error(error)

    def placed(self, attempt: Attempt) -> None:
        """Begins an attempt, after the prefix that it follows is computed."""
        services = self._services
        if self._on_trial and not services.trials.may_send(self, attempt):
            self._on_trial = False
            services.router.attempts.fail(attempt, by_worker=False)
            return
        self._attempt = self._last_attempt = attempt
        if self._spans is not None:
            self._spans.placed(attempt, self._wait_reason)
        attempt.abandon = self.abandon
        self._is_sent = False
        services.metrics.placements.counts[(attempt.placement.reason,)] += 1
        if self.tried:
            services.metrics.retries.inc()
        self._attempts += 1
        self.tried.add(attempt.worker)
        if attempt.decoder is not None:
            self.tried.add(attempt.decoder)
        self._pool = services.pool(attempt.decoder or attempt.worker)
        if attempt.follows is not None:
            self._wait_reason = "prefix"
            attempt.follows.followers.append(partial(self._go_on, attempt))
        else:
            self._connect()
        if attempt.placement.reason == "home" and not self._on_trial:
            services.standby_prefill.consider(
                attempt, self._head, self._request.body, self._request_id
            )

    def rejected(self, error: BalancerError) -> None:
        """No worker takes the request."""
        if self._lost:
            message = "The engine failed before it answered."
            error = BalancerError(HTTPStatus.BAD_GATEWAY, message)
        self._answer_error(error)

    def _go_on(self, attempt: Attempt) -> None:
        """The prefix that the attempt follows is computed, or its attempt has ended."""
        # If the worker hangs or stands still, this attempt is abandoned, too.
        is_used = not attempt.worker.is_hung and not attempt.worker.is_stalled
        if attempt is self._attempt and (is_used or not self._services.router.any_available()):
            self._connect()

    def _connect(self) -> None:
        if self._wait_reason:
            self._queued_s = time.perf_counter() - self._arrived_s
            self._services.metrics.queue_s.observe(self._wait_reason, self._queued_s)
            if self._spans is not None:
                self._spans.connects(self._wait_reason)
        self._connecting = self._lease()

    def _lease(self) -> asyncio.Task[None] | None:
        """Calls `connected` now, or returns the task that does."""
        return self._pool.lease(self)

    def connected(self, connection: Upstream) -> None:
        """Sends the request."""
        self._connecting = None
        self._connection = connection
        self._is_sent = True
        if self._attempt is not None and self._attempt.sent_s is None:
            self._attempt.sent_s = self._services.router.clock()
            if self._on_trial:
                self._services.trials.sent(self, self._attempt)
        head, body = self._head, self._request.body
        lines = self._pool.begin_of(head) + self._lines
        if self._attempts > 1:
            lines += retry_line(self._attempts - 1)
        if self._queued_s:
            lines += queued_lines(self._queued_s, self._services.admission_queue.window_s)
        end = "\r\n"
        if body or head.method not in ("GET", "HEAD"):
            end = f"content-length: {len(body)}\r\n\r\n"
        lines += f"x-request-id: {self._request_id}\r\n{self._trace_lines()}{end}".encode()
        if self._attempt is not None and self._attempt.decoder is not None:
            first = self._pool.request_line(head.method, head.target)
            lines = self._prefill(self._attempt, first, lines)
        connection.send(self, lines, body, head.method)

    def _prefill(self, attempt: Attempt, first: bytes, lines: bytes) -> bytes:
        """Sends the request to the prefill engine, too. Returns its lines for the decode engine:
        both find each other by one of them."""
        head, pool = self._head, self._services.pool(attempt.worker)
        rest = hand_over_line(attempt.worker) + lines[len(first) :]
        failed = partial(self._prefill_failed, attempt)
        whole = pool.request_line(head.method, head.target) + rest
        self._leg = PrefillLeg(pool, whole, self._request.body, failed)
        return first + rest

    def _prefill_failed(self, attempt: Attempt, reason: str, *, answered: bool) -> None:
        """The prefill engine failed: the decode engine would wait for its KV."""
        if attempt is self._attempt and self._stage in (BEFORE_FIRST_BYTE, WAITING):
            attempt.worker.breaker.failed(time.monotonic(), answered=answered)
            if not answered:
                self._note_loss(attempt.worker)
            self._disconnect()
            self._retry(f"prefill: {reason}", by_worker=False)

    def _trace_lines(self) -> str:
        """Hands the trace on, at the span of this attempt if there is one."""
        trace = self._head.identity.trace
        if self._spans is not None:
            trace = self._spans.sent(self._pool.url, self._attempts)
        if trace is not None:
            return trace.lines
        # Without an export here, the engine's own tracing decides.
        return lines_of_new(self._trace_id, is_sampled=self._services.span_export is None)

    # Failures.

    def connect_failed(self, reason: str) -> None:
        """The worker accepts no connections."""
        self._connecting = None
        if self._attempt is not None:
            if self._is_sent:  # on a connection that broke before
                self._note_loss(self._attempt.answerer)
            self._services.workers.mark(self._attempt.answerer, ready=False, cause=reason)
        self._retry(reason)

    def upstream_lost(self, reason: str) -> None:
        """The connection broke before the response was complete."""
        connection, self._connection = self._connection, None
        if self._stage is RELAYING:
            self._note_loss()
            self._cut(reason)
        elif connection is not None and connection.reused and not connection.heard:
            # The worker closed an idle connection just when it was used, and is not to blame.
            self._connecting = self._pool.connect(self)
        else:
            self._note_loss()
            self._retry(reason)

    def abandon(self, reason: str) -> None:
        """The worker will not answer, whether the request was sent to it, connects or waits for a
        prefix."""
        self._disconnect()
        if self._is_sent:
            self._note_loss()
        if self._stage is RELAYING:
            self._cut(reason)
        else:
            self._retry(reason)

    def _note_loss(self, worker: Worker | None = None) -> None:
        """The request was sent to a worker that failed: this one, or that of its attempt."""
        self._lost += 1
        self._on_trial = False
        attempt = self._attempt
        if attempt is not None and attempt.sent_s is not None and self._is_run:
            self._services.trials.lost(self, worker or attempt.answerer, attempt.sent_s)

    def _is_refused(self, head: ResponseHead) -> bool:
        """Whether the worker refuses the balancer, and not the client; then the request is sent to
        another. It is no failure: a probe finds when the worker can be used again."""
        attempt = self._attempt
        if attempt is None or REFUSED_LINE not in head.lines:
            return False
        self._services.workers.note_secret(attempt.answerer, refused=True)
        self._retry("it refuses the engine-secret", by_worker=False)
        return True

    def _end_leg(self) -> None:
        leg, self._leg = self._leg, None
        if leg is not None:
            leg.abort()

    def _disconnect(self) -> None:
        self._end_leg()
        connection, self._connection = self._connection, None
        connecting, self._connecting = self._connecting, None
        if connection is not None:
            connection.abort()
        if connecting is not None:
            connecting.cancel()

    def _has_budget(self) -> bool:
        has_budget = self._services.retries.spend()
        if not has_budget:
            self._services.metrics.retries_rejected.inc()
        return has_budget

    def _retry(self, reason: str, *, answered: bool = False, by_worker: bool = True) -> None:
        self._warn("attempt failed", reason)
        if self._spans is not None:
            self._spans.upstream_ended(reason)
        self._release(by_worker=by_worker, answered=answered)
        self._forget_response()
        untried = self._services.router.any_available(self.tried, self.routing.only)
        if self._head.route is None:
            self._answer_error(internal_error())
        elif self._lost >= MAX_LOST or (self._lost and self._services.trials.refuses(self)):
            message = f"Engines failed {self._lost} times before they answered this request."
            self._answer_error(BalancerError(HTTPStatus.BAD_GATEWAY, message))
        elif untried or self._attempts < MAX_ATTEMPTS + self._lost:
            self._place()
        else:
            self.rejected(no_engine())

    def _release(self, *, by_worker: bool, answered: bool = False) -> None:
        """Ends an attempt that failed, or leaves the admission queue."""
        self._end_leg()
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            self._services.admission_queue.remove(self)
            self._services.trials.remove(self)
        else:
            self._services.router.attempts.fail(attempt, by_worker=by_worker, answered=answered)

    def _warn(self, message: str, cause: str) -> None:
        """Logs what happened to the request, or counts it."""
        about = {"request_id": self._request_id, "url": self._pool.url}
        self._services.sampled_log.add(logging.WARNING, message, cause, **about)
