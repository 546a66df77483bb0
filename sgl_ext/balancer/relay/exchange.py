"""The life of one request between a client and a worker.

Its connection has received it, and its key was checked with its head. It runs in the callbacks of
the two connections and never blocks:

    begin: prepare -> place -> [wait] -> send -> response_head, response_data ..., response_end
                        ^                                   |
                        +-- connect_failed, upstream_lost, -+    until the first byte is sent
                            abandon

A request whose worker fails before the first byte of its response was sent is retried elsewhere.
If it had been sent there, it may be the cause: so after MAX_LOST such failures it is not retried.
The retry budget limits only the retries of requests that an engine answered with 503.

After the first byte a request is not replayed, and a cut stream ends in the protocol's error event.
When the client disconnects, the connection to the worker is closed, and the engine aborts.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from enum import Enum
from functools import partial
from http import HTTPStatus
from typing import Any

from sgl_ext.balancer.conversations.conversation_store import Found, Named
from sgl_ext.balancer.http.downstream import DownstreamConnection
from sgl_ext.balancer.http.request_reader import Request
from sgl_ext.balancer.http.response_head import ResponseHead
from sgl_ext.balancer.http.upstream import UpstreamConnection
from sgl_ext.balancer.metrics.registry import band
from sgl_ext.balancer.relay.hidden_usage import without_usage
from sgl_ext.balancer.relay.preparation import NOT_PREPARED, Draft, parse, prepare
from sgl_ext.balancer.relay.response import Response
from sgl_ext.balancer.relay.services import Services
from sgl_ext.balancer.reporting.request_log import AnsweredRequest
from sgl_ext.balancer.routing.attempts import NO_ROUTING, Attempt
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.protocols.errors import BalancerError, internal_error, no_engine, shutting_down
from sgl_ext.protocols.registry import errors_of
from sgl_ext.protocols.request_ids import id_line, new_request_id
from sgl_ext.requests.session import QUEUED_HEADER

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
# How many engines one request may take along.
MAX_LOST = 2
_QUEUED_LINE = b"%b: %%.3f\r\n" % QUEUED_HEADER.encode()


class Stage(Enum):
    """How far a request has come."""

    BEFORE_FIRST_BYTE = "nothing was sent to the client; it may be retried"
    RELAYING = "a part of the response was sent to the client"
    ENDED = "the response is complete, or the client is gone"


class Exchange:
    """One request and its response. `tried`: the workers that it was sent to."""

    def __init__(self, services: Services, client: DownstreamConnection, request: Request) -> None:
        self._arrived_s = time.perf_counter()
        self._services = services
        self._client = client
        self._request = request
        self._head = request.head
        self._preparation = NOT_PREPARED
        self._stage = Stage.BEFORE_FIRST_BYTE
        self._pool = services.control
        self._connection: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._response = Response()
        self._attempt: Attempt | None = None
        self._attempts = 0
        self._is_sent = False  # in this attempt
        self._lost = 0  # attempts that were sent to a worker that failed
        self._wait_reason = ""
        self._queued_s = 0.0
        self._ttft_s = 0.0
        self._request_id = ""
        self._waiting: asyncio.Task[None] | None = None
        self.routing = NO_ROUTING
        self.tried: set[Worker] = set()

    # Prepare, place and send.

    def begin(self) -> None:
        """Prepares, places and sends the request, or answers it with an error."""
        try:
            if self._request.rejection is not None:
                raise self._request.rejection
            draft = parse(self._services, self._request)
            if draft is None or draft.named is None:
                self._prepare(draft)
            else:
                self._wait_for(self._find_named(draft, draft.named))
        except Exception as error:
            self._failed(error)

    def _prepare(self, draft: Draft | None, found: Found | None = None) -> None:
        if draft is not None:
            self._preparation = prepare(self._services, self._request, draft, found)
            self.routing = self._preparation.routing
            self._response = Response(sums_items=self._preparation.sums_items)
        else:
            charge = self._services.rate_limits.admit(self._head.tenant, 0)
            self._preparation = NOT_PREPARED._replace(charge=charge)
        self._services.retries.add_request()
        self._place()

    def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        """Goes on when the store has answered. An event loop keeps no reference to a task."""

        async def run() -> None:
            try:
                await work
            except Exception as error:
                self._failed(error)

        self._waiting = asyncio.create_task(run())

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, BalancerError):
            log.error("a request failed inside the balancer", exc_info=error)
            error = internal_error()
        if self._stage is Stage.BEFORE_FIRST_BYTE:
            self._answer_error(error)
        elif self._stage is Stage.RELAYING:
            self._cut("the balancer failed")

    async def _find_named(self, draft: Draft, named: Named) -> None:
        found = await self._services.conversations.find(named, draft.tenant)
        if self._stage is not Stage.ENDED:
            self._prepare(draft, found)

    def _place(self) -> None:
        if self._head.route is None:  # for the control plane
            self._connect()
            return
        self._wait_reason = ""
        if not self._services.admission_queue.place(self):
            self._wait_reason = "capacity"

    def placed(self, attempt: Attempt) -> None:
        """Begins an attempt, after the prefix that it follows is computed."""
        services = self._services
        self._attempt = attempt
        attempt.abandon = self.abandon
        self._is_sent = False
        services.metrics.placements.counts[(attempt.placement.reason,)] += 1
        if self.tried:
            services.metrics.retries.inc()
        self._attempts += 1
        self.tried.add(attempt.worker)
        self._pool = services.pool(attempt.worker)
        if attempt.follows is not None:
            self._wait_reason = "prefix"
            attempt.follows.followers.append(partial(self._go_on, attempt))
        else:
            self._connect()
        if attempt.placement.reason == "home":
            services.standby_prefill.consider(attempt, self._head, self._request.body)

    def rejected(self, error: BalancerError) -> None:
        """No worker takes the request."""
        if self._lost:
            message = "The engine failed before it answered."
            error = BalancerError(HTTPStatus.BAD_GATEWAY, message)
        self._answer_error(error)

    def _go_on(self, attempt: Attempt) -> None:
        """The prefix that the attempt follows is computed, or its attempt has ended."""
        # If the worker hangs, this attempt is abandoned, too.
        if attempt is self._attempt and not attempt.worker.is_hung:
            self._connect()

    def _connect(self) -> None:
        if self._wait_reason:
            self._queued_s = time.perf_counter() - self._arrived_s
            self._services.metrics.queue_s.observe(self._wait_reason, self._queued_s)
        self._connecting = self._pool.lease(self)

    def connected(self, connection: UpstreamConnection) -> None:
        """Sends the request."""
        self._connecting = None
        self._connection = connection
        self._is_sent = True
        head, body = self._head, self._request.body
        lines = self._pool.request_line(head.method, head.target) + head.upstream_lines
        if self._queued_s:
            lines += _QUEUED_LINE % self._queued_s
        if body or head.method not in ("GET", "HEAD"):
            lines += b"content-length: %d\r\n\r\n" % len(body)
        else:
            lines += b"\r\n"
        connection.send(self, lines, body, head.method)

    # Relay the response.

    def response_head(self, head: ResponseHead) -> None:
        """Takes the response's head."""
        self._response.head, self._response.lines = head, head.lines
        if not head.is_named:
            self._response.lines += id_line(errors_of(self._head.path), self._id())

    def response_data(self, data: bytes) -> None:
        """Relays whole events of a stream; any other body is collected."""
        if data := self._response.take(data):
            self._relay(data)
        elif not self._hold():
            self.abandon("the answer is larger than the byte budget")

    def response_end(self) -> None:
        """Ends the stream, sends the collected body, or retries an engine's own 503."""
        self._connection = None
        response = self._response
        head, body = response.head, response.rest()
        recorder = self._preparation.recorder
        if head.streams and (body or self._stage is Stage.RELAYING):
            if body:
                self._relay(body)
            if recorder is None or not recorder.holds_end:
                self._end_stream(b"")
            else:
                self._wait_for(self._finish(recorder.record_end(), self._end_stream))
        elif (
            head.status == HTTPStatus.SERVICE_UNAVAILABLE
            and 0 < self._attempts < MAX_ATTEMPTS
            and self._services.router.any_available(besides=self.tried)
            and self._has_budget()
        ):
            self._retry("status 503", answered=True)
        elif recorder is None or head.status != HTTPStatus.OK:
            self._answer(body)
        else:
            self._wait_for(self._finish(recorder.record(body), self._answer))

    async def _finish(self, recorded: Awaitable[bytes], send: Callable[[bytes], None]) -> None:
        """Sends the end of a response after it was stored."""
        data = await recorded
        if self._stage is not Stage.ENDED:
            send(data)

    def _end_stream(self, last: bytes) -> None:
        if last:
            self._send(last)
        self._complete()
        self._client.end_stream()

    def _answer(self, body: bytes) -> None:
        head = self._response.head
        self._response.sent(body)
        self._first_byte()
        self._complete()
        self._client.answer(head.status, head.reason, self._response.lines, body)

    def _hold(self) -> bool:
        """Counts what the request and its answer hold. False if no answer may be so large."""
        return self._request.hold.set(len(self._request.body) + self._response.held_bytes)

    def resume(self) -> None:
        """The client reads again."""
        if self._connection is not None:
            self._connection.resume()

    def _relay(self, data: bytes) -> None:
        if self._preparation.recorder is not None:
            data = self._preparation.recorder.record_events(data)
        if data:
            self._send(data)

    def _send(self, data: bytes) -> None:
        self._response.sent(data)
        if self._preparation.hides_usage and not (data := without_usage(data)):
            return
        if self._stage is Stage.BEFORE_FIRST_BYTE:
            self._start_stream(data)
        else:
            self._client.write(data)
        if self._client.paused and self._connection is not None:
            self._connection.pause()

    def _start_stream(self, data: bytes) -> None:
        head = self._response.head
        self._client.start_stream(head.status, head.reason, self._response.lines, data)
        self._first_byte()

    def _first_byte(self) -> None:
        self._stage = Stage.RELAYING
        # It is not sent again, and a response may take long.
        self._request.body = b""
        self._hold()
        self._ttft_s = time.perf_counter() - self._arrived_s
        if self._attempt is not None:
            self._services.router.attempts.prefill_done(self._attempt)
        metrics, routing = self._services.metrics, self.routing
        if self._head.route is not None:
            metrics.ttft_s.observe(self._head.route.label, self._ttft_s)
        if routing.runs:
            metrics.priority_ttft_s.observe(band(routing.priority), self._ttft_s)

    # Failures.

    def connect_failed(self, reason: str) -> None:
        """The worker accepts no connections."""
        self._connecting = None
        if self._attempt is not None:
            self._services.workers.mark(self._attempt.worker, ready=False)
        self._lost += self._is_sent  # on a connection that broke before
        self._retry(reason)

    def upstream_lost(self, reason: str) -> None:
        """The connection broke before the response was complete."""
        connection, self._connection = self._connection, None
        if self._stage is Stage.RELAYING:
            self._cut(reason)
        elif connection is not None and connection.reused and not connection.heard:
            # The worker closed an idle connection just when it was used, and is not to blame.
            self._connecting = self._pool.connect(self)
        else:
            self._lost += 1
            self._retry(reason)

    def abandon(self, reason: str) -> None:
        """The worker will not answer, whether the request was sent to it, connects or waits for a
        prefix."""
        if self._waiting is not None and not self._waiting.done():
            return  # it has answered, and the response is being stored
        self._disconnect()
        if self._stage is Stage.RELAYING:
            self._cut(reason)
        else:
            self._lost += self._is_sent
            self._retry(reason)

    def end(self) -> None:
        """The balancer ends, and tells the client so."""
        self._disconnect()
        error = shutting_down()
        if self._stage is Stage.RELAYING:
            self._cut("the balancer ends", error.message)
        else:
            self._answer_error(error)

    def client_gone(self) -> None:
        """The client disconnected."""
        self._services.metrics.client_disconnects.inc()
        self._disconnect()
        self._end_early(by_worker=False)

    def _disconnect(self) -> None:
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

    def _retry(self, reason: str, *, answered: bool = False) -> None:
        log.warning("%s failed before it answered %s: %s", self._pool.url, self._id(), reason)
        self._release(by_worker=True, answered=answered)
        self._response = Response(sums_items=self._preparation.sums_items)
        untried = self._services.router.any_available(besides=self.tried)
        if self._head.route is None:
            self._answer_error(internal_error())
        elif self._lost >= MAX_LOST:
            message = f"Engines failed {self._lost} times before they answered this request."
            self._answer_error(BalancerError(HTTPStatus.BAD_GATEWAY, message))
        elif untried or self._attempts < MAX_ATTEMPTS:
            self._place()
        else:
            self.rejected(no_engine())

    def _cut(
        self, reason: str, message: str = "The engine stopped in the middle of its answer."
    ) -> None:
        """Ends a stream that cannot go on in its protocol's error event."""
        self._services.metrics.cut_streams.inc()
        log.warning("the stream of %s from %s was cut: %s", self._id(), self._pool.url, reason)
        shape = errors_of(self._head.path)
        self._client.write(shape.event(message, self._response.events_sent, self._id()))
        self._end_early(by_worker=True)
        self._count()
        self._client.end_stream()

    # Finish.

    def _complete(self) -> None:
        """The whole response came."""
        self._stage = Stage.ENDED
        status, usage = self._response.head.status, None
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            usage = self._response.usage()
            if status < HTTPStatus.INTERNAL_SERVER_ERROR:
                self._services.router.attempts.succeed(attempt)
            else:
                self._services.router.attempts.fail(attempt, by_worker=True, answered=True)
            answered = AnsweredRequest(
                attempt,
                "" if self._head.route is None else self._head.route.label,
                status,
                self._attempts,
                self._queued_s,
                self._ttft_s,
                time.perf_counter() - self._arrived_s,
                usage,
                self._preparation.diagnosis,
            )
            self._services.request_log.record(answered)
        self._settle(None if usage is None else usage.computed_tokens)
        self._count()

    def _end_early(self, *, by_worker: bool, cost: int | None = None) -> None:
        """The worker or the client ended the response before it was complete."""
        self._settle(cost)
        self._stage = Stage.ENDED
        self._release(by_worker=by_worker)

    def _answer_error(self, error: BalancerError) -> None:
        self._end_early(by_worker=True, cost=0)
        self._client.answer(*self._services.error_response(error, self._head.path, self._id()))

    def _release(self, *, by_worker: bool, answered: bool = False) -> None:
        """Ends an attempt that failed, or leaves the admission queue."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            self._services.admission_queue.remove(self)
        else:
            self._services.router.attempts.fail(attempt, by_worker=by_worker, answered=answered)

    def _settle(self, cost: int | None) -> None:
        """Settles the charge by the computed tokens, None if they are unknown."""
        charge = self._preparation.charge
        if charge is None:
            return
        if not self._attempts or self._response.head.status >= HTTPStatus.BAD_REQUEST:
            cost = 0
        elif cost is None:  # an event of a stream has a token or more
            cost = self.routing.prompt_tokens + self._response.events_sent
            usage = self._response.usage()
            if usage is not None and usage.computed_tokens is not None:
                cost = max(cost, usage.computed_tokens)
        self._services.rate_limits.settle(charge, cost)

    def _count(self) -> None:
        if self._head.route is not None:
            status = self._response.head.status
            self._services.metrics.requests.counts[self._head.route.label, status] += 1

    def _id(self) -> str:
        """The request's id for the client and the log, unless the worker names it."""
        if not self._request_id:
            self._request_id = new_request_id()
        return self._request_id
