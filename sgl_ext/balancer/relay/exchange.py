"""The life of one request between a client and a worker.

Its connection has received it, and its key was checked with its head. It runs in the callbacks of
the two connections and never blocks:

    begin: prepare -> place, send (`delivery`) -> response_head, response_data ..., response_end
                                                                              -> `ending`

After the first byte a request is not replayed, and a cut stream ends in the protocol's error event.
When the client disconnects, the connection to the worker is closed, and the engine aborts. What a
model answers waits for a moment before that, as its client may send the request again (`resends`).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any

from msgspec import structs

from sgl_ext.balancer.conversations.expansion import Named
from sgl_ext.balancer.http.upstream import ResponseHead, stream_lines
from sgl_ext.balancer.metrics.registry import band
from sgl_ext.balancer.relay.context_making import make_context
from sgl_ext.balancer.relay.delivery import (
    BEFORE_FIRST_BYTE,
    ENDED,
    MAX_ATTEMPTS,
    RELAYING,
    WAITING,
)
from sgl_ext.balancer.relay.ending import OK, Ending
from sgl_ext.balancer.relay.hidden_usage import without_usage
from sgl_ext.balancer.relay.preparation import NOT_PREPARED, Preparation, ask, prepare
from sgl_ext.balancer.relay.reading import Asked, Reading
from sgl_ext.balancer.relay.resends import MAX_SENT_BYTES, copy_key
from sgl_ext.balancer.relay.response import Response
from sgl_ext.balancer.reporting.ended_request import Outcome
from sgl_ext.limits.bounds import LARGE_BODY_BYTES
from sgl_ext.protocols.errors import BalancerError, internal_error

log = logging.getLogger(__name__)

_UNAUTHORIZED, _UNAVAILABLE = 401, 503
# A smaller answer is not counted when it is complete: it is sent at once.
_UNHELD_BYTES = 16 * 1024


class Exchange(Ending):
    """One request and its response."""

    _waiting: asyncio.Task[None] | None = None
    # The copy that answers in place of this one.
    _copy: "Exchange | None" = None
    _may_be_resent = True
    _counted_bytes = 0

    # Prepare.

    def begin(self) -> None:
        """Prepares, places and sends the request, or answers it with an error."""
        for name in self._head.identity.replaced:
            self._services.metrics.identities_replaced.counts[(name,)] += 1
        try:
            if self._request.rejection is not None:
                raise self._request.rejection
            asked = ask(self._services, self._head, remembers=self._turns is not None)
            if asked is None:
                self._prepared(NOT_PREPARED)
            elif len(body := self._request.body) > LARGE_BODY_BYTES:
                self._wait_for(self._read(asked))
            elif isinstance(reading := self._services.body_reader.read(asked, body), Named):
                self._wait_for(self._read(asked, reading))
            else:
                self._prepare(asked, reading)
        except Exception as error:
            self._failed(error)

    async def _read(self, asked: Asked, named: Named | None = None) -> None:
        """Reads a request that is large, or that names what is stored, and prepares it."""
        body = self._request.body
        services = self._services
        reading = await services.read_body(self._head.tenant, asked, body, named, self._turns)
        if self._stage is not ENDED:
            self._prepare(asked, reading)

    def _prepare(self, asked: Asked, reading: Reading) -> None:
        if self._spans is not None:
            body = reading.stripped.body
            self._spans.read(body.get("model") if isinstance(body, dict) else None)
        if asked.runs and self._finds_copy():
            return
        self._prepared(prepare(self._services, self._request, asked, reading, self._turns))

    def _finds_copy(self) -> bool:
        """Whether the client sent this request before, and its copy answers now. Otherwise this one
        may be the copy of a later one."""
        body, resends = self._request.body, self._services.resends
        is_asked = resends.resend_s and self._may_be_resent and self._turns is None
        if not is_asked or len(body) > LARGE_BODY_BYTES:
            return False
        self._copy_key = copy_key(self._head, body)
        copy = resends.take(self._copy_key)
        if not isinstance(copy, Exchange):
            self._sent = bytearray()
            return False
        self._services.metrics.resent_requests.inc()
        self._stage, self._copy = ENDED, copy
        copy.taken_over(self)
        return True

    def taken_over(self, later: "Exchange") -> None:
        """The client of a later copy gets the answer, from its beginning."""
        if self._stage is not ENDED:
            status = None if self._stage is BEFORE_FIRST_BYTE else self._response.head.status
            self._keep(Outcome.DISCONNECTED, status)
        named = self._named_lines()
        self._client, self._head = later._client, later._head
        self._request_id = later._request_id
        self._trace_id, self._spans = later._trace_id, later._spans
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

    def client_gone(self) -> None:
        if self._copy is not None:
            self._copy.client_gone()
        else:
            super().client_gone()

    def end(self) -> None:
        if self._copy is not None:
            self._copy.end()
        else:
            super().end()

    def _prepared(self, preparation: Preparation) -> None:
        self._preparation = preparation
        self.routing = preparation.routing
        self._lines = preparation.lines
        if preparation.beat:
            self._services.heartbeats.begin(self)
        limits, tenant = self._services.rate_limits, self._head.tenant
        if not limits.charges(tenant):
            self._admitted()
            return
        # What it claims of an engine is charged until its cost is known.
        claimed_tokens = self.routing.prompt_tokens + self.routing.output_tokens
        lease = limits.lease(tenant, claimed_tokens)
        if lease is None:
            self._charge(claimed_tokens)
        else:
            self._wait_for(self._charge_after(lease, claimed_tokens))

    async def _charge_after(self, lease: Coroutine[Any, Any, None], claimed_tokens: int) -> None:
        await lease
        if self._stage is not ENDED:
            self._charge(claimed_tokens)

    def _charge(self, claimed_tokens: int) -> None:
        charge = self._services.rate_limits.admit(self._head.tenant, claimed_tokens)
        self._preparation = structs.replace(self._preparation, charge=charge)
        self._admitted()

    def _admitted(self) -> None:
        """Its tenant may send it: places the request."""
        self._services.retries.add_request()
        if self._preparation.context_path:
            self._wait_for(self._make_context())
        else:
            self._place()

    async def _make_context(self) -> None:
        """Makes a context of the request, which its answer names, and places the request."""
        path, names_stored = self._preparation.context_path, bool(self._preparation.saved_bytes)
        self._answer_lines = await make_context(
            self._services, self._request, path, names_stored=names_stored
        )
        if self._stage is not ENDED:
            self._place()

    def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        """Goes on when it has ended. An event loop keeps no reference to a task."""

        async def run() -> None:
            try:
                await work
            except Exception as error:
                self._failed(error)

        self._waiting = asyncio.create_task(run())

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, BalancerError):
            about = {"request_id": self._request_id}
            log.error("a request failed in the balancer", exc_info=error, extra=about)
            error = internal_error()
        if self._stage is RELAYING:
            self._cut("the balancer failed")
        elif self._stage is not ENDED:
            self._answer_error(error)

    # Relay the response.

    def response_head(self, head: ResponseHead) -> None:
        """Takes the response's head."""
        lines = head.lines + self._named_lines()
        if head.streams and self._head.route is not None:
            lines += stream_lines(head.lines)
        self._response = Response(head, lines, sums_items=self._preparation.sums_items)

    def response_data(self, data: bytes) -> None:
        """Relays whole events of a stream; any other body is collected."""
        if data := self._response.take(data):
            self._relay(data)
        elif not self._hold():
            self._reject_answer()

    def response_end(self, last: bytes) -> None:
        """Ends the stream, sends the collected body, or retries an engine's own 503."""
        self._connection = None
        response = self._response
        head, body = response.head, response.end(last)
        recorder = self._preparation.recorder
        is_held = not head.streams and (recorder is not None or len(body) > _UNHELD_BYTES)
        if is_held and not self._request.hold.set(len(self._request.body) + len(body)):
            self._reject_answer()
            return
        if self._preparation.turn is not None and body and head.status == OK and not head.streams:
            body = self._with_cache_diagnosis(body, streams=False)
        if head.status == _UNAUTHORIZED and self._is_refused(head):
            return
        if head.streams and (body or self._stage is not BEFORE_FIRST_BYTE):
            if body:
                self._relay(body)
            if recorder is None or not recorder.holds_end:
                self._end_stream(b"")
            else:
                self._wait_for(self._finish(recorder.record_end(), self._end_stream))
        elif (
            head.status == _UNAVAILABLE
            and 0 < self._attempts < MAX_ATTEMPTS
            and self._services.router.any_available(besides=self.tried)
            and self._has_budget()
        ):
            self._retry("status 503", answered=True)
        elif recorder is None or head.status != OK:
            self._answer(body)
        else:
            self._wait_for(self._finish(recorder.record(body), self._answer))

    def _reject_answer(self) -> None:
        error = BalancerError(HTTPStatus.BAD_GATEWAY, "The answer is larger than it may be.")
        self._give_up("the answer is larger than the byte budget", error)

    async def _finish(self, recorded: Awaitable[bytes], send: Callable[[bytes], None]) -> None:
        """Sends the end of a response after it was stored."""
        data = await recorded
        if self._stage is not ENDED:
            send(data)

    def _end_stream(self, last: bytes) -> None:
        if last:
            self._send(last)
        if self._stage is WAITING:
            self._first_byte()
        self._complete()
        self._client.end_stream()

    def _answer(self, body: bytes) -> None:
        head = self._response.head
        self._response.sent(body)
        self._request.body = b""  # it is not sent again
        is_late = self._stage is WAITING
        self._first_byte()
        if self._is_left and self._sent is not None and head.status == OK:
            self._note_sent(self._sent, body)
        self._complete()
        if is_late:
            self._end_in_error(body)
            return
        self._client.answer(head.status, head.reason, self._response.lines, body)

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
        if self._copy is not None:
            self._copy.resume()
        elif self._connection is not None:
            self._connection.resume()

    def _relay(self, data: bytes) -> None:
        if self._preparation.turn is not None:
            data = self._with_cache_diagnosis(data, streams=True)
        if self._preparation.recorder is not None:
            data = self._preparation.recorder.record_events(data)
            self._hold()
        if data:
            self._send(data)

    def _send(self, data: bytes) -> None:
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

    def _note_sent(self, sent: bytearray, data: bytes) -> None:
        """Keeps what was sent for a later copy of the request, within bounds."""
        account = self._services.account
        if len(sent) + len(data) > MAX_SENT_BYTES or account.used > account.limit_bytes // 2:
            self._sent = None
            self._hold()
            return
        sent += data
        if len(sent) > self._counted_bytes + _UNHELD_BYTES:
            self._hold()

    def _start_stream(self, data: bytes) -> None:
        head = self._response.head
        if self._stage is WAITING:
            self._client.write(data)
        else:
            self._client.start_stream(head.status, head.reason, self._response.lines, data)
        self._first_byte()
        # It is not sent again, and a response may take long.
        self._request.body = b""
        self._hold()
        if self._attempt is not None:
            self._services.router.attempts.prefill_done(self._attempt)

    def _first_byte(self) -> None:
        self._stage = RELAYING
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

    def abandon(self, reason: str) -> None:
        if self._waiting is None or self._waiting.done():  # else the response is being stored
            super().abandon(reason)
