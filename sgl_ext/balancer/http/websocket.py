"""A client's open WebSocket: its handshake (RFC 6455, section 4.2), its frames and its end.
wsproto reads and writes frames.

    open --a whole text message--> its user, which sends text messages
      |
      +--garbage, too large, unread, idle, shutdown--> close frame, then linger

A message grows in the byte budget as it arrives and may be as large as a body. While the user has
as many messages as it takes, or the client does not read, nothing is read. Extensions are declined:
a compressed message could be a thousand times as large as its frames. Pings keep proxies awake; a
client that answers none is not cut, because some read only while they wait for an answer.
"""

import asyncio
import math
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol, cast

from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    TextMessage,
)

from sgl_ext.balancer.http.downstream import Connections
from sgl_ext.balancer.http.request_head import RequestHead
from sgl_ext.limits.bounds import (
    LINGER_S,
    SOCKET_IDLE_S,
    SOCKET_PING_S,
    UNREAD_S,
    body_deadline_s,
)
from sgl_ext.limits.byte_account import ByteAccount, Hold
from sgl_ext.protocols.errors import BalancerError, bad_field, body_too_large, no_memory

_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")
_UPGRADE = ((b"host", b"-"), (b"connection", b"upgrade"), (b"upgrade", b"websocket"))
VERSION_LINE = b"sec-websocket-version: 13\r\n"
"""Of an answer that refuses a handshake."""


def handshake(head: RequestHead) -> tuple[WSConnection, bytes]:
    """The frames of a connection that begins with this head, and the answer that opens it.

    Raises BalancerError 400 for a malformed handshake, 426 for another version.
    """
    version = head.fields.get(b"sec-websocket-version", b"")
    if version != b"13":
        message = f"sec-websocket-version: must be 13, not {version.decode('latin-1')[:40]!r}"
        raise BalancerError(HTTPStatus.UPGRADE_REQUIRED, message, param="sec-websocket-version")
    key = head.fields.get(b"sec-websocket-key", b"")
    if not _KEY.fullmatch(key):
        raise bad_field("sec-websocket-key", "must be 16 bytes in base64")
    frames = WSConnection(ConnectionType.SERVER)
    checked = [(b"sec-websocket-key", key), (b"sec-websocket-version", version)]
    frames.initiate_upgrade_connection([*_UPGRADE, *checked], "/")
    list(frames.events())  # the request
    return frames, frames.send(AcceptConnection())


# Shared by all sockets: its content is copied before the next read.
_SCRATCH = memoryview(bytearray(16 * 1024))
# Of one socket, in one round of the event loop. An empty frame has 6 bytes and takes 20 us.
_FRAMES = 64
_GOING_AWAY, _UNSUPPORTED, _POLICY, _TOO_LARGE, _LATER = 1001, 1003, 1008, 1009, 1013


class SocketUser(Protocol):
    """What takes the messages of a socket.

    is_idle: nothing is left to do for any message. is_full: it takes no more for now.
    """

    @property
    def is_idle(self) -> bool: ...
    @property
    def is_full(self) -> bool: ...
    def message(self, text: bytearray, hold: Hold) -> None: ...
    def refuse(self, error: BalancerError) -> None: ...
    def resume(self) -> None: ...
    def gone(self) -> None: ...
    def end(self) -> None: ...


class WebSocketConnection(asyncio.BufferedProtocol):
    """The server side of an open WebSocket.

    user: has to be set before the connection is made.
    deadline: when `time_out` is due.
    paused: the client does not read as fast as messages are sent.
    """

    user: SocketUser

    def __init__(
        self,
        server: Connections,
        frames: WSConnection,
        tenant: str,
        account: ByteAccount,
        limit_bytes: int,
        closed: Callable[[str], object],
    ) -> None:
        """limit_bytes: of one message. closed: called with the reason if we end the connection."""
        self._server = server
        self._frames = frames
        self._tenant = tenant
        self._account = account
        self._limit_bytes = limit_bytes
        self._closed = closed
        self._transport: asyncio.Transport
        self._text = bytearray()
        self._hold = account.hold(tenant)
        self._began_s = math.inf  # when the incomplete message did
        self._active_s = server.now
        self._reading = False
        self._reading_paused = False
        self._resting = False  # until the next round of the event loop
        self._frames_taken = 0
        self._closing = False
        self.paused = False
        self.deadline = server.now + SOCKET_PING_S

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to answer."""
        return not self._closing and self.user.is_idle

    @property
    def unsent_bytes(self) -> int:
        """What the client has not read."""
        return self._transport.get_write_buffer_size()

    # The user calls these.

    def send(self, text: bytes) -> None:
        """Sends a text message, unless the connection ends."""
        if not self._closing:
            event = TextMessage(data=text.decode(errors="replace"))
            self._transport.write(self._frames.send(event))

    def ping(self) -> None:
        """Sends a ping, unless the connection ends or the client does not read."""
        if not (self._closing or self.paused):
            self._transport.write(self._frames.send(Ping()))

    def read_on(self) -> None:
        """Goes on reading: the user takes messages again, or the client reads."""
        if not self._reading and not self._closing:
            self._read()

    def close(self, reason: str, code: int = _GOING_AWAY) -> None:
        """Ends the connection with a close frame, after what was sent."""
        if self._closing:
            return
        self._closing = True
        self._closed(reason)
        self._transport.write(self._frames.send(CloseConnection(code=code, reason=reason)))
        self._leave()

    # The transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has the same methods, but another base class.
        self._transport = cast(asyncio.Transport, transport)
        self._server.joined(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _SCRATCH

    def buffer_updated(self, nbytes: int) -> None:
        self.received(bytes(_SCRATCH[:nbytes]))

    def received(self, data: bytes) -> None:
        """Takes bytes from the client."""
        if not self._closing:
            self._frames.receive_data(data)
            self._read()

    def eof_received(self) -> None:
        """A client that stops sending has disconnected: the transport closes."""

    def connection_lost(self, error: Exception | None) -> None:
        self._closing = True
        self._server.left(self)
        self._hold.release()
        self.user.gone()

    def pause_writing(self) -> None:
        self.paused = True
        self.deadline = self._server.now + UNREAD_S

    def resume_writing(self) -> None:
        self.paused = False
        self.deadline = self._server.now + SOCKET_PING_S
        if not self._closing:
            self.user.resume()
            self.read_on()

    # Timeouts and the end.

    def time_out(self) -> None:
        """Ends the connection if it is unread, idle or has a message that does not end; otherwise
        sends a ping."""
        now = self._server.now
        if self._closing or self.paused:
            if not self._closing:
                self._closed("unread")
            self._transport.abort()
        elif now > self._began_s + body_deadline_s(len(self._text)):
            message = "The message did not arrive in time."
            self._fail(BalancerError(HTTPStatus.REQUEST_TIMEOUT, message), "slow message", _POLICY)
        elif self.user.is_idle and now > self._active_s + SOCKET_IDLE_S:
            self.close("idle")
        else:
            if not self.user.is_idle:
                self._active_s = now
            self._transport.write(self._frames.send(Ping()))
            self.deadline = now + SOCKET_PING_S

    def end(self) -> None:
        """Ends what runs with an error, and the connection."""
        self.user.end()
        self.close("shutdown")

    def abort(self) -> None:
        self._transport.abort()

    def _read(self) -> None:
        """Takes what has arrived, as far as the user takes messages and the client reads."""
        self._reading = True
        try:
            if not self._must_wait():
                for event in self._frames.events():
                    self._take(event)
                    if self._closing or self._must_wait():
                        break
        finally:
            self._reading = False
        if self._closing or self._must_wait() == self._reading_paused:
            return
        self._reading_paused = not self._reading_paused
        if self._reading_paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _must_wait(self) -> bool:
        return self._resting or self.paused or self.user.is_full

    def _rested(self) -> None:
        self._resting = False
        self.read_on()

    def _take(self, event: Event) -> None:
        self._frames_taken += 1
        if self._frames_taken == _FRAMES:
            self._frames_taken, self._resting = 0, True
            asyncio.get_running_loop().call_soon(self._rested)
        if isinstance(event, TextMessage):
            self._add(event)
        elif isinstance(event, Ping):
            self._transport.write(self._frames.send(event.response()))
        elif isinstance(event, BytesMessage):
            message = "Messages must be text."
            error = BalancerError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message)
            self._fail(error, "binary message", _UNSUPPORTED)
        elif isinstance(event, CloseConnection):
            if self._frames.state is ConnectionState.OPEN:  # a fault that wsproto found
                self.close("malformed frames", event.code)
            else:
                self._closing = True
                self._transport.write(self._frames.send(event.response()))
                self._transport.close()

    def _add(self, event: TextMessage) -> None:
        if not self._text:
            self._began_s = self._server.now
        self._text += event.data.encode()
        if len(self._text) > self._limit_bytes:
            self._fail(body_too_large(self._limit_bytes), "message too large", _TOO_LARGE)
        elif not self._hold.take_up_to(len(self._text)):
            self._fail(no_memory(), "no memory", _LATER)
        elif event.message_finished:
            text, hold = self._text, self._hold
            self._text, self._hold = bytearray(), self._account.hold(self._tenant)
            self._began_s, self._active_s = math.inf, self._server.now
            self.user.message(text, hold)

    def _fail(self, error: BalancerError, reason: str, code: int) -> None:
        self.user.refuse(error)
        self.close(reason, code)

    def _leave(self) -> None:
        """Waits a moment for the client's own close frame: closing at once would reset the
        connection, and the client could lose what was sent last."""
        self._text.clear()
        self._hold.release()
        self.user.gone()
        if not self._transport.is_closing():
            if self._reading_paused:
                self._reading_paused = False
                self._transport.resume_reading()
            self._transport.write_eof()
            self.deadline = self._server.now + LINGER_S
