"""One client's connection. Its requests are answered in order, one at a time.

While an exchange runs, the connection goes on reading, so that it notices when the client
disconnects. It buffers a limited number of bytes of later requests, then stops reading. When the
client does not read its response, the exchange is paused.

If the connection cannot continue after a response, it lingers: our side ends, and what the client
still sends is read and dropped for a moment. Closing at once would reset the connection, and the
client could lose the answer.

    server --has--> connection --runs--> exchange --answers--> the connection, as its client
"""

import asyncio
import math
from http import HTTPStatus
from typing import Protocol, cast

from sgl_ext.balancer.http.request_reader import Request, RequestReader, http2_refusal
from sgl_ext.balancer.http.upstream import NO_BODY, write_both
from sgl_ext.limits.bounds import (
    HEAD_S,
    IDLE_S,
    LINGER_S,
    MAX_AHEAD_BYTES,
    UNREAD_S,
    body_deadline_s,
)
from sgl_ext.limits.byte_account import Hold
from sgl_ext.protocols.errors import BalancerError, too_many_connections

# Status, reason, header lines without framing, and body.
RawResponse = tuple[int, bytes, bytes, bytes]


class Client(Protocol):
    """The connection of a request's client, as its exchange uses it.

    paused: the client does not read as fast as the response arrives.
    """

    @property
    def paused(self) -> bool: ...
    def answer(self, status: int, reason: bytes, lines: bytes, body: bytes) -> None: ...
    def start_stream(self, status: int, reason: bytes, lines: bytes, data: bytes = b"") -> None: ...
    def write(self, data: bytes) -> None: ...
    def end_stream(self) -> None: ...

    def keep_awake(self) -> bool:
        """Shows the client that its answer is awaited, beside the answer's stream. False if only
        the stream can show that."""
        ...


class HttpClient(Client, Protocol):
    """A client that can turn to another protocol."""

    def become(self, answer: bytes, protocol: asyncio.BufferedProtocol) -> bytes: ...


class RunningExchange(Protocol):
    """The exchange, as its connection uses it."""

    def begin(self) -> None: ...
    def client_gone(self) -> None: ...
    def resume(self) -> None: ...
    def end(self) -> None: ...


class Connection(Protocol):
    """A client's connection, as the server uses it. deadline: when `time_out` is due."""

    deadline: float

    @property
    def is_idle(self) -> bool: ...
    def time_out(self) -> None: ...
    def end(self) -> None: ...
    def abort(self) -> None: ...


class Connections(Protocol):
    """The server, as all connections use it. `now` is the time of its last sweep.

    joined: False if there are too many connections, so that this one must end.
    """

    now: float

    def joined(self, connection: Connection) -> bool: ...
    def left(self, connection: Connection) -> None: ...


class Server(Connections, Protocol):
    """The server, as connections use it that begin with HTTP."""

    draining: bool

    def reader(self) -> RequestReader: ...
    def exchange(self, connection: HttpClient, request: Request) -> RunningExchange: ...
    def error_response(self, error: BalancerError, path: str) -> RawResponse: ...


_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class DownstreamConnection(asyncio.BufferedProtocol):
    """The server side of a connection.

    deadline: when `time_out` is due.
    paused: the client does not read as fast as the response arrives.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._reader: RequestReader
        self._transport: asyncio.Transport
        self._request: Request | None = None
        self._exchange: RunningExchange | None = None
        self._starting = False
        self._in_head = False
        self._body_began_s: float | None = None
        self._unsent: Hold | None = None
        self._reading_paused = False
        self._lingering = False
        self.paused = False
        self.deadline = math.inf

    @property
    def busy(self) -> bool:
        """Whether an exchange runs."""
        return self._exchange is not None

    @property
    def is_idle(self) -> bool:
        """Whether no exchange runs and no response is left to send."""
        return self._exchange is None and not self._lingering

    # The exchange sends its response through these methods, exactly one for each request.

    def answer(self, status: int, reason: bytes, lines: bytes, body: bytes) -> None:
        """Sends a complete response. `lines` are header lines without framing."""
        request = self._request
        assert request is not None
        end = self._connection_line(request)
        if request.head.method == "HEAD" or status in NO_BODY:
            # A response to HEAD states the length that the body of a GET would have.
            if body and status not in NO_BODY:
                end = b"content-length: %d\r\n%b" % (len(body), end)
            self._transport.write(b"HTTP/1.1 %d %b\r\n%b%b" % (status, reason, lines, end))
        else:
            head = (status, reason, lines, len(body), end)
            head_lines = b"HTTP/1.1 %d %b\r\n%bcontent-length: %d\r\n%b" % head
            write_both(self._transport, head_lines, body)
        self._end_exchange()

    def start_stream(self, status: int, reason: bytes, lines: bytes, data: bytes = b"") -> None:
        """Sends the head of a response of unknown length, and the first part of its body.

        Both go out in one write, so that the client does not wake up twice.
        """
        request = self._request
        assert request is not None
        framing = b"transfer-encoding: chunked\r\n" if request.head.http_1_1 else b""
        if not request.head.http_1_1:
            request.keep_alive = False
        head = (status, reason, lines, framing, self._connection_line(request))
        self._transport.write(b"HTTP/1.1 %d %b\r\n%b%b%b" % head + self._framed(data))

    def write(self, data: bytes) -> None:
        """Sends a part of the body, which must not be empty."""
        self._transport.write(self._framed(data))

    def _framed(self, data: bytes) -> bytes:
        assert self._request is not None
        if not data or not self._request.head.http_1_1:
            return data
        return b"%x\r\n%b\r\n" % (len(data), data)

    def end_stream(self) -> None:
        """Ends the response."""
        assert self._request is not None
        if self._request.head.http_1_1:
            self._transport.write(b"0\r\n\r\n")
        self._end_exchange()

    def keep_awake(self) -> bool:
        return False

    def become(self, answer: bytes, protocol: asyncio.BufferedProtocol) -> bytes:
        """Sends an answer after which the connection is another protocol's. Returns what has
        arrived for that."""
        request, self._request, self._exchange = self._request, None, None
        assert request is not None
        request.hold.release()
        ahead = bytes(self._reader.ahead)
        self._lingering = True
        self._reader.close()
        self._server.left(self)
        self._transport.write(answer)
        self._transport.set_protocol(protocol)
        if self._reading_paused:
            self._transport.resume_reading()
        protocol.connection_made(self._transport)
        return ahead

    def _connection_line(self, request: Request) -> bytes:
        if self._server.draining:
            request.keep_alive = False
        if not request.keep_alive:
            return b"connection: close\r\n\r\n"
        return b"\r\n" if request.head.http_1_1 else b"connection: keep-alive\r\n\r\n"

    def _end_exchange(self) -> None:
        request, self._request, self._exchange = self._request, None, None
        assert request is not None
        is_last = not request.keep_alive or self._server.draining
        if is_last:
            self._close(linger=request.unread)
        if self.paused:  # the client has not read it all
            request.hold.set(self._transport.get_write_buffer_size())
            self._unsent = request.hold
        else:
            request.hold.release()
        if is_last:
            return
        if self._reader.ahead or self._reading_paused:
            self._start_next()
        else:
            self.deadline = self._server.now + IDLE_S

    # The transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has the same methods, but another base class.
        self._transport = cast(asyncio.Transport, transport)
        is_served, self._reader = self._server.joined(self), self._server.reader()
        self.deadline = self._server.now + IDLE_S
        if not is_served:
            self._reject(too_many_connections())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._lingering:
            return
        if self._exchange is None and not self.paused:
            self._start_next(nbytes)
        else:
            self._reader.received(nbytes)
        if len(self._reader.ahead) > MAX_AHEAD_BYTES and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """A client that stops sending has disconnected: the transport closes."""

    def connection_lost(self, error: Exception | None) -> None:
        self._release_unsent()
        self._server.left(self)
        self._lingering = True
        self._reader.close()
        request, self._request = self._request, None
        if request is not None:
            request.hold.release()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_gone()

    def pause_writing(self) -> None:
        self.paused = True
        self.deadline = self._server.now + UNREAD_S

    def resume_writing(self) -> None:
        self.paused = False
        self._release_unsent()
        if self._lingering:
            return
        self.deadline = math.inf
        if self._exchange is not None:
            self._exchange.resume()
        else:
            self._start_next()

    # Timeouts and the end.

    def time_out(self) -> None:
        """Ends the connection after its deadline. An incomplete request gets a 408."""
        if self._lingering or self.paused or self.busy:
            self._transport.abort()
        elif self._reader.ahead or self._reader.in_body:
            self._reject(
                BalancerError(HTTPStatus.REQUEST_TIMEOUT, "The request did not arrive in time.")
            )
        else:
            self._transport.close()

    def end(self) -> None:
        """Ends the exchange with an error, and closes the connection."""
        if self._exchange is not None:
            self._exchange.end()
        else:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _start_next(self, received: int = 0) -> None:
        """Starts the next complete request, unless the client does not read its responses.
        received: how many bytes were just put into the reader's buffer."""
        if self._starting:
            return
        self._starting = True
        try:
            while self._exchange is None and not self.paused and not self._lingering:
                request, received = self._reader.next(received), 0
                if request is None:
                    self._await_more()
                    return
                self._request = request
                self._in_head = False
                self._body_began_s = None
                self.deadline = math.inf
                self._exchange = exchange = self._server.exchange(self, request)
                exchange.begin()
        except BalancerError as error:
            self._reject(error)
        finally:
            self._starting = False

    def _await_more(self) -> None:
        if self._reader.wants_continue():
            self._transport.write(_CONTINUE)
        if self._reading_paused and not self._transport.is_closing():
            self._reading_paused = False
            self._transport.resume_reading()
        now = self._server.now
        if self._reader.in_body:
            if self._body_began_s is None:
                self._body_began_s = now
            self.deadline = self._body_began_s + body_deadline_s(self._reader.arrived_bytes)
        elif not self._reader.ahead:
            self.deadline = now + IDLE_S
        elif not self._in_head:
            self.deadline = now + HEAD_S
        self._in_head = bool(self._reader.ahead)

    def _reject(self, error: BalancerError) -> None:
        status, reason, lines, body = self._server.error_response(error, self._reader.path)
        if self._reader.is_http2:
            self._transport.write(http2_refusal(body))
        else:
            framing = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            head = (status, reason, lines, framing, body)
            self._transport.write(b"HTTP/1.1 %d %b\r\n%b%b%b" % head)
        self._close(linger=True)

    def _release_unsent(self) -> None:
        hold, self._unsent = self._unsent, None
        if hold is not None:
            hold.release()

    def _close(self, *, linger: bool) -> None:
        self._lingering = True
        self._reader.close()
        if linger and not self._transport.is_closing():
            if self._reading_paused:
                self._reading_paused = False
                self._transport.resume_reading()
            self._transport.write_eof()
            self.deadline = self._server.now + LINGER_S
        else:
            self._transport.close()
