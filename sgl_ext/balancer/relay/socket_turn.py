"""A message on the WebSocket of `/v1/responses`, and its response: for the exchange of an ordinary
request it is the client's connection.

    {"type": "response.create", "stream_id"?, "generate"?, ...the body of POST /v1/responses}

Each event of the stream becomes a text message. With `generate: false` the prompt is only prefilled
(`/v1/prefill`), and the response is empty; the next one continues it.
"""

import re
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

import orjson

from sgl_ext.balancer.conversations import stored_turns
from sgl_ext.balancer.conversations.connection_turns import LaneTurns
from sgl_ext.balancer.http.downstream import RunningExchange
from sgl_ext.balancer.relay.reading import parse_json
from sgl_ext.limits.byte_account import Hold
from sgl_ext.protocols.errors import bad_field

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
        own, previous = stored_turns.own_items(document), document.get("previous_response_id")
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
    """The response to one message.

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
        self.turns.add(id, message.previous, stored_turns.packed(own, []))
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
