"""The gateway as one request sees it: its client, and its way to the engine.

    send                           -> head with the destination, body    to the engine
    take_answer, then start_stream,
    write, end_stream, or answer   -> head, body                         to the client

The gateway sends on only what it gets from here, except answers that it does not show
(response_body_mode: NONE).
"""

import re
from collections.abc import Callable

from sgl_ext.balancer.http.upstream import ResponseHead, ResponseReceiver
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.epp import messages
from sgl_ext.epp.heads import Values, changes, parse_lines, values_of
from sgl_ext.epp.outbox import Outbox
from sgl_ext.epp.pick import Pick

_DETAILS = "endpoint_picker"
# What Envoy answers by itself, in plain text, when it reaches no engine. Engines' errors are JSON.
_GATEWAY_ERRORS = (502, 503, 504)
# Of a final answer.
_STATUS = re.compile(rb"[2-9][0-9]{2}")


class EnvoyGateway:
    """What one stream of a gateway is to its pick.

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

    def take_answer(self, pick: Pick, kind: str, message: messages.Request) -> bool:
        """Takes a part of the answer. False if the gateway may not send it now."""
        receiver = self._receiver
        if receiver is None:
            return False
        self.heard = True
        if kind == "response_headers":
            pick.served_by(messages.served_by(message))
            self._take_head(pick, receiver, message.response_headers)
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

    def _take_head(self, pick: Pick, receiver: ResponseReceiver, head: messages.Request) -> None:
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
        answer = ResponseHead(status, b"", headers)
        if not self.shows_answers:
            pick.passed(answer)
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
