"""A connection to a worker: it sends a request and parses the response as it arrives.

A worker may close an idle connection at the moment a request is sent on it. So a connection records
whether it was used before and whether any of the response has arrived; the exchange then knows that
the worker is not to blame.
"""

import asyncio
import re
from typing import TYPE_CHECKING, Protocol, cast

import httptools

from sgl_ext.balancer.http.interfaces import write_both
from sgl_ext.balancer.http.request_head import transfer_coding
from sgl_ext.balancer.http.response_head import ResponseHead
from sgl_ext.limits.bounds import MAX_WRITTEN_BYTES

if TYPE_CHECKING:
    from sgl_ext.balancer.http.connection_pool import ConnectionPool

_MAX_HEAD_BYTES = 256 * 1024
_NOTHING = memoryview(b"")
_REASON = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")


class MalformedResponse(Exception):
    """The worker sent no HTTP response that can be passed on."""


class Upstream(Protocol):
    """A way to a worker, as the request that uses it sees it. The members are those of
    `UpstreamConnection`; behind a gateway the way is not a connection of ours."""

    heard: bool
    reused: bool

    def send(
        self, receiver: "ResponseReceiver", head: bytes, body: bytes | bytearray, method: str
    ) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def abort(self) -> None: ...


class ResponseReceiver(Protocol):
    """Gets a response, in this order: connected, head, data, end with the last part of the data; or
    a failure at any point."""

    def connected(self, connection: Upstream) -> None: ...
    def connect_failed(self, reason: str) -> None: ...
    def response_head(self, head: ResponseHead) -> None: ...
    def response_data(self, data: bytes) -> None: ...
    def response_end(self, last: bytes) -> None: ...
    def upstream_lost(self, reason: str) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """One connection, with one response at a time.

    heard: a part of the response has arrived.
    reused: the connection has served a request before.
    sweeps: how many sweeps it has been idle.
    """

    def __init__(self, pool: "ConnectionPool") -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._receiver: ResponseReceiver | None = None
        self._transport: asyncio.Transport
        self._pieces: list[bytes] = []
        self._usable = True
        self._framed = False
        self._paused = False
        self._bodiless = False
        self._unsent = _NOTHING
        self._writing_paused = False
        self.reused = False
        self.sweeps = 0
        self._reset()

    def _reset(self) -> None:
        self._reason = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head: ResponseHead | None = None
        self.heard = False
        self._in_head = True
        self._head_bytes = 0
        self._complete = False

    def send(
        self, receiver: ResponseReceiver, head: bytes, body: bytes | bytearray, method: str
    ) -> None:
        """Sends a request; `receiver` gets the response."""
        self._receiver = receiver
        self._bodiless = method == "HEAD"
        if len(body) > MAX_WRITTEN_BYTES:
            self._transport.write(head)
            self._unsent = memoryview(body)
            self._send_more()
        elif body:
            write_both(self._transport, head, body)
        else:
            self._transport.write(head)

    def _send_more(self) -> None:
        """Sends the next part of a large body: a worker on this machine would take all of it at
        once, while everything else waits."""
        if self._unsent and not self._writing_paused and not self._transport.is_closing():
            part = self._unsent[:MAX_WRITTEN_BYTES]
            self._unsent = self._unsent[MAX_WRITTEN_BYTES:]
            self._transport.write(part)
            asyncio.get_running_loop().call_soon(self._send_more)

    def pause(self) -> None:
        """Stops reading, because the receiver cannot pass more on."""
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Reads again."""
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Closes at once. The receiver is not called again, and the worker aborts the request."""
        self._receiver = None
        self._usable = False
        self._unsent = _NOTHING
        self._pool.forget(self)
        self._transport.abort()

    # The transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has the same methods, but another base class.
        self._transport = cast(asyncio.Transport, transport)
        self._pool.connections.add(self)

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:
            # No request is running.
            self.abort()
            return
        first = not self.heard
        self.heard = True
        if first and not self._bodiless:
            known = self._pool.heads.read(data)
            if known is not None:
                head, body = known
                receiver.response_head(head)
                self._end(True, body)
                return
        fault = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            fault = str(error.__context__ or error)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                fault = "the head is too long"
        pieces = self._pieces
        part = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._complete:
            if first and fault is None and self._usable and self._head is not None:
                self._pool.heads.add(data, self._head)
            self._end(fault is None, part)
            return
        if part:
            receiver.response_data(part)
        if fault is not None:
            self._lost(f"malformed response: {fault}")

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._send_more()

    def eof_received(self) -> None:
        """Does nothing: the transport closes, and `connection_lost` decides what that means."""

    def connection_lost(self, error: Exception | None) -> None:
        self._usable = False
        self._pool.forget(self)
        if self._receiver is None:
            return
        if error is None and not self._in_head and not self._framed:
            # A response without a length ends with the connection.
            self._end(False, b"")
        else:
            self._lost("connection closed" if error is None else type(error).__name__)

    # The parser calls these.

    def on_message_begin(self) -> None:
        if self._complete:
            raise MalformedResponse("more than one response")

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._headers.append((name.lower(), value.rstrip(b" \t")))
        elif name.lower() in (b"content-length", b"transfer-encoding"):
            raise MalformedResponse("a trailer about the framing")

    def on_headers_complete(self) -> None:
        status, coding = self._parser.get_status_code(), transfer_coding(self._headers)
        if coding not in (None, b"chunked"):
            raise MalformedResponse("a transfer coding that is not chunked")
        if not _REASON.fullmatch(self._reason):
            raise MalformedResponse("a control character in its reason")
        if status < 200:
            if status < 100 or status == 101:
                raise MalformedResponse(f"status {status}")
            return
        self._in_head = False
        self._framed = coding is not None or b"content-length" in dict(self._headers)
        self._head = ResponseHead(status, self._reason, self._headers)
        if self._receiver is not None:
            self._receiver.response_head(self._head)
        if self._bodiless:
            # The parser does not know that no body follows, so it cannot be used again.
            self._complete = True
            self._usable = False

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self._in_head:
            # An interim response: the final one follows.
            self._reason = b""
            self._headers.clear()
            return
        self._complete = True
        is_1_1 = self._parser.get_http_version() == "1.1"
        self._usable = self._usable and is_1_1 and self._parser.should_keep_alive()

    def _end(self, clean: bool, last: bytes) -> None:
        """The response is complete with its last part. The connection is used again if its state
        allows."""
        receiver, self._receiver = self._receiver, None
        reusable = clean and self._usable and not self._transport.is_closing()
        if reusable and not self._unsent and not self._transport.get_write_buffer_size():
            if self._in_head:  # the parser was not needed
                self.heard = False
            else:
                self._reset()
            if self._paused:
                self.resume()
            self.reused = True
            self._pool.release(self)
        else:
            self.abort()
        if receiver is not None:
            receiver.response_end(last)

    def _lost(self, reason: str) -> None:
        receiver = self._receiver
        self.abort()
        if receiver is not None:
            receiver.upstream_lost(reason)
