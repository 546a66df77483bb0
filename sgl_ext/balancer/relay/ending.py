"""How a request ends: what its tenant pays, the metrics, and its entry in the request log."""

import logging
import time
from abc import abstractmethod
from http import HTTPStatus

import orjson
from msgspec import structs

from sgl_ext.balancer.http.upstream import STREAM_LINES
from sgl_ext.balancer.relay.delivery import BEFORE_FIRST_BYTE, ENDED, RELAYING, WAITING, Delivery
from sgl_ext.balancer.relay.preparation import NOT_PREPARED
from sgl_ext.balancer.relay.resends import NO_CLIENT
from sgl_ext.balancer.relay.response import NO_RESPONSE
from sgl_ext.balancer.reporting.ended_request import EndedRequest, Outcome, ended_request
from sgl_ext.protocols.cache_diagnostics import find_event, with_diagnosis
from sgl_ext.protocols.errors import BalancerError, shutting_down
from sgl_ext.protocols.request_ids import id_line
from sgl_ext.reading.usage import Usage, read_usage

log = logging.getLogger(__name__)

# Plain numbers: a member of an enumeration takes as long to look up as a call.
OK, _BAD_REQUEST, _SERVER_ERROR = 200, 400, 500
_WAITING_LINES = b"content-type: text/event-stream\r\n" + STREAM_LINES
_ENGINE_STOPPED = "The engine stopped in the middle of its answer."


class Ending(Delivery):
    """A request whose response ends, or that ends without one."""

    _preparation = NOT_PREPARED
    _response = NO_RESPONSE
    _ttft_s = 0.0
    _answer_lines = b""
    # Of a request that another copy may take over: its key, and what was sent; b"" and None else.
    _copy_key = b""
    _sent: bytearray | None = None
    _is_left = False
    _paid_tokens: int | None = None  # when its client left

    def _complete(self) -> None:
        """The whole response came."""
        self._stage = ENDED
        status, usage = self._response.head.status, None
        if status != OK:  # else its prefill has ended, or ends now
            self._end_leg()
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            if self._is_run:
                self._services.trials.answered(self)
            usage = self._response.usage()
            if status < _SERVER_ERROR:
                output_tokens = 0 if usage is None else usage.output_tokens or 0
                self._services.router.attempts.succeed(attempt, output_tokens)
            else:
                self._services.router.attempts.fail(attempt, by_worker=True, answered=True)
            if (turn := self._preparation.turn) is not None and status == OK:
                diagnosis = self._services.cache_turns.end(
                    turn, self._preparation.diagnosis, attempt, usage, self._response.first_data
                )
                self._preparation = structs.replace(self._preparation, diagnosis=diagnosis)
            ended = self._keep(Outcome.COMPLETE, status, usage=usage)
            if ended is not None:
                streams = self._response.head.streams
                self._services.request_log.count(ended, attempt, streams=streams)
        if self._preparation.charge is not None:
            self._settle(None if usage is None else usage.computed_tokens)
        self._count()
        if self._is_left and not (self._response.head.streams or self._sent):
            self._forget_copy()

    def _with_cache_diagnosis(self, data: bytes, *, streams: bool) -> bytes:
        """A whole answer, or events of one, with why the cache missed if the request asks that."""
        turn, attempt = self._preparation.turn, self._attempt
        if turn is None or turn.question is None or attempt is None:
            return data
        event = find_event(turn.path, turn.question, data) if streams else None
        if streams and event is None:
            return data
        told = data if event is None else event[2]
        try:
            found = self._services.cache_turns.find(turn, attempt, read_usage(told, told), told)
            told = with_diagnosis(turn.path, told, found, streams=streams)
        except Exception:
            log.exception("a cache miss could not be explained")
            self._services.metrics.cache_diagnoses.counts[("error",)] += 1
        return told if event is None else data[: event.start(2)] + told + data[event.end(2) :]

    def _end_early(self, *, by_worker: bool, cost: int | None = None) -> None:
        """The worker or the client ended the response before it was complete."""
        self._settle(cost)
        self._stage = ENDED
        if self._preparation.beat:
            self._services.heartbeats.end(self)
        self._release(by_worker=by_worker)
        if self._is_left:
            self._forget_copy()

    def end(self) -> None:
        """The balancer ends, and tells the client so."""
        self._give_up("the balancer ends", shutting_down())

    def _give_up(self, reason: str, error: BalancerError) -> None:
        self._disconnect()
        if self._stage is RELAYING:
            self._cut(reason, error.message, by_worker=False)
        else:
            self._answer_error(error)

    def client_gone(self) -> None:
        """The client disconnected. It may send the request again."""
        self._services.metrics.client_disconnects.inc()
        if self._copy_key and self.can_be_taken and self._services.resends.resend_s:
            self._leave()
        else:
            self.stop()

    def _leave(self) -> None:
        """Goes on without a client."""
        services = self._services
        self._is_left, self._client = True, NO_CLIENT
        if self._stage is WAITING:  # the next client was not told yet
            self._stage = BEFORE_FIRST_BYTE
        services.heartbeats.end(self)
        self._settle(None)  # for what was computed until now
        self._request.hold = services.account.hold(self._head.tenant)
        self._hold()
        self.resume()
        services.resends.leave(self._copy_key, self)

    @property
    def can_be_taken(self) -> bool:
        """Whether another client could get the whole answer, and at once if it is there.

        An engine that stands still gets no new requests, so a copy goes to another one.
        """
        if self._stage in (BEFORE_FIRST_BYTE, WAITING):
            worker = None if self._attempt is None else self._attempt.answerer
            return worker is None or not (worker.is_stalled or worker.is_hung)
        return self._sent is not None

    def _forget_copy(self) -> None:
        self._services.resends.forget(self._copy_key, self)
        self._request.hold.release()

    def stop(self) -> None:
        """Ends the request, as nobody waits for its answer."""
        if self._stage is ENDED:
            self._request.hold.release()
            return
        self._disconnect()
        attempt = self._attempt
        if attempt is not None and attempt.sent_s is not None and self._is_run:
            self._services.trials.left(self, attempt.answerer, attempt.sent_s)
        status = self._response.head.status or (OK if self._stage is WAITING else None)
        if self._stage is BEFORE_FIRST_BYTE:
            status = None
        self._keep(Outcome.DISCONNECTED, status)
        self._end_early(by_worker=False)

    @abstractmethod
    def resume(self) -> None: ...
    @abstractmethod
    def _hold(self) -> bool: ...

    def _forget_response(self) -> None:
        self._response = NO_RESPONSE

    def _cut(self, reason: str, message: str = _ENGINE_STOPPED, *, by_worker: bool = True) -> None:
        """Ends a stream that cannot go on in its protocol's error event."""
        self._services.metrics.cut_streams.inc()
        self._warn("stream cut", reason)
        shape = self._head.errors
        self._client.write(shape.event(message, self._response.events_sent, self._request_id))
        self._keep(Outcome.CUT, self._response.head.status, reason)
        self._end_early(by_worker=by_worker)
        self._count()
        self._client.end_stream()

    def _answer_error(self, error: BalancerError) -> None:
        is_late = self._stage is WAITING
        self._end_early(by_worker=False, cost=0)
        is_stated = bool(self._head.identity.request_id)
        answer = self._services.error_response(
            error, self._head.path, self._request_id, is_stated=is_stated
        )
        outcome = Outcome.FAILED if self._attempts else Outcome.REJECTED
        is_ours = error.status == HTTPStatus.TOO_MANY_REQUESTS or error.status >= 500
        # Other messages may quote the client's request.
        self._keep(outcome, answer[0], error.message if is_ours else None)
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
            event = shape.event("The engine did not answer with a stream.", sent, self._request_id)
        self._client.write(event)
        self._client.end_stream()

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

    def _named_lines(self) -> bytes:
        """The header lines of an answer that name its request, and what was stored of it."""
        head = self._head
        is_stated = bool(head.identity.request_id)
        return id_line(head.errors, self._request_id, is_stated=is_stated) + self._answer_lines

    def _keep(
        self,
        outcome: Outcome,
        status: int | None,
        error: str | None = None,
        usage: Usage | None = None,
    ) -> EndedRequest | None:
        """Keeps what became of the request, unless it was for the control plane or rejected with
        its head: strangers could fill the log with those."""
        if self._head.route is None:
            return None
        ended = ended_request(
            self._request_id,
            self._trace_id,
            time.time(),
            self._head.route.label,
            status,
            outcome,
            error,
            self.routing,
            self._last_attempt,
            usage,
            self._queued_s,
            self._ttft_s,
            time.perf_counter() - self._arrived_s,
            self._attempts,
            self._preparation.diagnosis,
            self._preparation.facts,
            self._preparation.saved_bytes,
            self._preparation.moved,
        )
        self._services.request_log.keep(ended)
        if self._spans is not None and self._services.span_export is not None:
            self._services.span_export.add(self._spans, ended)
        return ended

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
        if paid is not None:  # the rest, or what was too much
            charge, cost = charge._replace(tokens=max(paid - cost, 0)), max(cost - paid, 0)
        self._services.rate_limits.settle(charge, cost)

    def _count(self) -> None:
        if self._head.route is not None:
            status = self._response.head.status
            self._services.metrics.requests.counts[self._head.route.label, status] += 1
