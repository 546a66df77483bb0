"""Connections to one worker: answers are parsed as they come, and connections are kept.

A worker may close a kept connection at the moment a request is sent on it. So
a connection says whether it was used before and whether any of the answer had
come when it was lost; the exchange then knows that the worker is not to blame.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from sgl_ext.balancer.http.response_head import ResponseHead, ResponseHeadCache

# SGLang closes an idle connection after 5 s; ours must go first, or a request races the close.
# In sweeps, which come once a second: an idle connection lives for 3 to 4 s.
_KEPT_SWEEPS = 4
CONNECT_TIMEOUT_S = 5.0
_MAX_HEAD_BYTES = 256 * 1024


class MalformedResponse(Exception):
    """What a worker sent is no HTTP answer that can be passed on."""


class ResponseReceiver(Protocol):
    """Whoever waits for an answer. Called in this order: connected, head, data, end; or lost."""

    def connected(self, connection: UpstreamConnection) -> None: ...
    def connect_failed(self, reason: str) -> None: ...
    def response_head(self, head: ResponseHead) -> None: ...
    def response_data(self, data: bytes) -> None: ...
    def response_end(self) -> None: ...
    def upstream_lost(self, reason: str) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """One connection, one answer at a time.

    `heard` says that some of an answer came, `reused` that the connection
    served before.
    """

    __slots__ = (
        "_bodiless",
        "_complete",
        "_framed",
        "_head",
        "_head_bytes",
        "_headers",
        "_in_head",
        "_parser",
        "_paused",
        "_pieces",
        "_pool",
        "_reason",
        "_receiver",
        "_transport",
        "_usable",
        "heard",
        "reused",
        "sweeps",
    )

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._receiver: ResponseReceiver | None = None
        self._transport: asyncio.Transport
        self._pieces: list[bytes] = []
        self._usable = True
        self._framed = False
        self._paused = False
        self._bodiless = False
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
        """Sends a request whose answer `receiver` gets."""
        self._receiver = receiver
        self._bodiless = method == "HEAD"
        if body:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head)

    def pause(self) -> None:
        """Stops reading: the receiver cannot pass on what comes."""
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Reads again."""
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Closes at once; whoever waited hears nothing more. The worker sees it and stops."""
        self._receiver = None
        self._usable = False
        self._pool.forget(self)
        self._transport.abort()

    # The transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is one in all but name.
        self._transport = cast(asyncio.Transport, transport)
        self._pool.connections.add(self)

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:
            # Nothing was asked.
            self.abort()
            return
        first = not self.heard
        self.heard = True
        if first and not self._bodiless:
            known = self._pool.answers.read(data)
            if known is not None:
                head, body = known
                receiver.response_head(head)
                if body:
                    receiver.response_data(body)
                self._end(True)
                return
        fault = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            fault = str(error.__context__ or error)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                fault = "the head is too large"
        pieces = self._pieces
        if pieces:
            receiver.response_data(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            pieces.clear()
        if self._complete:
            if first and fault is None and self._usable and self._head is not None:
                self._pool.answers.keep(data, self._head)
            self._end(fault is None)
        elif fault is not None:
            self._lost(f"malformed answer: {fault}")

    def eof_received(self) -> None:
        """Nothing to add: the transport closes, and `connection_lost` says what it means."""

    def connection_lost(self, error: Exception | None) -> None:
        self._usable = False
        self._pool.forget(self)
        if self._receiver is None:
            return
        if error is None and not self._in_head and not self._framed:
            # An answer without a length ends where the connection does.
            self._end(False)
        else:
            self._lost("connection closed" if error is None else type(error).__name__)

    # The parser calls these.

    def on_status(self, reason: bytes) -> None:
        if self._complete:
            raise MalformedResponse("more than one answer")
        self._reason = reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            if status < 100 or status == 101:
                raise MalformedResponse(f"status {status}")
            return
        self._in_head = False
        fields = dict(self._headers)
        coding = fields.get(b"transfer-encoding")
        if coding is not None and coding.lower() != b"chunked":
            raise MalformedResponse("a transfer coding that is not chunked")
        self._framed = coding is not None or b"content-length" in fields
        self._head = ResponseHead(status, self._reason, self._headers)
        if self._receiver is not None:
            self._receiver.response_head(self._head)
        if self._bodiless:
            # The parser cannot know that no body follows, so it is of no more use.
            self._complete = True
            self._usable = False

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self._in_head:
            # An interim answer: the real one follows.
            self._headers.clear()
            return
        self._complete = True
        self._usable = self._usable and self._parser.should_keep_alive()

    def _end(self, clean: bool) -> None:
        """The answer is complete. The connection is kept if nothing speaks against it."""
        receiver, self._receiver = self._receiver, None
        kept = clean and self._usable and not self._transport.is_closing()
        if kept and not self._transport.get_write_buffer_size():
            self._reset()
            if self._paused:
                self.resume()
            self.reused = True
            self._pool.release(self)
        else:
            self.abort()
        if receiver is not None:
            receiver.response_end()

    def _lost(self, reason: str) -> None:
        receiver = self._receiver
        self.abort()
        if receiver is not None:
            receiver.upstream_lost(reason)


class ConnectionPool:
    """The connections to one worker: kept ones first, the most recently used of them foremost.

    `sweep` is to be called once a second.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or 80
        self._base = parts.path.rstrip("/").encode()
        self._host_line = b" HTTP/1.1\r\nhost: %b\r\n" % parts.netloc.rpartition("@")[2].encode()
        self.answers = ResponseHeadCache()
        self._kept: list[UpstreamConnection] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self.connections: set[UpstreamConnection] = set()

    def request_line(self, method: str, target: bytes) -> bytes:
        """The first lines of a request to this worker, its Host among them."""
        return b"%b %b%b%b" % (method.encode(), self._base, target, self._host_line)

    def lease(self, receiver: ResponseReceiver) -> None:
        """Gives the receiver an idle connection, or opens one."""
        if self._kept:
            receiver.connected(self._kept.pop())
        else:
            self.connect(receiver)

    def release(self, connection: UpstreamConnection) -> None:
        """Takes a connection back for the next request."""
        connection.sweeps = 0
        self._kept.append(connection)

    def connect(self, receiver: ResponseReceiver) -> None:
        """Opens a connection; the receiver hears how it went."""
        task = asyncio.get_running_loop().create_task(self._connect(receiver))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, receiver: ResponseReceiver) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await self._open()
        except (OSError, TimeoutError) as error:
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
        """A connection is gone."""
        self.connections.discard(connection)
        if connection in self._kept:
            self._kept.remove(connection)

    def sweep(self) -> None:
        """Closes what was kept too long."""
        for connection in tuple(self._kept):
            connection.sweeps += 1
            if connection.sweeps == _KEPT_SWEEPS:
                connection.abort()

    def close_idle(self) -> None:
        """Closes the connections that nobody uses."""
        for connection in tuple(self._kept):
            connection.abort()

    def close(self) -> None:
        """Closes everything; whoever waits for an answer hears nothing more."""
        for task in tuple(self._connecting):
            task.cancel()
        for connection in tuple(self.connections):
            connection.abort()
        self._kept.clear()
