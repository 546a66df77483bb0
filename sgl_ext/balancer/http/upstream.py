"""A connection to a worker: it sends a request and parses the response as it arrives.

A worker may close an idle connection at the moment a request is sent on it. So a connection records
whether it was used before and whether any of the response has arrived; the exchange then knows that
the worker is not to blame.

    pool --leases or opens--> connection --head, data, end--> receiver
      ^                           |
      +------ takes it back ------+

A worker's heads are nearly equal; only the body's length changes, and the date once a second. So
the heads of complete responses are cached as those of requests are: by their bytes without the
digits of the length, after the parser has found such a response to be well-formed. Those of
streams are cached by their headers, without the date.
"""

import asyncio
import re
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools
import msgspec
from msgspec import structs

from sgl_ext.balancer.http.request_head import (
    HOP_BY_HOP,
    LENGTH,
    RequestHead,
    connection_options,
    header_lines,
    transfer_coding,
)
from sgl_ext.limits.bounds import MAX_WRITTEN_BYTES
from sgl_ext.protocols.request_ids import NAMES
from sgl_ext.wire.headers import rank_line

_STREAM_HEADERS = {b"cache-control": b"no-cache", b"x-accel-buffering": b"no"}
STREAM_LINES = header_lines([*_STREAM_HEADERS.items()], ())
"""Of a stream: proxies must neither store nor collect its events."""
NO_BODY = (204, 304)
"""Statuses of responses that have no body, whatever their length says."""
_MAX_CACHED = 256
# Joining a small body with its head is cheaper than a write of two parts.
_JOINED_BYTES = 16 * 1024


class ResponseHead(msgspec.Struct, frozen=True, gc=False):
    """Status and header lines for the client.

    coding: the transfer coding of the body; None if it has none.
    streams: the body is server-sent events. stream_lines: what the lines of a stream lack.
    is_named: the worker gave the request an id.
    """

    status: int
    reason: bytes
    lines: bytes = b""
    coding: bytes | None = None
    streams: bool = False
    stream_lines: bytes = b""
    is_named: bool = False


def read_response_head(
    status: int, reason: bytes, headers: list[tuple[bytes, bytes]]
) -> ResponseHead:
    """The head with these headers, whose names are in lower case."""
    streams = is_named = False
    lacking = _STREAM_HEADERS
    for name, value in headers:
        if name == b"content-type":
            streams = value.startswith(b"text/event-stream")
        elif name in NAMES:
            is_named = True
        elif name in lacking:
            lacking = {**lacking}
            del lacking[name]
    # The balancer names the request to the client.
    dropped = HOP_BY_HOP | NAMES | connection_options(headers)
    return ResponseHead(
        status,
        reason,
        header_lines(headers, dropped),
        transfer_coding(headers),
        streams,
        header_lines([*lacking.items()], ()) if streams else b"",
        is_named,
    )


class ResponseHeadCache:
    """The latest heads of one worker's complete responses, and of its streams."""

    def __init__(self) -> None:
        self._cached: dict[bytes, ResponseHead] = {}
        self._chunked: dict[tuple[object, ...], ResponseHead] = {}

    def of(self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]]) -> ResponseHead:
        """The head with these headers. That of a chunked response is read once."""
        key = status, reason, *headers
        head = self._chunked.get(key)
        if head is None:
            head = read_response_head(status, reason, headers)
            if head.coding is not None and not head.is_named:
                if len(self._chunked) >= _MAX_CACHED:
                    self._chunked.clear()
                self._chunked[key] = head
        return head

    def read(self, data: bytes) -> tuple[ResponseHead, bytes] | None:
        """Head and body, if `data` is exactly one response with a cached head."""
        found = _split(data)
        if found is None:
            return None
        key, end = found
        head = self._cached.get(key)
        return None if head is None else (head, data[end:])

    def add(self, data: bytes, head: ResponseHead) -> None:
        """Caches the head of a complete, well-formed response that keeps the connection open.
        A head with a request id is not cached, as it never comes again."""
        found = None if head.is_named or head.status in NO_BODY else _split(data)
        if found is not None and data.startswith(b"HTTP/1.1 %d " % head.status):
            if len(self._cached) >= _MAX_CACHED:
                self._cached.clear()
            self._cached[found[0]] = head


def _split(data: bytes) -> tuple[bytes, int] | None:
    """The head without the digits of its length, and where the body begins; None if the length
    is not that of the data."""
    end = data.find(b"\r\n\r\n") + 4
    match = LENGTH.search(data, 0, end) if end >= 4 else None
    if match is None or int(match[1]) != len(data) - end:
        return None
    start, stop = match.span(1)
    return data[:start] + data[stop:end], end


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


def write_both(transport: asyncio.Transport, head: bytes, body: bytes | bytearray) -> None:
    """Writes a head and a body at once."""
    if len(body) <= _JOINED_BYTES:
        transport.write(head + body)
    else:
        transport.writelines((head, body))


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
        self._date_line = b""
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
        first, had_head = not self.heard, self._head is not None
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
        if self._head is not None and not had_head:
            receiver.response_head(self._head)
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
        name, value = name.lower(), value.rstrip(b" \t")
        if not self._in_head:
            if name in (b"content-length", b"transfer-encoding"):
                raise MalformedResponse("a trailer about the framing")
        elif name == b"date":
            self._date_line = b"date: %b\r\n" % value
        else:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        head = self._pool.heads.of(status, self._reason, self._headers)
        if head.coding not in (None, b"chunked"):
            raise MalformedResponse("a transfer coding that is not chunked")
        if not _REASON.fullmatch(self._reason):
            raise MalformedResponse("a control character in its reason")
        if status < 200:
            if status < 100 or status == 101:
                raise MalformedResponse(f"status {status}")
            return
        self._in_head = False
        self._framed = head.coding is not None or b"content-length" in dict(self._headers)
        self._head = structs.replace(head, lines=self._date_line + head.lines)
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
            self._reason = self._date_line = b""
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


# SGLang closes an idle connection after 5 s. We close it first, or a request could race the close.
# A sweep comes once a second, so an idle connection lives for 3 to 4 s.
_IDLE_SWEEPS = 4
CONNECT_TIMEOUT_S = 5.0


class ConnectionPool:
    """Connections to a worker. The most recently used idle connection is used first.

    Call `sweep` once a second.
    """

    def __init__(self, url: str, lines: bytes = b"") -> None:
        """lines: header lines that each request to this worker gets in addition to its own."""
        self.url = url
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or 80
        self._base = parts.path.rstrip("/").encode()
        self._netloc = parts.netloc.rpartition("@")[2].encode()
        self.add_to_each(lines)
        self.heads = ResponseHeadCache()
        self.connections: set[UpstreamConnection] = set()
        self._idle: list[UpstreamConnection] = []
        self._connecting: set[asyncio.Task[None]] = set()

    def add_to_each(self, lines: bytes) -> None:
        """Replaces the header lines that each request gets."""
        self._first_lines = b" HTTP/1.1\r\nhost: %b\r\n%b" % (self._netloc, lines)

    def request_line(self, method: str, target: bytes) -> bytes:
        """The first lines of a request to this worker: request line, Host and the engine secret."""
        return b"%b %b%b%b" % (method.encode(), self._base, target, self._first_lines)

    def begin_of(self, head: RequestHead) -> bytes:
        """The first lines of a request and the header lines of its head. A head that goes to the
        same worker again has them."""
        first_lines, begin = head.begun
        if first_lines is not self._first_lines:
            begin = self.request_line(head.method, head.target) + head.upstream_lines
            head.begun = self._first_lines, begin
        return begin

    def lease(self) -> UpstreamConnection | None:
        """An idle connection; None if there is none, so that one has to be opened."""
        return self._idle.pop() if self._idle else None

    def release(self, connection: UpstreamConnection) -> None:
        """Takes a connection back for the next request."""
        connection.sweeps = 0
        self._idle.append(connection)

    def connect(self, receiver: ResponseReceiver) -> asyncio.Task[None]:
        """Opens a connection and calls the receiver's `connected` or `connect_failed`, unless the
        task is cancelled before that."""
        task = asyncio.get_running_loop().create_task(self._connect(receiver))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return task

    async def _connect(self, receiver: ResponseReceiver) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await self._open()
        except Exception as error:  # whatever it is, the request must not wait for ever
            receiver.connect_failed(type(error).__name__)
        else:
            receiver.connected(connection)

    async def _open(self) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: UpstreamConnection(self), self._host, self._port
        )
        return connection

    def forget(self, connection: UpstreamConnection) -> None:
        """Removes a closed connection."""
        self.connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def sweep(self) -> None:
        """Closes connections that were idle for too long."""
        for connection in tuple(self._idle):
            connection.sweeps += 1
            if connection.sweeps == _IDLE_SWEEPS:
                connection.abort()

    def close_idle(self) -> None:
        """Closes the idle connections."""
        for connection in tuple(self._idle):
            connection.abort()

    def close(self) -> None:
        """Closes every connection. Receivers are not called again."""
        for task in tuple(self._connecting):
            task.cancel()
        for connection in tuple(self.connections):
            connection.abort()
        self._idle.clear()


class Engine(Protocol):
    """An engine, or a rank of one, as connections go to it."""

    url: str
    rank: int


class EngineConnections:
    """The connections to all engines."""

    def __init__(self, lines: bytes) -> None:
        """lines: header lines that each request gets, whichever its engine."""
        self._lines = lines
        self._pools: dict[Engine, ConnectionPool] = {}

    def to(self, engine: Engine) -> ConnectionPool:
        """The connections to an engine."""
        pool = self._pools.get(engine)
        if pool is None:
            lines = self._lines + rank_line(engine.rank)
            pool = self._pools[engine] = ConnectionPool(engine.url, lines)
        return pool

    def change_lines(self, lines: bytes) -> None:
        """Replaces the header lines that each request gets."""
        self._lines = lines
        for engine, pool in self._pools.items():
            pool.add_to_each(lines + rank_line(engine.rank))

    def leave(self, engine: Engine, *, is_gone: bool) -> None:
        """Closes the idle connections to an engine that gets no requests. Its running requests may
        still end well."""
        if engine in self._pools:
            self._pools[engine].close_idle()
            if is_gone:
                del self._pools[engine]

    def sweep(self) -> None:
        """Closes connections that were idle for too long. Call it once a second."""
        for pool in self._pools.values():
            pool.sweep()

    def close(self) -> None:
        """Closes every connection."""
        for pool in self._pools.values():
            pool.close()
