"""The head of a worker's response, and a cache of parsed heads.

A worker's heads are nearly equal; only the body's length changes, and the date once a second. So
the heads of complete responses are cached as those of requests are: by their bytes without the
digits of the length, after the parser has found such a response to be well-formed.
"""

from sgl_ext.balancer.http.request_head import (
    HOP_BY_HOP,
    LENGTH,
    connection_options,
    header_lines,
)
from sgl_ext.protocols.request_ids import NAMES

NO_BODY = (204, 304)
"""Statuses of responses that have no body, whatever their length says."""
_MAX_CACHED = 256


class ResponseHead:
    """Status and header lines for the client.

    streams: the body is server-sent events.
    is_named: the worker gave the request an id.
    """

    __slots__ = ("is_named", "lines", "reason", "status", "streams")

    def __init__(self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.reason = reason
        self.streams = False
        self.is_named = False
        for name, value in headers:
            if name == b"content-type":
                self.streams = value.startswith(b"text/event-stream")
            elif name in NAMES:
                self.is_named = True
        # The balancer names the request to the client.
        dropped = HOP_BY_HOP | NAMES | connection_options(headers)
        self.lines = header_lines(headers, dropped)


STREAM_LINES = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
"""Of a stream: proxies must neither store nor collect its events."""


def stream_lines(stated: bytes) -> bytes:
    """The lines of STREAM_LINES whose names are not among the stated lines."""
    rest = STREAM_LINES.splitlines(keepends=True)
    names = {line.partition(b":")[0].lower() for line in stated.splitlines()}
    return b"".join(line for line in rest if line.partition(b":")[0] not in names)


class ResponseHeadCache:
    """The latest heads of one worker's complete responses."""

    def __init__(self) -> None:
        self._cached: dict[bytes, ResponseHead] = {}

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
