"""The life of one request between a client and a worker, as one coroutine: `Exchange._run`.

    read -> admit -> place -> connect, send -> relay -> end: answer and account
                      ^                          |
                      +------ AttemptFailed -----+   until a part of the answer is sent

Its connection has received it, and its key was checked with its head. What the coroutine waits for
is reported by callbacks: of the admission queue and the trials, of the connection to the worker,
and of the probes, which find that a worker hangs. They resume the coroutine at once, so that it
needs no task: that would take 10 us, and another round of the event loop for each step. A part of
an answer is passed on where it arrives, without the coroutine. Two things end a request without it,
too: its client leaves, or the balancer ends. After that the coroutine finds the request ENDED, and
ends.

If a worker fails before the first byte of its response reached the client, the request goes to
another worker. A request that the failed worker had received may be the cause of the failure. Then
it waits for its trial (`Trials` in `routing/admission.py`), and may be refused. After MAX_LOST such
failures a request goes to no other worker. The retry budget limits only
the retries of requests that an engine answered with 503. After the first byte a request is not
replayed, and a cut stream ends in the protocol's error event.

When the client disconnects, the connection to the worker is closed, and the engine aborts. What a
model answers waits for a moment before that, as its client may send the request again (`resends`).
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Coroutine, Generator
from copy import copy
from enum import Enum
from functools import partial
from http import HTTPStatus
from types import coroutine
from typing import Any, Protocol, TypeVar

import orjson
from msgspec import structs

from sgl_ext.balancer.conversations.expansion import Named
from sgl_ext.balancer.conversations.response_turns import LaneTurns
from sgl_ext.balancer.http.downstream import Client
from sgl_ext.balancer.http.request_reader import Request
from sgl_ext.balancer.http.upstream import (
    STREAM_LINES,
    ConnectionPool,
    ResponseHead,
    Upstream,
)
from sgl_ext.balancer.metrics.registry import band
from sgl_ext.balancer.relay.preparation import (
    NOT_PREPARED,
    Preparation,
    Recorder,
    make_context,
    plan_of,
    prepare,
)
from sgl_ext.balancer.relay.reading import Reading, ReadPlan, with_model, without_usage
from sgl_ext.balancer.relay.resends import MAX_SENT_BYTES, NO_CLIENT, PeerPool, resend_key
from sgl_ext.balancer.relay.services import Services
from sgl_ext.balancer.reporting.request_log import (
    Course,
    End,
    EndedRequest,
    Finding,
    Name,
    Outcome,
    ended_request,
)
from sgl_ext.balancer.reporting.spans import RequestSpans
from sgl_ext.balancer.routing.admission import fingerprint_of
from sgl_ext.balancer.routing.models import ModelPool
from sgl_ext.balancer.routing.routing_request import NO_ROUTING
from sgl_ext.balancer.routing.worker import Attempt, Worker
from sgl_ext.limits.bounds import LARGE_BODY_BYTES
from sgl_ext.protocols.cache_diagnostics import find_event, with_diagnosis
from sgl_ext.protocols.errors import (
    BalancerError,
    error_type,
    internal_error,
    no_engine,
    shutting_down,
)
from sgl_ext.protocols.request_ids import RequestName
from sgl_ext.protocols.responses import RESPONSES
from sgl_ext.reading.usage import Usage, read_items, read_usage
from sgl_ext.wire.headers import (
    HINTS_HEADER,
    MODEL_HEADER,
    REFUSED_LINE,
    bootstrap_line,
    conversation_line,
    header_line,
    queued_lines,
    retry_line,
)

# The last events of OpenAI's and of Anthropic's streams, which carry no content.
_DONE = b"data: [DONE]\n\n"
_STOP = b"event: message_stop\n"
# Items of a stream of several prompts: SGLang numbers them at the end of each event.
_ITEM = re.compile(rb'"index":\s*(\d{1,9})\}\s*\Z')
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")


class Response:
    """The response to one attempt.

    lines: the header lines for the client.
    events_sent: how many events of a stream were sent to the client.
    """

    def __init__(self, head: ResponseHead, lines: bytes, *, sums_items: bool = False) -> None:
        """sums_items: whether its usage is that of all its items, and not of the last event."""
        self.head = head
        self.lines = lines
        self.events_sent = 0
        self._first_data = b""
        self._last_data = b""
        self._collected = bytearray()
        self._items: dict[bytes, bytes] | None = {} if sums_items else None

    def take(self, data: bytes) -> bytes:
        """Takes a part of the body. Returns the whole events that can be sent now, so that a stream
        that is cut ends with a complete event."""
        collected = self._collected
        if not self.head.streams:
            collected += data
            return b""
        if not collected and data.endswith(b"\n\n"):
            return data
        searched = max(0, len(collected) - 3)
        collected += data
        at, mark = max((collected.rfind(mark, searched), mark) for mark in _EVENT_ENDS)
        if at < 0:
            return b""
        whole = bytes(collected[: at + len(mark)])
        del collected[: at + len(mark)]
        return whole

    @property
    def first_data(self) -> bytes:
        """The first events, or the whole body, that were sent to the client."""
        return self._first_data

    @property
    def held_bytes(self) -> int:
        """The size of what is collected."""
        return len(self._collected)

    def end(self, last: bytes) -> bytes:
        """The last part has arrived. Returns the collected body, or what follows the last whole
        event that `take` returned of a stream."""
        collected = self._collected
        if not collected:
            return last
        collected += last
        return bytes(collected)

    def sent(self, data: bytes) -> None:
        """Records events, or a whole body, that are sent to the client."""
        if not self._first_data:
            self._first_data = data
        if data != _DONE and not data.startswith(_STOP):
            self._last_data = data
        if not self.head.streams:
            return
        self.events_sent += data.count(b"\n\n")
        if self._items is not None:
            for event in data.split(b"\n\n"):
                if (item := _ITEM.search(event)) is not None:
                    self._items[item[1]] = event

    def usage(self) -> Usage | None:
        """The usage that the answer states; None if it states none."""
        if self._items:
            return read_items(self._items.values())
        return read_usage(self._first_data, self._last_data)


NO_RESPONSE = Response(ResponseHead(0, b""), b"")
"""Stands for the response before there is one."""


# How long the decode engine has to answer what its prefill engine rejects, as it rejects it, too.
_ANSWER_S = 2.0


_ROOMS = 10**17


def hand_over_line(prefill: Worker) -> bytes:
    """The header line by which two engines find each other for a request."""
    return bootstrap_line(prefill.bootstrap, secrets.randbelow(_ROOMS))


class Failed(Protocol):
    def __call__(self, reason: str, /, *, answered: bool) -> None: ...


class PrefillRequest:
    """A request as its prefill engine gets it, which hands the KV over to the decode engine.

    failed: called with the reason, and whether the engine answered an error.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        lines: bytes,
        body: bytes | bytearray,
        failed: Failed,
    ) -> None:
        """lines: the whole head. It is sent at once."""
        self._pool = pool
        self._lines = lines
        self._body = body
        self._failed = failed
        self._status = 0
        self._connection: Upstream | None = None
        self._connecting: asyncio.Task[None] | None = None
        if (idle := pool.lease()) is not None:
            self.connected(idle)
        else:
            self._connecting = pool.connect(self)

    def abort(self) -> None:
        """The answer is complete, or will not come: the engine need not go on."""
        if self._connection is not None:
            self._connection.abort()
        if self._connecting is not None:
            self._connecting.cancel()
        self._connection = self._connecting = None

    def connected(self, connection: Upstream) -> None:
        self._connecting, self._connection = None, connection
        connection.send(self, self._lines, self._body, "POST")

    def connect_failed(self, reason: str) -> None:
        self._connecting = None
        self._failed(reason, answered=False)

    def response_head(self, head: ResponseHead) -> None:
        self._status = head.status

    def response_data(self, data: bytes) -> None:
        pass

    def response_end(self, last: bytes) -> None:
        self._connection = None
        failed = partial(self._failed, f"status {self._status}", answered=True)
        if self._status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            failed()
        elif self._status != HTTPStatus.OK:
            asyncio.get_running_loop().call_later(_ANSWER_S, failed)

    def upstream_lost(self, reason: str) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and connection.reused and not connection.heard:
            self._connecting = self._pool.connect(self)
        else:
            self._failed(reason, answered=False)


MAX_ATTEMPTS = 3
# How often a request may be at an engine that fails, although it was not found to be the cause.
MAX_LOST = 4
# Plain numbers: a member of an enumeration takes as long to look up as a call.
OK, _BAD_REQUEST, _UNAUTHORIZED, _SERVER_ERROR, _UNAVAILABLE = 200, 400, 401, 500, 503
# A smaller answer is not counted when it is complete: it is sent at once.
_UNHELD_BYTES = 16 * 1024
_WAITING_LINES = b"content-type: text/event-stream\r\n" + STREAM_LINES
_ENGINE_STOPPED = "The engine stopped in the middle of its answer."

log = logging.getLogger(__name__)
T = TypeVar("T")


class Stage(Enum):
    """How far a request has come."""

    BEFORE_FIRST_BYTE = "nothing was sent to the client; it may be sent to another worker"
    WAITING = "the client knows that it waits; it may be sent again, and an error is an event"
    RELAYING = "a part of the response was sent to the client"
    ENDED = "the response is complete, or the client is gone"


BEFORE_FIRST_BYTE, WAITING, RELAYING, ENDED = Stage


class AttemptFailed(Exception):
    """A worker does not answer the request. It may be sent to another one.

    by_worker: the worker is to blame. answered: it answered an error.
    """

    def __init__(self, reason: str, *, by_worker: bool = True, answered: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.by_worker = by_worker
        self.answered = answered


class _StaleConnection(Exception):
    """The worker closed an idle connection just when it was used. The worker is not to blame."""


class _Over(Exception):
    """The request was ended by something else than its coroutine."""


@coroutine
def _pause() -> Generator[None, None, None]:
    """Leaves the coroutine until it is resumed."""
    yield


class Way(Protocol):
    """How requests reach engines: over the balancer's own connections, or by a gateway.

    may_be_resent: whether a client that leaves may send its request again.
    is_final: whether a request that was sent cannot be sent to another engine from here.
    """

    may_be_resent: bool
    is_final: bool

    def check(self, preparation: Preparation) -> Preparation:
        """The preparation of a request for this way. Raises BalancerError if it cannot go it."""
        ...

    def to_engine(self, attempt: Attempt) -> Upstream | None:
        """What the request is sent on; None for a connection of the balancer. Raises
        BalancerError."""
        ...


class OwnConnections:
    """The way over the balancer's own connections."""

    may_be_resent = True
    is_final = False

    def check(self, preparation: Preparation) -> Preparation:
        return preparation

    def to_engine(self, attempt: Attempt) -> Upstream | None:
        return None


OWN_CONNECTIONS = OwnConnections()


class Exchange:
    """One request and its response. `tried`: the workers that it was sent to."""

    # How a request begins. Most requests change few of these.
    _stage = BEFORE_FIRST_BYTE
    _is_waiting = False  # for a callback
    _work: asyncio.Task[Any] | None = None  # that it waits for
    _failure: Exception | None = None  # that the coroutine has not taken up yet
    _preparation = NOT_PREPARED
    routing = NO_ROUTING
    _answer_lines = b""
    _spans: RequestSpans | None = None
    # Its attempts.
    _attempt: Attempt | None = None
    _last_attempt: Attempt | None = None  # whether it runs or has ended
    _attempts = 0
    _connection: Upstream | None = None
    _connecting: asyncio.Task[None] | None = None
    _prefill_request: PrefillRequest | None = None
    _is_sent = False  # in this attempt
    _is_answered = False  # the whole response to this attempt has arrived
    _wait_reason = ""
    _is_listed = False  # the control plane answers what an engine could
    _is_charged = False  # its tenant pays for it, or its key does
    _has_fallback = False  # another model's engines answer than those of its own
    _queued_s = 0.0
    _prefix_s = 0.0  # of these it waited for a prefix
    _lost = 0  # attempts that were sent to a worker that failed
    _is_run = False  # whether a scheduler runs it
    _on_trial = False
    _is_released = False  # its trial may begin, or it needs none
    _fingerprint = ""  # if it was needed
    waits_since_s: float | None = None
    # Its response.
    _last = b""  # its last part
    _response = NO_RESPONSE
    _counted_bytes = 0
    _ttft_s = 0.0
    # If a client may ask for this answer again: the key of its request, and what was sent of it.
    _resend_key = b""
    _sent: bytearray | None = None
    _is_left = False
    _paid_tokens: int | None = None  # when its client left
    # The same request, sent earlier, that answers in place of this one.
    _earlier: "Exchange | None" = None
    _holder: PeerPool | None = None  # the process that has that one, if it is another

    def __init__(
        self,
        services: Services,
        client: Client,
        request: Request,
        turns: LaneTurns | None = None,
        way: Way = OWN_CONNECTIONS,
    ) -> None:
        """turns: what its connection remembers, if that is a WebSocket."""
        self._arrived_s = time.perf_counter()
        self._services = services
        self._client = client
        self._turns = turns
        self._way = way
        self._request = request
        self._head = head = request.head
        self._pool = services.control
        self._model = services.models.default
        stated, export = head.identity, services.span_export
        # Without an export here, the engine's own tracing decides.
        self._name = RequestName(
            head.errors, stated.request_id, stated.trace, is_sampled=export is None
        )
        self.tried: set[Worker] = set()
        if export is not None and head.route is not None:
            is_sampled = None if stated.trace is None else stated.trace.is_sampled
            if export.records(self._name.trace_id, is_sampled):
                self._spans = RequestSpans(head, self._name.trace_id, self._arrived_s)

    def begin(self) -> None:
        """Answers the request, from now on."""
        self._life = self._run()
        self._resume()

    async def _run(self) -> None:
        """The life of the request."""
        try:
            await self._read()
            await self._admit()
            while True:
                try:
                    attempt = await self._place()
                    self.send(await self._connect(attempt))
                    body = await self._relay()  # callbacks relay what streams
                    break
                except AttemptFailed as failure:
                    self._retry(failure)
            await self._end_answer(body)
        except _Over:
            pass
        except Exception as error:
            self._fail(error)

    async def _news(self) -> None:
        """Waits for the next callback. Raises why it failed."""
        if self._failure is None and self._stage is not ENDED:
            self._is_waiting = True
            await _pause()
        if self._stage is ENDED:
            raise _Over
        failure, self._failure = self._failure, None
        if failure is not None:
            try:
                raise failure
            finally:  # else the error and this frame keep each other
                del failure

    async def _done(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work that takes time, and that goes on if the client leaves meanwhile."""
        self._work = task = asyncio.create_task(work)  # an event loop keeps no reference to it
        task.add_done_callback(self._worked)
        await _pause()
        self._work = None
        if self._stage is ENDED and (task.cancelled() or task.exception() is None):
            raise _Over
        return task.result()

    def _worked(self, task: "asyncio.Task[Any]") -> None:
        if task.cancelled():
            self._life.close()
        else:
            self._resume()

    def _wake(self) -> None:
        """Resumes the coroutine if it waits for a callback."""
        if self._is_waiting:
            self._is_waiting = False
            self._resume()

    def _resume(self) -> None:
        try:
            self._life.send(None)
        except StopIteration:
            return  # the request has ended

    def _break(self, failure: Exception) -> None:
        """The coroutine raises this where it waits, or will wait. The first failure counts."""
        if self._failure is None:
            self._failure = failure
        self._wake()

    # Read and admit.

    async def _read(self) -> None:
        """Reads the body, and finds out which model and which engines the request is for. A large
        body, and what a request names of the store, take time."""
        services, head, request = self._services, self._head, self._request
        if self._stage is ENDED:
            raise _Over
        for name in head.identity.replaced:
            services.metrics.identities_replaced.counts[(name,)] += 1
        if request.rejection is not None:
            raise request.rejection
        preparation = NOT_PREPARED
        plan: ReadPlan | None = head.derived or plan_of(services, head)
        if plan is None:
            self._is_charged = services.rate_limits.charges(head.tenant, head.key)
            self._is_listed = head.route is not None and services.models.lists(head.path)
        else:
            self._is_charged = plan.is_charged
            if self._turns is not None:
                plan = plan._replace(remembers=True)
            preparation = await self._prepare(plan)
        self._preparation = preparation = self._way.check(preparation)
        self.routing = routing = preparation.routing
        if preparation.hints:
            hints = ", ".join(preparation.hints).encode("ascii")
            self._answer_lines += header_line(HINTS_HEADER, hints)
        if preparation.pool is not None:
            self._model = preparation.pool
            if preparation.falls_back:
                self._falls_back(preparation.pool)
        # A scheduler runs it, so that it could end one.
        self._is_run = routing.runs or routing.warms

    async def _prepare(self, plan: ReadPlan) -> Preparation:
        services, request, models = self._services, self._request, self._services.models
        tenant, body = self._head.tenant, request.body
        reading: Reading | Named | None = None
        if len(body) <= LARGE_BODY_BYTES:
            reading = services.bodies.reader.read(plan, body)
        if not isinstance(reading, Reading):
            work = services.bodies.read(tenant, plan, body, reading, self._turns)
            reading = await self._done(work)
        if self._spans is not None:
            self._spans.read(reading.model)
        if plan.runs and self._is_answered_by_earlier():
            raise _Over  # the same request, sent earlier, answers
        if self._holder is not None and await self._is_passed_on(self._holder, reading):
            raise _Over
        meant = models.named(reading.model)
        name = models.name_for_engine(reading.model, is_checked=reading.path in RESPONSES.paths)
        pool = models.serving(meant)
        if name is not None:
            request.body = body = with_model(body, name)
            reading = await self._done(services.bodies.read(tenant, plan, body, None, self._turns))
        preparation = prepare(services, request, plan, reading, pool, self._turns)
        return preparation if pool is meant else structs.replace(preparation, falls_back=True)

    async def _admit(self) -> None:
        """Charges the request's tenant, and makes a context of the request if it asks for one."""
        services, preparation = self._services, self._preparation
        if preparation.beat:
            services.heartbeats.begin(self)
        if self._is_charged:
            await self._charge()
        services.retries.add_request()
        if path := preparation.context_path:
            names_stored = bool(preparation.saved_bytes)
            making = make_context(services, self._request, path, names_stored=names_stored)
            self._answer_lines += await self._done(making)

    async def _charge(self) -> None:
        """Charges the request's tenant for what it claims of an engine, until its cost is known."""
        limits, tenant, model = self._services.rate_limits, self._head.tenant, self._answers()
        claimed_tokens = self.routing.prompt_tokens + self.routing.output_tokens
        # What was leased may be put back, or taken by another request, before this one goes on.
        while (lease := limits.lease(tenant, claimed_tokens, model)) is not None:
            await self._done(lease)
        charge = limits.admit(tenant, claimed_tokens, self._head.key, model)
        self._preparation = structs.replace(self._preparation, charge=charge)

    # Place and send.

    async def _place(self) -> Attempt | None:
        """Waits for a trial if the request is suspected, then for a worker with capacity, and then
        until the prefix that its attempt follows is computed. None for the control plane."""
        if self._head.route is None or self._is_listed:
            return None
        services = self._services
        while True:
            self._is_released = False
            if not self._on_trial and self._is_run and not self._model.trials.admits(self):
                await self._trial()
                continue
            self._wait_reason = ""
            if self._spans is not None:
                self._spans.waits()
            if not self._model.queue.place(self):
                self._wait_reason = "capacity"
            while (attempt := self._attempt) is None:
                await self._news()
            if not self._on_trial or self._model.trials.may_send(self, attempt):
                break
            self._on_trial, self._attempt = False, None
            self._model.router.attempts.fail(attempt, by_worker=False)
            await self._trial()
        if self._spans is not None:
            self._spans.placed(attempt, self._wait_reason)
        reason = attempt.placement.reason
        services.metrics.placements.counts[(reason,)] += 1
        if self.tried:
            services.metrics.retries.inc()
        self._attempts += 1
        self.tried |= {attempt.worker, attempt.answerer}
        if reason == "home" and not self._on_trial and len(self._model.workers.all) > 1:
            name = self._name.request_id
            self._model.standby.consider(attempt, self._head, self._request.body, name)
        if attempt.follows is not None and attempt.waits_for_prefix(
            partial(self._prefix_computed, attempt)
        ):
            self._wait_reason = "prefix"
            began_s = time.perf_counter()
            await self._news()
            self._prefix_s += time.perf_counter() - began_s
        return attempt

    async def _trial(self) -> None:
        """Waits until the trial of the request begins, or until it is not suspected any more."""
        while not self._is_released:
            await self._news()

    async def _connect(self, attempt: Attempt | None) -> Upstream:
        """A connection to the attempt's worker, or what its way has in place of one; without an
        attempt, one to the control plane in this process."""
        services = self._services
        if self._wait_reason:
            self._queued_s = time.perf_counter() - self._arrived_s
            services.metrics.queue_s.observe(self._wait_reason, self._queued_s)
            if self._spans is not None:
                self._spans.connects(self._wait_reason)
        if attempt is not None:
            self._connection = self._way.to_engine(attempt)
            self._pool = services.connections.to(attempt.answerer)
        connection = self._connection = self._connection or self._pool.lease()
        return connection or await self._opened()

    async def _opened(self) -> Upstream:
        """A connection that is opened now."""
        self._connecting = self._pool.connect(self)
        while (connection := self._connection) is None:
            await self._news()
        return connection

    def send(self, connection: Upstream) -> None:
        """Sends the request."""
        self._connecting, self._is_sent = None, True
        attempt, head, body = self._attempt, self._head, self._request.body
        if attempt is not None and attempt.sent_s is None:
            self._model.router.attempts.sent(attempt)
            if self._on_trial:
                self._model.trials.sent(self, attempt)
        lines = self._pool.begin_of(head) + self._preparation.lines
        if self._attempts > 1:
            lines += retry_line(self._attempts - 1)
        if self._queued_s:
            lines += queued_lines(self._queued_s, self._model.queue.window_s)
        lines += conversation_line(self.routing.agent)
        end = "\r\n"
        if body or head.method not in ("GET", "HEAD"):
            end = f"content-length: {len(body)}\r\n\r\n"
        trace_lines = self._name.trace_lines
        if self._spans is not None:  # it goes on at the span of this attempt
            trace_lines = self._spans.sent(self._pool.url, self._attempts).lines
        lines += f"x-request-id: {self._name.request_id}\r\n{trace_lines}{end}".encode()
        if attempt is not None and attempt.decoder is not None:
            first = self._pool.request_line(head.method, head.target)
            lines = self._prefill(attempt, first, lines)
        connection.send(self, lines, body, head.method)

    def _prefill(self, attempt: Attempt, first: bytes, lines: bytes) -> bytes:
        """Sends the request to the prefill engine, too. Returns its lines for the decode engine:
        both find each other by one of them."""
        head, pool = self._head, self._services.connections.to(attempt.worker)
        rest = hand_over_line(attempt.worker) + lines[len(first) :]
        failed = partial(self._prefill_failed, attempt)
        whole = pool.request_line(head.method, head.target) + rest
        self._prefill_request = PrefillRequest(pool, whole, self._request.body, failed)
        return first + rest

    # The admission queue and the trials call these.

    @property
    def fingerprint(self) -> str:
        """As of a `Suspect`."""
        if not self._fingerprint:
            tenant, body = self._head.tenant, self._request.body
            self._fingerprint = fingerprint_of(tenant, self.routing, body)
        return self._fingerprint

    def release(self, *, on_trial: bool) -> None:
        """The request, which waited for its trial, may be placed."""
        self._on_trial, self._is_released = on_trial, True
        self._wake()

    def refuse(self, error: BalancerError) -> None:
        """No engine may get the request."""
        self._break(error)

    def placed(self, attempt: Attempt) -> None:
        """An attempt has begun."""
        self._attempt = self._last_attempt = attempt
        self._is_sent = self._is_answered = False
        self._wake()

    def rejected(self, error: BalancerError) -> None:
        """No worker takes the request. It goes to those of another model if that may answer."""
        other = None if self._has_fallback else self._services.models.instead_of(self._model)
        if other is None:
            self._break(self._rejection(error))
            return
        self._falls_back(other)
        if not other.queue.place(self):
            self._wait_reason = "capacity"

    def _falls_back(self, model: ModelPool) -> None:
        """Another model answers than the one that the request means. Its client learns that."""
        self._model, self._has_fallback = model, True
        self._answer_lines += header_line(MODEL_HEADER, model.name.encode("ascii", "replace"))

    def _rejection(self, error: BalancerError) -> BalancerError:
        if not self._lost:
            return error
        return BalancerError(HTTPStatus.BAD_GATEWAY, "The engine failed before it answered.")

    def _prefix_computed(self, attempt: Attempt) -> None:
        """The prefix that the attempt follows is computed, or its attempt has ended."""
        # If the worker hangs or stands still, this attempt is abandoned, too.
        is_used = not attempt.worker.is_hung and not attempt.worker.is_stalled
        if attempt is self._attempt and (is_used or not self._model.router.any_available()):
            self._wake()

    # What fails an attempt.

    def connected(self, connection: Upstream) -> None:
        self._connection = connection
        self._wake()

    def connect_failed(self, reason: str) -> None:
        """The worker accepts no connections."""
        self._connecting = None
        if self._attempt is not None:
            if self._is_sent:  # on a connection that broke before
                self._note_loss(self._attempt.answerer)
            self._services.workers.mark(self._attempt.answerer, ready=False, cause=reason)
        self._break(AttemptFailed(reason))

    def upstream_lost(self, reason: str) -> None:
        """The connection broke before the response was complete."""
        connection, self._connection = self._connection, None
        is_unused = connection is not None and connection.reused and not connection.heard
        if is_unused and self._stage is not RELAYING:
            self._break(_StaleConnection())
            return
        self._note_loss()
        self._break(AttemptFailed(reason))

    def abandon(self, reason: str) -> None:
        """The worker will not answer, whether the request was sent to it, connects or waits for a
        prefix."""
        if self._is_answered or self._failure is not None:  # it is being stored, or sent again
            return
        self._disconnect()
        if self._is_sent:
            self._note_loss()
        self._break(AttemptFailed(reason))

    def _prefill_failed(self, attempt: Attempt, reason: str, *, answered: bool) -> None:
        """The prefill engine failed: the decode engine would wait for its KV."""
        may_fail = self._stage in (BEFORE_FIRST_BYTE, WAITING) and not self._is_answered
        if attempt is self._attempt and may_fail:
            attempt.worker.breaker.failed(time.monotonic(), answered=answered)
            if not answered:
                self._note_loss(attempt.worker)
            self._disconnect()
            self._break(AttemptFailed(f"prefill: {reason}", by_worker=False))

    def _note_loss(self, worker: Worker | None = None) -> None:
        """The request was sent to a worker that failed: this one, or that of its attempt."""
        self._lost += 1
        self._on_trial = False
        attempt = self._attempt
        if attempt is not None and attempt.sent_s is not None and self._is_run:
            self._model.trials.lost(self, worker or attempt.answerer, attempt.sent_s)

    def _retry(self, failure: AttemptFailed) -> None:
        """Ends an attempt that failed. Raises an error if the request is not placed again."""
        if self._stage is RELAYING:
            self._cut(failure.reason)
            raise _Over
        self._warn("attempt failed", failure.reason)
        if self._spans is not None:
            self._spans.upstream_ended(failure.reason)
        self._end_attempt(by_worker=failure.by_worker, answered=failure.answered)
        self._response = NO_RESPONSE
        if self._way.is_final:
            self._lost = max(self._lost, 1)
            raise self._rejection(no_engine())
        if self._head.route is None or self._is_listed:
            raise internal_error()
        if self._lost >= MAX_LOST or (self._lost and self._model.trials.refuses(self)):
            message = f"Engines failed {self._lost} times before they answered this request."
            raise BalancerError(HTTPStatus.BAD_GATEWAY, message)
        untried = self._model.router.any_available(self.tried, self.routing.only)
        if not untried and self._attempts >= MAX_ATTEMPTS + self._lost:
            raise self._rejection(no_engine())

    def _end_attempt(self, *, by_worker: bool, answered: bool = False) -> None:
        """Ends an attempt that failed, or leaves the admission queue."""
        self._abort_prefill()
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            self._model.queue.remove(self)
            self._model.trials.remove(self)
        else:
            self._model.router.attempts.fail(attempt, by_worker=by_worker, answered=answered)

    def _abort_prefill(self) -> None:
        request, self._prefill_request = self._prefill_request, None
        if request is not None:
            request.abort()

    def _disconnect(self) -> None:
        self._abort_prefill()
        connection, self._connection = self._connection, None
        connecting, self._connecting = self._connecting, None
        if connection is not None:
            connection.abort()
        if connecting is not None:
            connecting.cancel()

    # Relay the response: its parts where they arrive.

    def response_head(self, head: ResponseHead) -> None:
        """Takes the response's head."""
        lines = head.lines + self._named_lines()
        if head.streams and self._head.route is not None:
            lines += head.stream_lines
        self._response = Response(head, lines, sums_items=self._preparation.sums_items)

    def response_data(self, data: bytes) -> None:
        """Relays whole events of a stream; any other body is collected."""
        if data := self._response.take(data):
            self._relay_events(data)
        elif not self._hold():
            self._give_up("the answer is larger than the byte budget", _too_large())

    def response_end(self, last: bytes) -> None:
        """The whole response has arrived, with its last part."""
        self._connection = None
        self._is_answered, self._last = True, last
        self._wake()

    async def _relay(self) -> bytes:
        """Waits for the end of the response, whose parts callbacks relay as they arrive. Returns
        the part that was not relayed."""
        try:
            await self._news()
        except _StaleConnection:
            self.send(await self._opened())
            await self._news()
        response = self._response
        head, body = response.head, response.end(self._last)
        is_held = not head.streams and (
            self._preparation.recorder is not None or len(body) > _UNHELD_BYTES
        )
        if is_held and not self._request.hold.set(len(self._request.body) + len(body)):
            raise _too_large()
        if head.status == _UNAUTHORIZED and self._is_refused(head):
            raise AttemptFailed("it refuses the engine-secret", by_worker=False)
        if (
            head.status == _UNAVAILABLE
            and not self._streams(body)
            and 0 < self._attempts < MAX_ATTEMPTS
            and self._model.router.any_available(besides=self.tried)
            and self._has_budget()
        ):
            raise AttemptFailed("status 503", answered=True)
        if self._preparation.turn is not None and body and head.status == OK and not head.streams:
            body = self._with_cache_diagnosis(body, streams=False)
        return body

    def _streams(self, rest: bytes) -> bool:
        """Whether the answer is a stream. One of no events is answered as a whole."""
        return self._response.head.streams and (bool(rest) or self._stage is not BEFORE_FIRST_BYTE)

    def _is_refused(self, head: ResponseHead) -> bool:
        """Whether the worker refuses the balancer, and not the client; then the request is sent to
        another. It is no failure: a probe finds when the worker can be used again."""
        attempt = self._attempt
        if attempt is None or REFUSED_LINE not in head.lines:
            return False
        self._services.workers.note_secret(attempt.answerer, refused=True)
        return True

    def _has_budget(self) -> bool:
        if self._way.is_final:  # an engine's own 503 is passed on
            return False
        has_budget = self._services.retries.spend()
        if not has_budget:
            self._services.metrics.retries_rejected.inc()
        return has_budget

    async def _stored(self, recorder: Recorder, body: bytes, *, streams: bool) -> bytes:
        """Stores an answer. Returns the rest of its stream, or the whole answer."""
        if streams:
            return await self._done(recorder.record_end()) if recorder.holds_end else b""
        if self._response.head.status != OK:
            return body
        return await self._done(recorder.record(body))

    def _relay_events(self, data: bytes) -> None:
        if self._preparation.turn is not None:
            data = self._with_cache_diagnosis(data, streams=True)
        if self._preparation.recorder is not None:
            data = self._preparation.recorder.record_events(data)
            self._hold()
        if data:
            self._send_events(data)

    def _send_events(self, data: bytes) -> None:
        self._response.sent(data)
        if self._preparation.hides_usage and not (data := without_usage(data)):
            return
        if self._sent is not None:
            self._note_sent(self._sent, data)
        if self._stage is RELAYING:
            self._client.write(data)
        else:
            self._start_stream(data)
        if self._client.paused and self._connection is not None:
            self._connection.pause()

    def _start_stream(self, data: bytes) -> None:
        head = self._response.head
        if self._stage is WAITING:
            self._client.write(data)
        else:
            self._client.start_stream(head.status, head.reason, self._response.lines, data)
        self._first_byte()
        if self._attempt is not None:
            self._model.router.attempts.prefill_done(self._attempt)

    def _first_byte(self) -> None:
        """The first byte goes to the client, so that the request is not sent again."""
        self._stage = RELAYING
        self._request.body = b""
        if self._response.head.streams:  # the response may take long
            self._hold()
        if self._preparation.beat:
            self._services.heartbeats.end(self)
        self._ttft_s = time.perf_counter() - self._arrived_s
        if self._spans is not None:
            self._spans.first_byte()
        metrics, routing = self._services.metrics, self.routing
        if self._head.route is not None:
            metrics.ttft_s.observe(self._head.route.label, self._ttft_s)
        if routing.runs:
            metrics.priority_ttft_s.observe(band(routing.priority), self._ttft_s)

    async def _end_answer(self, body: bytes) -> None:
        """Ends the answer, after it is stored if it is a turn of a conversation. body: the part
        that was not relayed."""
        streams, recorder = self._streams(body), self._preparation.recorder
        if streams and body:
            self._relay_events(body)
            body = b""
        if recorder is not None:
            body = await self._stored(recorder, body, streams=streams)
        if streams:
            self._end_stream(body)
        else:
            self._answer(body)

    def _end_stream(self, last: bytes) -> None:
        if last:
            self._send_events(last)
        if self._stage is WAITING:
            self._first_byte()
        self._complete()
        self._client.end_stream()

    def _answer(self, body: bytes) -> None:
        head = self._response.head
        self._response.sent(body)
        is_late = self._stage is WAITING
        self._first_byte()
        if self._is_left and self._sent is not None and head.status == OK:
            self._note_sent(self._sent, body)
        self._complete()
        if is_late:
            self._end_in_error(body)
            return
        self._client.answer(head.status, head.reason, self._response.lines, body)

    def _with_cache_diagnosis(self, data: bytes, *, streams: bool) -> bytes:
        """A whole answer, or events of one, with why the cache missed if the request asks that."""
        turn, attempt = self._preparation.turn, self._attempt
        if turn is None or turn.question is None or attempt is None:
            return data
        event = find_event(turn.path, turn.question, data) if streams else None
        if streams and event is None:
            return data
        stated = data if event is None else event[2]
        try:
            usage = read_usage(stated, stated)
            found = self._services.cache_turns.find(turn, attempt, usage, stated)
            stated = with_diagnosis(turn.path, stated, found, streams=streams)
        except Exception:
            log.exception("a cache miss could not be explained")
            self._services.metrics.cache_diagnoses.counts[("error",)] += 1
        return stated if event is None else data[: event.start(2)] + stated + data[event.end(2) :]

    def _named_lines(self) -> bytes:
        """The header lines of an answer that name its request, and what was stored of it."""
        return self._name.answer_line + self._answer_lines

    def _hold(self) -> bool:
        """Counts what the request and its answer hold. False if no answer may be so large."""
        recorder = self._preparation.recorder
        recorded_bytes = 0 if recorder is None else recorder.held_bytes
        held_bytes = len(self._request.body) + self._response.held_bytes + recorded_bytes
        if self._sent is not None:
            self._counted_bytes = len(self._sent)
            held_bytes += self._counted_bytes
        return self._request.hold.set(held_bytes)

    def resume(self) -> None:
        """The client reads again."""
        if self._earlier is not None:
            self._earlier.resume()
        elif self._connection is not None:
            self._connection.resume()

    def beat(self) -> None:
        """Shows the client that its answer is awaited."""
        if self._client.paused:
            return
        self._services.metrics.heartbeats.inc()
        if self._client.keep_awake():
            return
        if self._stage is WAITING:
            self._client.write(self._preparation.beat)
        elif self._stage is BEFORE_FIRST_BYTE:
            self._stage = WAITING
            self._client.start_stream(
                OK, b"OK", _WAITING_LINES + self._named_lines(), self._preparation.beat
            )

    # What a gateway reports, which sends the request to an engine by itself.

    def answered_by(self, url: str) -> None:
        """The engine with this URL answers. If it is another one, the first one failed."""
        attempt = self._attempt
        if attempt is None or url == attempt.answerer.url:
            return
        rank, workers = attempt.answerer.rank, self._services.workers.all
        worker = next((w for w in workers if (w.url, w.rank) == (url, rank)), None)
        if worker is None:
            return
        metrics = self._services.metrics
        metrics.retries.inc()
        metrics.placements.counts[("moved",)] += 1
        attempt = self._model.router.take_over(attempt, worker)
        self._attempt = self._last_attempt = attempt
        self._attempts += 1
        self.tried.add(worker)

    def passes(self, head: ResponseHead) -> bytes | None:
        """An answer with this head goes to the client without its body being shown here. Returns
        the header lines for the client; None if the client gets another answer."""
        self.response_head(head)
        if head.status == _UNAUTHORIZED and self._is_refused(head):
            self._break(AttemptFailed("it refuses the engine-secret", by_worker=False))
            return None
        self._first_byte()
        if head.streams and self._attempt is not None:
            self._model.router.attempts.prefill_done(self._attempt)
        return self._response.lines

    def passed(self) -> None:
        """The answer has ended. It counts as complete, as nothing says whether it was."""
        if self._stage is not ENDED:
            self._complete()
            self._wake()

    # How it ends: with its answer, with an error, or without its client.

    def _complete(self) -> None:
        """The whole response came."""
        self._stage = ENDED
        status, usage = self._response.head.status, None
        if status != OK:  # else its prefill has ended, or ends now
            self._abort_prefill()
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            usage = self._response.usage()
            if status < _SERVER_ERROR:
                output_tokens = 0 if usage is None else usage.output_tokens or 0
                self._model.router.attempts.succeed(attempt, output_tokens)
            else:
                self._model.router.attempts.fail(attempt, by_worker=True, answered=True)
            if self._is_run:
                self._model.trials.answered(self)
            if (turn := self._preparation.turn) is not None and status == OK:
                diagnosis = self._services.cache_turns.end(
                    turn, self._preparation.diagnosis, attempt, usage, self._response.first_data
                )
                self._preparation = structs.replace(self._preparation, diagnosis=diagnosis)
        self._count()
        if attempt is not None:
            body = self._response.first_data if status >= _BAD_REQUEST else b""
            ended = self._keep(Outcome.COMPLETE, status, usage=usage, body=body)
            if ended is not None:
                streams = self._response.head.streams
                self._services.request_log.count(ended, attempt, streams=streams)
                charge = self._preparation.charge
                if self.routing.runs and (charge is None or charge.key is None):
                    computed = 0 if usage is None else usage.computed_tokens or 0
                    ledger = self._services.rate_limits.usage
                    ledger.count_tenant(ended.tenant, computed, self._answers())
        if self._preparation.charge is not None:
            self._settle(None if usage is None else usage.computed_tokens)
        if self._is_left and not (self._response.head.streams or self._sent):
            self._forget_resend()

    def _fail(self, error: Exception) -> None:
        """The request cannot be answered by a worker."""
        if not isinstance(error, BalancerError):
            about = {"request_id": self._name.request_id}
            log.error("a request failed in the balancer", exc_info=error, extra=about)
            error = internal_error()
        if self._stage is RELAYING:
            self._cut("the balancer failed")
        elif self._stage is not ENDED:
            self._answer_error(error)

    def _answer_error(self, error: BalancerError) -> None:
        is_late = self._stage is WAITING
        self._end_early(by_worker=False, cost=0)
        name = self._name
        answer = self._services.error_response(
            error, self._head.path, name.request_id, is_stated=name.is_stated
        )
        outcome = Outcome.FAILED if self._attempts else Outcome.REJECTED
        is_ours = error.status == HTTPStatus.TOO_MANY_REQUESTS or error.status >= _SERVER_ERROR
        # Other messages may quote the client's request.
        shown = error.message if is_ours else None
        self._keep(outcome, answer[0], shown, body=answer[3])
        if is_late:
            self._end_in_error(answer[3])
        else:
            self._client.answer(*answer)

    def _end_in_error(self, body: bytes) -> None:
        """Ends a stream that has begun by the body of an error."""
        shape, sent = self._head.errors, self._response.events_sent
        try:
            event = shape.late(orjson.loads(body), sent)
        except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
            message = "The engine did not answer with a stream."
            event = shape.event(message, sent, self._name.request_id)
        self._client.write(event)
        self._client.end_stream()

    def _cut(self, reason: str, message: str = _ENGINE_STOPPED, *, by_worker: bool = True) -> None:
        """Ends a stream that cannot go on in its protocol's error event."""
        self._services.metrics.cut_streams.inc()
        self._warn("stream cut", reason)
        shape, sent = self._head.errors, self._response.events_sent
        self._client.write(shape.event(message, sent, self._name.request_id))
        self._keep(Outcome.CUT, self._response.head.status, reason)
        self._end_early(by_worker=by_worker)
        self._count()
        self._client.end_stream()

    def end(self) -> None:
        """The balancer ends, and the client learns that."""
        if self._earlier is not None:
            self._earlier.end()
        else:
            self._give_up("the balancer ends", shutting_down())

    def _give_up(self, reason: str, error: BalancerError) -> None:
        """Ends the request in an error, wherever its coroutine is."""
        self._disconnect()
        if self._stage is RELAYING:
            self._cut(reason, error.message, by_worker=False)
        else:
            self._answer_error(error)
        self._wake()

    def client_gone(self) -> None:
        """The client disconnected. It may send the request again."""
        if self._earlier is not None:
            self._earlier.client_gone()
            return
        self._services.metrics.client_disconnects.inc()
        if self._resend_key and self.can_be_taken and self._services.resends.resend_s:
            self._leave()
        else:
            self.stop()

    def stop(self) -> None:
        """Ends the request, because no client waits for its answer."""
        if self._stage is ENDED:
            self._request.hold.release()
            return
        self._disconnect()
        attempt = self._attempt
        if attempt is not None and attempt.sent_s is not None and self._is_run:
            self._model.trials.left(self, attempt.answerer, attempt.sent_s)
        status = self._response.head.status or (OK if self._stage is WAITING else None)
        if self._stage is BEFORE_FIRST_BYTE:
            status = None
        self._keep(Outcome.DISCONNECTED, status)
        self._end_early(by_worker=False)
        self._wake()

    def _end_early(self, *, by_worker: bool, cost: int | None = None) -> None:
        """The worker or the client ended the response before it was complete."""
        self._settle(cost)
        self._stage = ENDED
        if self._preparation.beat:
            self._services.heartbeats.end(self)
        self._end_attempt(by_worker=by_worker)
        if self._is_left:
            self._forget_resend()

    # A client that leaves, and sends its request again.

    def _is_answered_by_earlier(self) -> bool:
        """Whether the client sent this request before, and that one answers now. Otherwise this one
        may answer in place of a later one."""
        body, resends = self._request.body, self._services.resends
        may_be_resent = resends.resend_s and self._way.may_be_resent
        if not may_be_resent or len(body) > LARGE_BODY_BYTES:
            return False
        self._resend_key = resend_key(self._head, body)
        earlier = resends.take(self._resend_key)
        if not isinstance(earlier, Exchange):
            self._sent = bytearray()
            self._holder = resends.holder(self._resend_key)
            return False
        self._services.metrics.resent_requests.inc()
        self._stage, self._earlier = ENDED, earlier
        earlier.taken_over(self)
        return True

    async def _is_passed_on(self, holder: PeerPool, reading: Reading) -> bool:
        """Whether another process, where the client sent this request before, has answered it.
        That process admits it, counts it and waits for its client."""
        head, key, self._resend_key, self._sent = self._head, self._resend_key, b"", None
        self._head = copy(head)
        self._head.route, self._pool = None, holder
        if self._turns is not None and reading.turn is not None:
            # That process stores the answer, and this one remembers it for the connection.
            turn = reading.turn._replace(is_stored=False)
            recorder = self._services.bodies.conversations.recorder(turn, head.tenant, self._turns)
            self._preparation = structs.replace(NOT_PREPARED, recorder=recorder)
        try:
            self.send(await self._connect(None))
            body = await self._relay()
        except AttemptFailed as failure:
            if self._stage is RELAYING:
                self._cut(failure.reason)
                raise _Over from None
            self._head, self._resend_key, self._sent = head, key, bytearray()
            self._preparation, self._response = NOT_PREPARED, NO_RESPONSE
            self._is_sent, self._lost = False, 0
            return False
        await self._end_answer(body)
        return True

    def _leave(self) -> None:
        """Goes on without a client."""
        services = self._services
        self._is_left, self._client = True, NO_CLIENT
        if self._stage is WAITING:  # the next client does not know yet
            self._stage = BEFORE_FIRST_BYTE
        services.heartbeats.end(self)
        self._settle(None)  # for what was computed until now
        self._request.hold = services.account.hold(self._head.tenant)
        self._hold()
        self.resume()
        services.resends.leave(self._resend_key, self)

    @property
    def can_be_taken(self) -> bool:
        """Whether another client could get the whole answer, and at once if it is there.

        An engine that stands still gets no new requests, so one that is sent again goes to
        another.
        """
        if self._stage in (BEFORE_FIRST_BYTE, WAITING):
            worker = None if self._attempt is None else self._attempt.answerer
            return worker is None or not (worker.is_stalled or worker.is_hung)
        return self._sent is not None

    def taken_over(self, later: "Exchange") -> None:
        """The client that sent the request again gets the answer, from its beginning."""
        if self._stage is not ENDED:
            status = None if self._stage is BEFORE_FIRST_BYTE else self._response.head.status
            self._keep(Outcome.DISCONNECTED, status)
        named = self._named_lines()
        self._client, self._head = later._client, later._head
        if self._turns is not None and later._turns is not None:
            self._turns.become(later._turns)
        self._name, self._spans = later._name, later._spans
        self._request.hold.release()
        self._request.hold = later._request.hold
        self._is_left = False
        self._hold()
        if self._sent is not None and self._response.lines:
            head = self._response.head
            lines = self._response.lines.replace(named, self._named_lines())
            self._response.lines = lines
            if self._stage is ENDED and not head.streams:
                self._client.answer(head.status, head.reason, lines, bytes(self._sent))
                return
            if self._stage is not BEFORE_FIRST_BYTE:
                self._client.start_stream(head.status, head.reason, lines, bytes(self._sent))
        if self._stage is ENDED:
            self._client.end_stream()
        elif self._stage is BEFORE_FIRST_BYTE:
            if self._preparation.beat:
                self._services.heartbeats.begin(self)
        elif self._client.paused and self._connection is not None:
            self._connection.pause()

    def _forget_resend(self) -> None:
        self._services.resends.forget(self._resend_key, self)
        self._request.hold.release()

    def _note_sent(self, sent: bytearray, data: bytes) -> None:
        """Keeps what was sent for a client that sends the request again, within bounds."""
        account = self._services.account
        if len(sent) + len(data) > MAX_SENT_BYTES or account.used > account.limit_bytes // 2:
            self._sent = None
            self._hold()
            return
        sent += data
        if len(sent) > self._counted_bytes + _UNHELD_BYTES:
            self._hold()

    # Account for it.

    def _keep(
        self,
        outcome: Outcome,
        status: int | None,
        error: str | None = None,
        usage: Usage | None = None,
        body: bytes = b"",
    ) -> EndedRequest | None:
        """Keeps what became of the request, unless it was for the control plane or rejected with
        its head: strangers could fill the log with those. body: of an answer that is an error."""
        if self._head.route is None:
            return None
        preparation, total_s = self._preparation, time.perf_counter() - self._arrived_s
        ended = ended_request(
            Name(
                self._name.request_id,
                self._name.trace_id,
                self._head.route.label,
                self._answers(),
            ),
            End(time.time(), status, outcome, error, usage, error_type(body) if body else None),
            Course(self._queued_s, self._ttft_s, total_s, self._attempts, self._prefix_s),
            self.routing,
            self._last_attempt,
            Finding(
                preparation.diagnosis,
                preparation.facts,
                preparation.saved_bytes,
                preparation.moved,
            ),
        )
        self._services.request_log.keep(ended, self.routing.session)
        if self._spans is not None and self._services.span_export is not None:
            self._services.span_export.add(self._spans, ended)
        return ended

    def _answers(self) -> str:
        """The name of the model that answers; "" if none does."""
        return "" if self._preparation.pool is None else self._model.name

    def _settle(self, cost: int | None) -> None:
        """Settles the charge by the computed tokens, None if they are unknown."""
        charge = self._preparation.charge
        if charge is None:
            return
        if not self._attempts or self._response.head.status >= _BAD_REQUEST:
            cost = 0
        elif cost is None:  # an event of a stream has a token or more
            cost = self.routing.prompt_tokens + self._response.events_sent
            usage = self._response.usage()
            if usage is not None and usage.computed_tokens is not None:
                cost = max(cost, usage.computed_tokens)
        paid, self._paid_tokens = self._paid_tokens, cost
        if paid is None:
            self._services.rate_limits.leave(charge)
        else:  # the rest, or what was too much
            charge, cost = charge._replace(tokens=max(paid - cost, 0)), max(cost - paid, 0)
        self._services.rate_limits.settle(charge, cost)

    def _count(self) -> None:
        if self._head.route is not None:
            status = self._response.head.status
            self._services.metrics.requests.counts[self._head.route.label, status] += 1

    def _warn(self, message: str, cause: str) -> None:
        """Logs what happened to the request, or counts it."""
        about = {"request_id": self._name.request_id, "url": self._pool.url}
        self._services.sampled_log.add(logging.WARNING, message, cause, **about)


def _too_large() -> BalancerError:
    return BalancerError(HTTPStatus.BAD_GATEWAY, "The answer is larger than it may be.")
