"""The WebSocket mode of `/v1/responses`: many responses over one connection.

Each message is the body of a request, and becomes one: it has the handshake's headers, so its key
is checked again, and an exchange of its own. So routing, limits, log and metrics are those of
`POST /v1/responses`. Messages of a lane (`stream_id`, or none) are answered one after the other,
those of several lanes at once.

    frame -> unread -> [another process reads it] -> waiting -> running -> ended
                                                       one for each lane

    {"type": "response.create", "stream_id"?, "generate"?, ...the body of POST /v1/responses}

Each event of the stream becomes a text message. With `generate: false` the prompt is only prefilled
(`/v1/prefill`), and the response is empty; the next one continues it.
"""

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

import orjson

from sgl_ext.balancer.conversations import response_turns
from sgl_ext.balancer.conversations.response_turns import ConnectionTurns, LaneTurns
from sgl_ext.balancer.http.downstream import Client, Connections, HttpClient, RunningExchange
from sgl_ext.balancer.http.request_head import RequestHead, RequestHeadCache, header_lines
from sgl_ext.balancer.http.request_reader import Request
from sgl_ext.balancer.http.websocket import VERSION_LINE, WebSocketConnection, handshake
from sgl_ext.balancer.relay.reading import parse_json
from sgl_ext.balancer.relay.services import Services
from sgl_ext.limits.bounds import LARGE_BODY_BYTES, MAX_SOCKET_MESSAGES
from sgl_ext.limits.byte_account import Hold
from sgl_ext.protocols.errors import BalancerError, bad_field, internal_error
from sgl_ext.protocols.responses import RESPONSES
from sgl_ext.protocols.routes import PREFILL
from sgl_ext.supervision import Guard

RESTATED = "x-codex-turn-metadata"
_PRINTABLE = re.compile(r"[ -~]{1,8192}")
_MAX_LANE_CHARS = 256
_DATA = re.compile(rb"^data: ?(.*)$", re.MULTILINE)
_DONE = b"[DONE]"
_ERROR = b"event: error"
# Of the headers of an error, those that say what to do about it.
_TOLD_HEADERS = ("retry-after", "x-request-id", "x-should-retry")
_UNFIT = "is not available over a WebSocket"
_Json = dict[str, Any]


class Message(NamedTuple):
    """A message as it was read.

    lane: its `stream_id`. body: the body of the request that it makes.
    warms: its own input items if its prompt is only prefilled; None if it is answered.
    lines: header lines that hold for this request in place of the handshake's.
    """

    lane: str | None
    body: bytes
    warms: bytes | None = None
    model: str = ""
    previous: str | None = None
    lines: bytes = b""


def read_message(text: bytes | bytearray) -> Message:
    """Raises BalancerError 400 for what is no `response.create`, naming the field."""
    document = parse_json(text)
    if not isinstance(document, dict) or document.get("type") != "response.create":
        kind = document.get("type") if isinstance(document, dict) else None
        raise bad_field("type", f"must be 'response.create', not {str(kind)[:40]!r}")
    lane = document.pop("stream_id", None)
    if lane is not None and not (isinstance(lane, str) and len(lane) <= _MAX_LANE_CHARS):
        raise bad_field("stream_id", f"must be a text of at most {_MAX_LANE_CHARS} characters")
    generates = document.pop("generate", None)
    if generates not in (None, True, False):
        raise bad_field("generate", "must be true or false")
    if document.get("background"):
        raise bad_field("background", _UNFIT)
    del document["type"]
    try:
        if generates is not False:
            body = orjson.dumps(document | {"stream": True})
            return Message(lane, body, lines=_restated(document))
        own, previous = response_turns.own_items(document), document.get("previous_response_id")
        if own is None:
            raise bad_field("input", "must be a text or a list")
        model = str(document.get("model", ""))
        lines = _restated(document)
        return Message(lane, orjson.dumps(document), orjson.dumps(own), model, previous, lines)
    except TypeError:
        raise bad_field("body", "is nested too deeply") from None


def _restated(document: _Json) -> bytes:
    """Codex's header about its turn, which over a WebSocket is in the body of each request."""
    about = document.get("client_metadata")
    value = about.get(RESTATED) if isinstance(about, dict) else None
    if not isinstance(value, str) or not _PRINTABLE.fullmatch(value):
        return b""
    return f"{RESTATED}: {value}\r\n".encode()


def read_large_message(text: bytes) -> tuple[Message, bytes]:
    """As `read_message`, in another process: the message without its body, and the body."""
    message = read_message(text)
    return message._replace(body=b""), message.body


class Socket(Protocol):
    """The connection, as its turns use it."""

    @property
    def paused(self) -> bool: ...
    def send(self, text: bytes) -> None: ...
    def ping(self) -> None: ...


class SocketTurn:
    """The response to one message. For the exchange of its request it is the client's connection.

    hold: what the message, then the response, holds of the byte budget.
    """

    exchange: RunningExchange

    def __init__(
        self,
        message: Message,
        hold: Hold,
        socket: Socket,
        turns: LaneTurns,
        ended: Callable[["SocketTurn"], None],
    ) -> None:
        """ended: called when the response is complete, or has ended in an error."""
        self.message = message
        self.hold = hold
        self.turns = turns
        self._socket = socket
        self._ended = ended

    @property
    def paused(self) -> bool:
        """Whether the client does not read."""
        return self._socket.paused

    def answer(self, status: int, reason: bytes, lines: bytes, body: bytes) -> None:
        """Sends the error that the exchange ended with."""
        is_refused = 400 <= status < 500 and status != 429
        if self.message.warms is not None and not is_refused:
            self._warmed(self.message.warms)
        else:
            self._send(error_event(status, lines, body))
        self._ended(self)

    def start_stream(self, status: int, reason: bytes, lines: bytes, data: bytes = b"") -> None:
        self.write(data)

    def write(self, data: bytes) -> None:
        """Sends whole events of the stream, each as a message."""
        for event in messages_of(data):
            self._send(event)

    def end_stream(self) -> None:
        self._ended(self)

    def keep_awake(self) -> bool:
        self._socket.ping()
        return True

    def _send(self, event: bytes) -> None:
        if self.message.lane is not None:
            event = b'{"stream_id":%b,%b' % (orjson.dumps(self.message.lane), event[1:])
        self._socket.send(event)

    def _warmed(self, own: bytes) -> None:
        """The prompt is prefilled, or is not because the engines are busy: the response tells only
        an id to continue."""
        message, id = self.message, f"resp_{uuid4().hex}"
        self.turns.add(id, message.previous, response_turns.packed(own, []))
        for number, status in enumerate(("in_progress", "completed")):
            response = _empty(id, message, status)
            kind = "response.created" if status == "in_progress" else "response.completed"
            event = {"type": kind, "sequence_number": number, "response": response}
            self._send(orjson.dumps(event))


def messages_of(events: bytes) -> Iterator[bytes]:
    """The data of events, as it is sent in messages."""
    if b"\r" in events:
        events = events.replace(b"\r\n", b"\n")
    for event in events.split(b"\n\n"):
        data = b"\n".join(_DATA.findall(event))
        if event.startswith(_ERROR):
            yield _wrapped(data)
        elif data and data != _DONE:
            yield data


def _wrapped(data: bytes) -> bytes:
    """An error of a stream as a message: over a WebSocket its fields are below `error`."""
    try:
        event = orjson.loads(data)
        if "error" in event:
            # Codex takes an error without a status for an event that it does not know.
            return orjson.dumps({"status": HTTPStatus.INTERNAL_SERVER_ERROR, **event})
        number = event.get("sequence_number")
        error = {"type": "server_error", **{k: event.get(k) for k in ("code", "message", "param")}}
        told = {
            "type": "error",
            "status": HTTPStatus.BAD_GATEWAY,
            "error": error,
            "sequence_number": number,
        }
        return orjson.dumps(told)
    except (orjson.JSONDecodeError, AttributeError, TypeError):
        return data


def error_event(status: int, lines: bytes, body: bytes) -> bytes:
    """An error's answer as a message. lines: its header lines."""
    try:
        error = orjson.loads(body)["error"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        error = None
    if not isinstance(error, dict):
        message = "The engine gave no answer that can be sent over a WebSocket."
        error = {"type": "server_error", "code": None, "message": message, "param": None}
        status = max(status, HTTPStatus.BAD_GATEWAY)
    given = (line.partition(b": ") for line in lines.lower().split(b"\r\n"))
    headers = {name.decode(): value.decode("latin-1") for name, _, value in given if value}
    headers = {name: headers[name] for name in _TOLD_HEADERS if name in headers}
    return orjson.dumps({"type": "error", "status": status, "error": error, "headers": headers})


def _empty(id: str, message: Message, status: str) -> _Json:
    usage = dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), 0)
    details = {
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "model": message.model,
        "output": [],
        "previous_response_id": message.previous,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {**usage, **details} if status == "completed" else None,
    }


# Of the handshake, and not of the requests.
_NOT_OF_TURNS = frozenset(
    b"content-encoding content-type expect sec-websocket-extensions sec-websocket-key "
    b"sec-websocket-protocol sec-websocket-version x-request-id".split()
)
_HEAD = b"POST %b HTTP/1.1\r\ncontent-type: application/json\r\n%b%b\r\n"
_WARMS = f"{PREFILL}?wait=false&protocol={RESPONSES.name}".encode()

Begin = Callable[[Client, Request, LaneTurns], RunningExchange]


class SocketHandshake:
    """The exchange of a handshake: it opens the WebSocket, or answers with an error."""

    def __init__(
        self,
        services: Services,
        server: Connections,
        heads: RequestHeadCache,
        connection: HttpClient,
        request: Request,
        limit_bytes: int,
        begin: Begin,
    ) -> None:
        """heads: reads the heads of the requests. limit_bytes: of one message. begin: makes the
        exchange of a request."""
        self._services = services
        self._server = server
        self._heads = heads
        self._connection = connection
        self._request = request
        self._limit_bytes = limit_bytes
        self._begin = begin

    def begin(self) -> None:
        services, head = self._services, self._request.head
        try:
            if self._request.rejection is not None:
                raise self._request.rejection
            frames, answer = handshake(head)
        except BalancerError as error:
            status, reason, lines, body = services.error_response(error, head.path)
            self._connection.answer(status, reason, lines + VERSION_LINE, body)
            return
        metrics = services.metrics
        metrics.requests.counts[head.path, 101] += 1
        connection = WebSocketConnection(
            self._server,
            frames,
            head.tenant,
            services.account,
            self._limit_bytes,
            metrics.socket_closed,
        )
        connection.user = ResponsesSocket(services, self._heads, connection, head, self._begin)
        connection.received(self._connection.become(answer, connection))

    def client_gone(self) -> None: ...
    def resume(self) -> None: ...
    def end(self) -> None: ...


class ResponsesSocket:
    """The messages of one WebSocket, and their responses."""

    def __init__(
        self,
        services: Services,
        heads: RequestHeadCache,
        connection: WebSocketConnection,
        head: RequestHead,
        begin: Begin,
    ) -> None:
        self._services = services
        self._heads = heads
        self._connection = connection
        self._path, self._tenant = head.path, head.tenant
        self._target = head.target
        self._lines = header_lines(head.headers, {*_NOT_OF_TURNS, RESTATED.encode()})
        stated = head.fields.get(RESTATED.encode())
        self._stated = b"" if stated is None else b"%b: %b\r\n" % (RESTATED.encode(), stated)
        self._begin = begin
        forgot = services.metrics.socket_turns_forgotten.inc
        self._turns = ConnectionTurns(services.account.hold(head.tenant), forgot)
        self._unread: deque[tuple[bytearray, Hold]] = deque()
        self._reading: asyncio.Task[None] | None = None
        self._waiting: list[SocketTurn] = []
        self._running: dict[str | None, SocketTurn] = {}
        self._unsent: list[Hold] = []
        self._starting = False
        self._gone = False
        self._guard = Guard("websocket_messages", services.metrics.background_failed)
        services.metrics.sockets.inc()

    @property
    def _messages(self) -> int:
        is_reading = self._reading is not None
        return len(self._unread) + is_reading + len(self._waiting) + len(self._running)

    @property
    def is_idle(self) -> bool:
        return not self._messages

    @property
    def is_full(self) -> bool:
        return self._messages >= MAX_SOCKET_MESSAGES

    def message(self, text: bytearray, hold: Hold) -> None:
        """Takes a message, which is answered after earlier ones of its lane."""
        self._unread.append((text, hold))
        self._read_next()

    def refuse(self, error: BalancerError) -> None:
        """Sends an error that is no response's."""
        status, _, lines, body = self._services.error_response(error, self._path)
        self._connection.send(error_event(status, lines, body))

    def resume(self) -> None:
        """The client reads again."""
        for hold in self._unsent:
            hold.release()
        self._unsent.clear()
        for turn in tuple(self._running.values()):
            turn.exchange.resume()
        self._start_waiting()

    def gone(self) -> None:
        """The client disconnected, or has to. A second call does nothing."""
        if self._gone:
            return
        self._gone = True
        self._services.metrics.sockets.dec()
        running, self._running = self._running, {}
        for turn in running.values():
            turn.exchange.client_gone()
        holds = [turn.hold for turn in (*running.values(), *self._waiting)]
        for hold in (*holds, *self._unsent, *(hold for _, hold in self._unread)):
            hold.release()
        self._waiting.clear()
        self._unread.clear()
        self._turns.close()

    def end(self) -> None:
        """Ends all responses with an error."""
        for turn in self._waiting:
            turn.hold.release()
        self._waiting.clear()
        for turn in tuple(self._running.values()):
            turn.exchange.end()

    def _read_next(self) -> None:
        """Reads messages in their order; a large one in another process."""
        while self._unread and self._reading is None:
            text, hold = self._unread.popleft()
            if len(text) > LARGE_BODY_BYTES:
                self._reading = asyncio.create_task(self._read_large(text, hold))
            else:
                try:
                    self._add(read_message(text), hold)
                except BalancerError as error:
                    hold.release()
                    self.refuse(error)
        self._start_waiting()

    async def _read_large(self, text: bytearray, hold: Hold) -> None:
        # An event loop keeps no reference to a task, but `_reading` does.
        message, error = None, internal_error()
        with self._guard:
            try:
                bodies = self._services.bodies.large
                message, body = await bodies.call(self._tenant, text, read_large_message)
                message = message._replace(body=body)
            except BalancerError as refused:
                error = refused
        self._reading = None
        if self._gone:
            hold.release()
            return
        if message is None:
            hold.release()
            self.refuse(error)
        else:
            self._add(message, hold)
        self._read_next()

    def _add(self, message: Message, hold: Hold) -> None:
        lane = self._turns.lane(message.lane)
        self._waiting.append(SocketTurn(message, hold, self._connection, lane, self._ended))

    def _start_waiting(self) -> None:
        """Starts what can start: the first message of each lane in which none is answered."""
        if self._starting:
            return
        self._starting = True
        try:
            while not self._gone and not self._connection.paused:
                free = (t for t in self._waiting if t.message.lane not in self._running)
                turn = next(free, None)
                if turn is None:
                    break
                self._waiting.remove(turn)
                self._start(turn)
        finally:
            self._starting = False
        if not self._gone:
            if self._services.draining and self.is_idle:
                self._connection.close("shutdown")
            else:
                self._connection.read_on()

    def _start(self, turn: SocketTurn) -> None:
        self._running[turn.message.lane] = turn
        target = self._target if turn.message.warms is None else _WARMS
        stated = turn.message.lines or self._stated
        head, _ = self._heads.read(_HEAD % (target, self._lines, stated))
        body = turn.message.body
        turn.message = turn.message._replace(body=b"")  # the exchange drops it when it is sent
        request = Request(head, len(body), True, head.rejection, turn.hold, body)
        turn.exchange = self._begin(turn, request, turn.turns)
        turn.exchange.begin()

    def _ended(self, turn: SocketTurn) -> None:
        self._running.pop(turn.message.lane, None)
        if self._connection.paused and not self._gone:  # the client has not read it all
            turn.hold.set(self._connection.unsent_bytes)
            self._unsent.append(turn.hold)
        else:
            turn.hold.release()
        self._start_waiting()
