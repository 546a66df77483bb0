"""One request's way through: read it, choose a worker, send it on, relay the answer.

It runs in the callbacks of two connections, the client's and the worker's, and
never waits: each step is called by what it waited for.

    begin: read -> choose -> connected: send -> answer_head, answer_data ..., answer_end
                     ^                                       |
                     +--- not_connected, worker_lost --------+    while the client was sent nothing

Promises kept here: a request whose worker fails before the first byte of its
answer has been sent is retried elsewhere; after that byte it is not replayed,
and a cut stream ends in the protocol's error event. When the client leaves,
the worker's connection closes, and the engine aborts.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from enum import Enum
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

import orjson

from sgl_ext.balancer.access.rate_limits import Charge
from sgl_ext.balancer.conversations.response_recorder import ResponseRecorder
from sgl_ext.balancer.http.downstream import DownstreamConnection
from sgl_ext.balancer.http.request_reader import Request
from sgl_ext.balancer.http.response_head import ResponseHead
from sgl_ext.balancer.http.sse import WholeEvents
from sgl_ext.balancer.http.upstream import UpstreamConnection
from sgl_ext.balancer.metrics.registry import band
from sgl_ext.balancer.relay.services import Services, refusal
from sgl_ext.balancer.reporting.diagnosis import PromptDiagnosis
from sgl_ext.balancer.routing.attempt import NO_ROUTING, Attempt
from sgl_ext.balancer.routing.workers import Worker
from sgl_ext.protocols.errors import BalancerError, no_engine
from sgl_ext.protocols.registry import detect, errors_of, of_path, with_name
from sgl_ext.protocols.request_ids import id_line, new_request_id
from sgl_ext.requests.protocol import Protocol
from sgl_ext.requests.session import QUEUED_HEADER, hints_of
from sgl_ext.requests.system_text import strip_request
from sgl_ext.requests.usage import read_usage

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
_QUEUED = QUEUED_HEADER.encode()
# The ends of OpenAI's streams and of Anthropic's, which tell nothing.
_DONE = b"data: [DONE]\n\n"
_STOP = b"event: message_stop\n"
# An answer from here on says that the worker failed, whatever was asked.
_WORKER_AT_FAULT = 500


class Outcome(Enum):
    """How a request ended at one worker."""

    ANSWERED = "answered"
    FAILED = "failed before the first byte"
    CUT = "cut after the first byte"
    CLIENT_GONE = "the client left"


class Exchange:
    """A request on its way through.

    `asked` is what placement knows of it, `tried` the workers it was sent to,
    `queued_s` how long it waited before it was sent.
    `first_data` and `last_data` are the ends of the answer's body: whole events
    of a stream (the closing mark of OpenAI's is none), the whole body otherwise.
    """

    # What a request begins with; set on the class, so that beginning costs nothing.
    routing = NO_ROUTING
    prompt_diagnosis: PromptDiagnosis | None = None
    queued_s = 0.0
    _waited = ""
    first_data = b""
    last_data = b""
    _first_byte_s = 0.0
    _attempt: Attempt | None = None
    _recorder: ResponseRecorder | None = None
    _connection: UpstreamConnection | None = None
    _attempts = 0
    _accepted = False
    _begun = False
    _ended = False
    _charge: Charge | None = None
    _status = 0
    _reason = b""
    _lines = b""
    _request_id = ""
    _streams = False
    _events: WholeEvents | None = None
    _events_sent = 0

    def __init__(self, services: Services, client: DownstreamConnection, request: Request) -> None:
        self._services = services
        self._client = client
        self._request = request
        self._head = request.head
        self._arrived = time.perf_counter()
        self._pool = services.control
        self.tried: set[Worker] = set()
        self._pieces: list[bytes] = []

    # Placement: where it goes, and what becomes of it there.

    def placed(self, attempt: Attempt) -> None:
        """A worker carries the request from now on. Behind a prefix being computed, it waits."""
        self._attempt = attempt
        attempt.worker_failed = self.worker_failed
        metrics = self._services.metrics
        metrics.placements.counts[(attempt.placement.reason,)] += 1
        if self.tried:
            metrics.retries.inc()
        self._attempts += 1
        self.tried.add(attempt.worker)
        self._pool = self._services.pool(attempt.worker)
        if attempt.follows is not None:
            self._waited = "prefix"
            attempt.follows.followers.append(self._go)
        else:
            self._go()
        if attempt.placement.reason == "home":
            self._services.standby_prefill.look(attempt, self._head, self._request.body)

    def refused(self, error: BalancerError) -> None:
        """No worker takes the request."""
        if self._accepted:
            message = "The engine failed before it answered."
            error = BalancerError(HTTPStatus.BAD_GATEWAY, message)
        self._answer_error(error)

    def _first_byte(self) -> None:
        """The answer begins: its first bytes go to the client."""
        self._begun = True
        # It is not sent again, and answers can be long.
        self._request.body = b""
        self._first_byte_s = time.perf_counter() - self._arrived
        if self._attempt is not None:
            self._services.router.prefill_done(self._attempt)
        if self._head.route is not None:
            self._services.metrics.ttft_s.observe(self._head.route.label, self._first_byte_s)
        if self.routing.runs:
            priority = band(self.routing.priority)
            self._services.metrics.priority_ttft_s.observe(priority, self._first_byte_s)

    def _released(self, outcome: Outcome) -> None:
        """A worker carries the request no longer."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            self._services.admission_queue.leave(self)
            return
        if outcome is Outcome.ANSWERED:
            self._services.router.arrived(attempt, well=self._status < _WORKER_AT_FAULT)
            self._services.request_log.record(self, attempt)
        else:
            self._services.router.fail(attempt, by_worker=outcome is not Outcome.CLIENT_GONE)

    # The way through.

    def begin(self) -> None:
        """Reads the request and sends it on; if it cannot go on, answers it."""
        try:
            if self._request.refusal is not None:
                raise self._request.refusal
            self._read()
            self._services.retries.add_request()
            self._send()
        except BalancerError as error:
            self._answer_error(error)
        except Exception:
            log.exception("a request failed inside the balancer")
            self._answer_error(_internal_error())

    def _read(self) -> None:
        """Parses the body, if it decides where the request goes."""
        route = self._head.route
        if route is None or not route.placed:
            return
        try:
            document = orjson.loads(self._request.body)
        except orjson.JSONDecodeError as error:
            message = f"body: not valid JSON: {error}"
            raise BalancerError(HTTPStatus.BAD_REQUEST, message) from None
        hints, path = hints_of(self._head.fields), self._head.path
        protocol = of_path(path)
        if route.warms and (spoken := self._prefilled_protocol(document)) is not None:
            protocol, path = spoken, spoken.path
        tenant = self._services.router.tenants.asking(hints).name
        whole, recorder = self._services.conversations.expand(path, document, tenant)
        if whole is not document:
            document = with_name(protocol, whole) if route.warms else whole
            self._request.body = orjson.dumps(document)
        if route.runs:
            self._recorder = recorder
        stripped = strip_request(protocol, document, self._services.strip)
        if stripped.headers:
            self._services.metrics.stripped_headers.inc(stripped.headers)
        if route.runs or route.warms:
            size = len(self._request.body)
            routing = self._services.router.read(path, hints, stripped.body, size)
            self.routing = replace(routing, runs=route.runs, warms=route.warms)
            if route.runs and self._services.request_log.detector is not None:
                self.prompt_diagnosis = self._services.request_log.detector.diagnose(
                    path, self._head.fields, hints, stripped, routing, self._request.body
                )
        self._charge = self._services.rate_limits.admit(
            self._head.tenant, self.routing.prompt_tokens
        )

    def _prefilled_protocol(self, document: Any) -> Protocol | None:
        """The protocol that the body of /v1/prefill speaks, as the engine will detect it."""
        named = parse_qs(self._head.target.partition(b"?")[2].decode("latin-1")).get("protocol")
        headers = {name.decode("latin-1"): "" for name in self._head.fields}
        return detect(headers, named[-1] if named else None, document)

    def _send(self) -> None:
        """To a worker if there is one for it now, or to the control plane."""
        if self._head.route is None:
            self._go()
        else:
            self._waited = ""
            if not self._services.admission_queue.place(self):
                self._waited = "room"

    def _go(self) -> None:
        """Sends over a connection that was kept, or over a new one."""
        if self._ended:
            return
        if self._waited:
            self.queued_s = time.perf_counter() - self._arrived
            self._services.metrics.queue_s.observe(self._waited, self.queued_s)
        kept = self._pool.take()
        if kept is not None:
            self.connected(kept)
        else:
            self._pool.connect(self)

    def connected(self, connection: UpstreamConnection) -> None:
        """Sends the request."""
        if self._ended:
            self._pool.keep(connection)
            return
        self._connection = connection
        head, body = self._head, self._request.body
        lines = self._pool.request_line(head.method, head.target) + head.upstream_lines
        if self.queued_s:
            lines += b"%b: %.3f\r\n" % (_QUEUED, self.queued_s)
        if body or head.method not in ("GET", "HEAD"):
            lines += b"content-length: %d\r\n\r\n" % len(body)
        else:
            lines += b"\r\n"
        connection.send(self, lines, body, head.method)

    def response_head(self, head: ResponseHead) -> None:
        """The answer's head has come."""
        self._status, self._reason = head.status, head.reason
        self._lines, self._streams = head.lines, head.streams
        if not head.is_named:
            self._lines += id_line(errors_of(self._head.path), self._name())

    def response_data(self, data: bytes) -> None:
        """A part of the answer's body: relayed if it streams, kept otherwise."""
        if not self._streams:
            self._pieces.append(data)
            return
        if self._events is not None or not data.endswith(b"\n\n"):
            data = self._whole_events(data)
        if data:
            self._relay(data)

    def response_end(self) -> None:
        """The answer is complete."""
        self._connection = None
        if self._streams:
            if self._events is not None and (rest := self._events.rest()):
                self._relay(rest)
            if not self._begun:
                self._start_stream()
            self._finish(Outcome.ANSWERED)
            self._client.end_stream()
        elif self._status == HTTPStatus.SERVICE_UNAVAILABLE and self._may_go_elsewhere():
            self._try_again("status 503")
        else:
            pieces = self._pieces
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            if self._recorder is not None and self._status == HTTPStatus.OK:
                body = self._recorder.record_body(body)
            self.first_data = self.last_data = body
            self._first_byte()
            self._finish(Outcome.ANSWERED)
            self._client.answer(self._status, self._reason, self._lines, body)

    def connect_failed(self, reason: str) -> None:
        """No connection could be had: the worker takes no requests."""
        if self._ended:
            return
        if self._attempt is not None:
            self._services.workers.mark(self._attempt.worker, ready=False)
        self._try_again(reason)

    def upstream_lost(self, reason: str) -> None:
        """The connection broke before the answer was complete."""
        connection, self._connection = self._connection, None
        if self._begun:
            self._cut(reason)
        elif connection is not None and connection.reused and not connection.heard:
            # The worker closed a kept connection just as it was used, and is not to blame.
            self._pool.connect(self)
        else:
            self._accepted = True
            self._try_again(reason)

    def worker_failed(self, reason: str) -> None:
        """The worker will not answer; while it is being connected to, that says so itself."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
            self.upstream_lost(reason)

    def client_gone(self) -> None:
        """The client left: the worker need not go on."""
        self._services.metrics.client_disconnects.inc()
        if self._connection is not None:
            self._connection.abort()
        self._finish(Outcome.CLIENT_GONE)

    def resume(self) -> None:
        """The client takes more again."""
        if self._connection is not None:
            self._connection.resume()

    def story(self) -> tuple[str, int, int, float, float]:
        """Route, status, attempts, and the seconds to the first byte and in all."""
        route = self._head.route
        label = "" if route is None else route.label
        total_s = time.perf_counter() - self._arrived
        return label, self._status, self._attempts, self._first_byte_s, total_s

    # The parts of these steps.

    def _name(self) -> str:
        """What the client and the log call the request, unless the worker names it."""
        if not self._request_id:
            self._request_id = new_request_id()
        return self._request_id

    def _whole_events(self, data: bytes) -> bytes:
        if self._events is None:
            self._events = WholeEvents()
        return self._events.take(data)

    def _relay(self, data: bytes) -> None:
        if self._recorder is not None:
            data = self._recorder.record_events(data)
        if self._begun:
            self._client.write(data)
        else:
            self.first_data = data
            self._start_stream(data)
        if data != _DONE and not data.startswith(_STOP):
            self.last_data = data
        self._events_sent += data.count(b"\n\n")
        if self._client.paused and self._connection is not None:
            self._connection.pause()

    def _start_stream(self, data: bytes = b"") -> None:
        self._client.start_stream(self._status, self._reason, self._lines, data)
        self._first_byte()

    def _cut(self, reason: str) -> None:
        """Ends a stream that cannot go on in its protocol's error event."""
        self._services.metrics.cut_streams.inc()
        log.warning("%s cut the stream of %s: %s", self._pool.url, self._name(), reason)
        message = "The engine stopped in the middle of its answer."
        shape = errors_of(self._head.path)
        self._client.write(shape.event(message, self._events_sent, self._name()))
        self._finish(Outcome.CUT)
        self._client.end_stream()

    def _try_again(self, reason: str) -> None:
        """Forgets what the worker said so far, and asks another."""
        log.warning("%s failed before it answered %s: %s", self._pool.url, self._name(), reason)
        self._released(Outcome.FAILED)
        self._pieces.clear()
        self._events = None
        self._streams = False
        if self._head.route is None:
            self._answer_error(_internal_error())
        elif self._attempts >= MAX_ATTEMPTS:
            self.refused(no_engine())
        elif not self._services.retries.spend():
            self._services.metrics.retries_rejected.inc()
            self.refused(no_engine())
        else:
            self._send()

    def _may_go_elsewhere(self) -> bool:
        """Whether an engine's own refusal is worth asking another engine."""
        if self._attempt is None or self._attempts >= MAX_ATTEMPTS:
            return False
        return self._services.router.any_available(besides=self.tried)

    def _answer_error(self, error: BalancerError) -> None:
        self._services.rate_limits.settle(self._charge, 0)
        self._released(Outcome.FAILED)
        self._ended = True
        answer = refusal(self._head.path, error, self._name())
        self._services.count(self._head.path, answer[0])
        self._client.answer(*answer)

    def _finish(self, outcome: Outcome) -> None:
        """The last thing that happens at a worker."""
        self._services.rate_limits.settle(self._charge, self._spent(outcome))
        self._ended = True
        self._released(outcome)
        route = self._head.route
        if route is not None and outcome is not Outcome.CLIENT_GONE:
            self._services.metrics.requests.counts[route.label, self._status] += 1

    def _spent(self, outcome: Outcome) -> int | None:
        """What the request cost in tokens, as far as that is known."""
        if self._charge is None:
            return None
        if not self._attempts or self._status >= HTTPStatus.BAD_REQUEST:
            return 0
        if outcome is not Outcome.ANSWERED:
            return None
        usage = read_usage(self.first_data, self.last_data)
        return None if usage is None else usage.computed_tokens


def _internal_error() -> BalancerError:
    return BalancerError(HTTPStatus.INTERNAL_SERVER_ERROR, "Internal error in the balancer.")
