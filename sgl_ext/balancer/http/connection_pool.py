"""The connections to one worker, used again while they are idle."""

import asyncio
from urllib.parse import urlsplit

from sgl_ext.balancer.http.request_head import RequestHead
from sgl_ext.balancer.http.response_head import ResponseHeadCache
from sgl_ext.balancer.http.upstream import ResponseReceiver, UpstreamConnection

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

    def lease(self, receiver: ResponseReceiver) -> asyncio.Task[None] | None:
        """Gives the receiver an idle connection, or opens one like `connect`."""
        if not self._idle:
            return self.connect(receiver)
        receiver.connected(self._idle.pop())
        return None

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
