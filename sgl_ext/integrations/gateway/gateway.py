"""The gateway as one request sees it: its client, and its way to the engine.

    send                           -> head with the destination, body    to the engine
    take_answer, then start_stream,
    write, end_stream, or answer   -> head, body                         to the client

The gateway sends on only what it gets from here, except answers that it does not show
(response_body_mode: NONE). A gateway's list of headers becomes the bytes of an HTTP/1.1 head, so
that a request is read, checked and cached as the balancer's own requests are.
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from heapq import nsmallest
from http import HTTPStatus

from msgspec import structs

from sgl_ext.balancer.http.request_head import HOP_BY_HOP
from sgl_ext.balancer.http.upstream import ResponseReceiver, read_response_head
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.relay.exchange import Exchange
from sgl_ext.balancer.relay.preparation import Preparation
from sgl_ext.balancer.routing.worker import Attempt, Worker
from sgl_ext.balancer.routing.workers import Workers
from sgl_ext.integrations.gateway import messages
from sgl_ext.integrations.gateway.messages import Response
from sgl_ext.limits.bounds import MAX_HEAD_BYTES
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.settings.sources import address_of

log = logging.getLogger(__name__)

Header = tuple[bytes, bytes]
Values = dict[bytes, list[bytes]]

# The gateway frames messages itself. It says `upgrade` only with a request to upgrade.
_FRAMING = (HOP_BY_HOP - {b"upgrade", b"content-length"}) | {b"host"}
_NOT_CHANGED = HOP_BY_HOP | {b"host", b"expect"}


def path_of(headers: Sequence[Header]) -> str:
    """The path of a request, "" if it has none."""
    target = dict(headers).get(b":path", b"")
    return target.partition(b"?")[0].decode("latin-1")


def raw_head(headers: Sequence[Header]) -> bytes:
    """A request's head as bytes. Raises BalancerError 400 or 431."""
    pseudo = dict(headers)
    lines = [
        b"%b %b HTTP/1.1" % (pseudo.get(b":method", b""), pseudo.get(b":path", b"")),
        b"host: %b" % pseudo.get(b":authority", b""),
    ]
    for name, value in headers:
        if name not in _FRAMING and not name.startswith(b":"):
            lines.append(b"%b: %b" % (name, value))
    if b"upgrade" in pseudo:
        lines.append(b"connection: upgrade")
    raw = b"\r\n".join(lines)
    # A line end within a value would be read as a header of its own.
    if raw.count(b"\r") != len(lines) - 1 or raw.count(b"\n") != len(lines) - 1:
        raise BalancerError(HTTPStatus.BAD_REQUEST, "Malformed HTTP request: a line end.")
    if len(raw) > MAX_HEAD_BYTES:
        message = f"The request's head is larger than {MAX_HEAD_BYTES} bytes."
        raise BalancerError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)
    return raw + b"\r\n\r\n"


def values_of(headers: Sequence[Header]) -> Values:
    """The values of each header that may be changed."""
    found: Values = {}
    for name, value in headers:
        if name not in _NOT_CHANGED and not name.startswith(b":"):
            found.setdefault(name, []).append(value)
    return found


def parse_lines(lines: bytes) -> list[Header]:
    """The headers of our own header lines."""
    split = (line.partition(b": ") for line in lines.split(b"\r\n") if line)
    return [(name.lower(), value) for name, _, value in split]


def changes(before: Values, after: Values) -> tuple[list[Header], list[bytes]]:
    """Which headers to set, and which to remove, so that `before` becomes `after`."""
    changed = [
        (name, value)
        for name, values in after.items()
        if before.get(name) != values
        for value in values
    ]
    return changed, [name for name in before if name not in after]


# Then the answer is not read any further.
_MAX_BYTES = 256 * 1024


class Outbox:
    """is_full: the gateway does not read as fast as messages come. on_room: called when it does
    again."""

    def __init__(
        self,
        write: Callable[[Response], Awaitable[None]],
        metrics: Metrics,
        failed: Callable[[], None],
    ) -> None:
        """failed: called once if a message cannot be sent, or if `on_room` fails. No message
        follows then."""
        self.is_full = False
        self._failed = failed
        self._is_closed = False
        self.on_room: Callable[[], None] = lambda: None
        self._write = write
        self._metrics = metrics
        self._unsent: deque[tuple[Response, int]] = deque()
        self._bytes = 0
        self._writing: asyncio.Task[None] | None = None

    def post(self, response: Response, size_bytes: int = 0) -> None:
        """Sends a message after those before it. size_bytes: what it counts with."""
        if self._is_closed:
            return
        self._unsent.append((response, size_bytes))
        self._bytes += size_bytes
        self.is_full = self._bytes > _MAX_BYTES
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())

    def post_all(self, responses: Iterable[Response], size_bytes: int) -> None:
        """As `post`, with several messages of this size in all."""
        for response in responses:
            self.post(response, size_bytes)
            size_bytes = 0

    async def emptied(self) -> None:
        """Waits until every message is written, or none is any more."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    def close(self) -> None:
        """Begins to write no other message. gRPC cannot take the one back that it writes, and ends
        no stream before that one is written: wait until it is `emptied`."""
        self._is_closed = True
        self._unsent.clear()

    async def _write_all(self) -> None:
        try:
            while self._unsent:
                response, size_bytes = self._unsent.popleft()
                await self._write(response)
                self._bytes -= size_bytes
                if self.is_full and self._bytes <= _MAX_BYTES // 2:
                    self.is_full = False
                    self.on_room()
        except Exception as error:  # most often the gateway has left
            log.debug("a message to the gateway was not sent: %r", error)
            if not self._is_closed:
                self._metrics.gateway_fault("unsent message")
                self._failed()
            self.close()
        finally:
            self._writing = None


_SPARE = 2
"""Engines that a gateway is named besides the one that was picked."""
_DETAILS = "endpoint_picker"
# What Envoy answers by itself, in plain text, when it reaches no engine. Engines' errors are JSON.
_GATEWAY_ERRORS = (502, 503, 504)
# Of a final answer.
_STATUS = re.compile(rb"[2-9][0-9]{2}")


class EnvoyGateway:
    """What one stream of a gateway is to its request.

    shows_answers: whether the body of the answer passes through here.
    has_body, has_trailers: what the request has.
    heard: a part of the answer has arrived.
    ended: the answer is complete.
    """

    def __init__(
        self,
        outbox: Outbox,
        metrics: Metrics,
        kill: Callable[[], None],
        reads: Callable[[bool], None],
    ) -> None:
        """kill: ends the stream at once. reads: says whether the gateway's messages are read."""
        self.shows_answers = True
        self.has_body = self.has_trailers = False
        self.headers: Values = {}
        self.heard = self.reused = self.ended = False
        self._outbox = outbox
        self._metrics = metrics
        self._kill = kill
        self._reads = reads
        self._destination = ""
        self._receiver: ResponseReceiver | None = None
        # Of the answer, when its head has arrived.
        self._status = 0
        self._answer: Values = {}
        self._answer_has_body = self._answer_has_trailers = self._answer_begun = False
        # An answer in parts that is not the engine's: its status, its lines and its body.
        self._own: tuple[int, bytes, list[bytes]] = (0, b"", [])

    # The way to the engine.

    def route(self, destination: str) -> None:
        """The request will go to these addresses."""
        self._destination = destination

    def send(
        self, receiver: ResponseReceiver, head: bytes, body: bytes | bytearray, method: str
    ) -> None:
        """Tells the gateway where the request goes, and how it looks."""
        self._receiver = receiver
        _, _, lines = head.partition(b"\r\n")
        mutation = changes(self.headers, values_of(parse_lines(lines)))
        self._outbox.post(messages.to_engine(self._destination, *mutation))
        if self.has_body:
            parts = messages.request_body(body, ends=not self.has_trailers)
            self._outbox.post_all(parts, len(body))
        if self.has_trailers:
            self._outbox.post(messages.request_trailers())

    def pause(self) -> None:
        """Stops reading, as the answer cannot be passed on."""
        self._reads(False)

    def resume(self) -> None:
        """Reads again."""
        self._reads(True)

    def abort(self) -> None:
        """What the engine answers does not count any more."""
        self._receiver = None

    def take_answer(self, exchange: Exchange, kind: str, message: messages.Request) -> bool:
        """Takes a part of the answer. False if the gateway may not send it now."""
        receiver = self._receiver
        if receiver is None:
            return False
        self.heard = True
        if kind == "response_headers":
            exchange.answered_by(f"http://{messages.served_by(message)}")
            self._take_head(exchange, receiver, message.response_headers)
        elif kind == "response_body" and self._status:
            data, ends = message.response_body.body, message.response_body.end_of_stream
            if ends:
                receiver.response_end(data)
            elif data:
                receiver.response_data(data)
        elif kind == "response_trailers" and self._status:
            self._answer_has_trailers = True
            if self.shows_answers:
                receiver.response_end(b"")
            else:
                self._outbox.post(messages.response_trailers())
        else:
            return False
        return True

    def _take_head(
        self, exchange: Exchange, receiver: ResponseReceiver, head: messages.Request
    ) -> None:
        headers = messages.headers_of(head.headers)
        fields = dict(headers)
        stated = fields.get(b":status", b"")
        if not _STATUS.fullmatch(stated):
            self._metrics.gateway_fault("unreadable answer")
            receiver.upstream_lost("the gateway's answer has no valid :status")
            return
        status = int(stated)
        is_text = fields.get(b"content-type", b"").startswith(b"text/plain")
        if status in _GATEWAY_ERRORS and is_text:
            self._metrics.gateway_fault("no answer")
            receiver.upstream_lost(f"the gateway answers {status}")
            return
        self._status, self._answer = status, values_of(headers)
        self._answer_has_body = not head.end_of_stream
        answer = read_response_head(status, b"", headers)
        if not self.shows_answers:
            if (lines := exchange.passes(answer)) is not None:
                self.let_through(lines)
            return
        receiver.response_head(answer)
        if not self._answer_has_body:
            receiver.response_end(b"")

    # The client.

    @property
    def paused(self) -> bool:
        """Whether the gateway does not read as fast as the answer arrives."""
        return self._outbox.is_full

    def answer(self, status: int, reason: bytes, lines: bytes, body: bytes) -> None:
        """Sends a complete answer: the engine's, or another one in its place."""
        if status != self._status:
            self._answer_now(status, lines, body)
            return
        self.let_through(lines)
        if self._answer_has_body:
            self._end_body(body)
        self._end()

    def start_stream(self, status: int, reason: bytes, lines: bytes, data: bytes = b"") -> None:
        """Sends the head of an answer, and the first part of its body."""
        if self._status:
            self.let_through(lines)
        else:
            self._own = status, lines, []
        self.write(data)

    def let_through(self, lines: bytes) -> None:
        """Sends the head of an answer. The body follows, or the gateway sends it by itself."""
        self._answer_begun = True
        mutation = changes(self._answer, values_of(parse_lines(lines)))
        self._outbox.post(messages.to_client(*mutation))

    def write(self, data: bytes) -> None:
        """Sends a part of the answer."""
        if not self._status:
            self._own[2].append(data)
        elif not self.shows_answers:
            self._kill()  # the gateway sends the body: all that can be done is to cut it
        elif data:
            self._outbox.post_all(messages.response_body(data, ends=False), len(data))

    def end_stream(self) -> None:
        """Ends the answer."""
        if not self._status:
            status, lines, parts = self._own
            self._answer_now(status, lines, b"".join(parts))
            return
        if self.shows_answers:
            self._end_body(b"")
        self._end()

    def keep_awake(self) -> bool:
        """The answer is the engine's to begin: the gateway has nothing to send before it."""
        return True

    @property
    def is_passed(self) -> bool:
        """Whether the gateway sends the answer by itself."""
        return self._answer_begun and not self.shows_answers

    def _answer_now(self, status: int, lines: bytes, body: bytes) -> None:
        """The gateway answers this. What it has sent to the engine ends."""
        self._outbox.post(messages.immediate(status, parse_lines(lines), body, _DETAILS))
        self._end()

    def _end_body(self, body: bytes) -> None:
        has_trailers = self._answer_has_trailers
        if body or not has_trailers:
            parts = messages.response_body(body, ends=not has_trailers)
            self._outbox.post_all(parts, len(body))
        if has_trailers:
            self._outbox.post(messages.response_trailers())

    def _end(self) -> None:
        self.ended, self._receiver = True, None
        self._reads(True)


class GatewayWay:
    """The way of one request to its engine over a gateway.

    The gateway learns once where the request goes, so nothing is tried again from here after that.
    It tries the spare engines that were named, if it is configured to.
    """

    may_be_resent = False  # the gateway ends a request whose client has left

    def __init__(
        self, gateway: "EnvoyGateway", workers: Workers, only: frozenset[str] | None
    ) -> None:
        """only: the addresses that the request may go to; None: any."""
        self.is_final = False
        self._gateway = gateway
        self._workers = workers
        self._only = None if only is None else frozenset(f"http://{each}" for each in only)

    def check(self, preparation: Preparation) -> Preparation:
        """Only what needs no answer may go a way on which none is shown."""
        if not self._gateway.shows_answers and _needs_answer(preparation):
            message = (
                "The gateway does not show answers to its endpoint picker "
                "(response_body_mode: NONE), which this request needs."
            )
            raise BalancerError(HTTPStatus.NOT_IMPLEMENTED, message)
        if self._only is None:
            return preparation
        return structs.replace(
            preparation, routing=structs.replace(preparation.routing, only=self._only)
        )

    def to_engine(self, attempt: Attempt) -> "EnvoyGateway":
        destination = ",".join(_addresses(self._workers, attempt))
        if not destination:
            message = f"A gateway reaches engines by address, and {attempt.answerer.id} has a name."
            raise BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message)
        self.is_final = True
        self._gateway.route(destination)
        return self._gateway


def _needs_answer(preparation: Preparation) -> bool:
    turn = preparation.turn
    asks = turn is not None and turn.question is not None
    return preparation.recorder is not None or preparation.hides_usage or asks


def _addresses(workers: Workers, attempt: Attempt) -> list[str]:
    """The address of the engine that answers, and those of engines that could in its place; none
    if it has none."""
    first = address_of(attempt.answerer.url)
    if first is None:
        return []
    found = [first]
    # The request says which rank it is for, and where a prefill engine's KV is.
    if attempt.decoder is None:
        for worker in _spare(workers, attempt):
            address = address_of(worker.url)
            if address is not None and address not in found:
                found.append(address)
    return found


def _spare(workers: Workers, attempt: Attempt) -> list[Worker]:
    """The engines with the least to do of those that it could have gone to."""
    picked = attempt.worker
    views = {view.name: view.pending_tokens for view in attempt.considered}
    others = [worker for name in views if (worker := workers.find(name)) is not None]
    able = [w for w in others if w.url != picked.url and w.rank == picked.rank and w.is_available]
    return nsmallest(_SPARE, able, key=lambda worker: views[worker.id])
