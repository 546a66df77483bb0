"""The head of a worker's answer, as it is passed on.

A worker says nearly the same at the head of each answer; what changes is the
body's length, and the date once a second. So heads of whole answers are kept,
as those of requests are: by their bytes without the length's digits, once the
parser has read such an answer and found nothing wrong with it.
"""

from __future__ import annotations

import re

from sgl_ext.balancer.http.request_head import HOP_BY_HOP
from sgl_ext.protocols.request_ids import NAMES

_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,15})\r\n")
_MAX_KEPT = 256


class ResponseHead:
    """Status and header lines for the client. `streams` says that the body is events, `is_named`
    that the worker named the request itself."""

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
        self.lines = b"".join(
            [b"%b: %b\r\n" % header for header in headers if header[0] not in HOP_BY_HOP]
        )


class ResponseHeadCache:
    """The latest heads of one worker's whole answers."""

    def __init__(self) -> None:
        self._kept: dict[bytes, ResponseHead] = {}

    def read(self, data: bytes) -> tuple[ResponseHead, bytes] | None:
        """Head and body, if `data` is exactly one answer whose head is known but for its length."""
        found = _split(data)
        if found is None:
            return None
        key, end = found
        head = self._kept.get(key)
        return None if head is None else (head, data[end:])

    def keep(self, data: bytes, head: ResponseHead) -> None:
        """Remembers the head of an answer that the parser found good. It says to keep the
        connection, and `data` is all of it. One with a name in it never comes again."""
        found = None if head.is_named else _split(data)
        if found is not None and data.startswith(b"HTTP/1.1 %d " % head.status):
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            self._kept[found[0]] = head


def _split(data: bytes) -> tuple[bytes, int] | None:
    """The head without its length, and where the body begins, if the length is what follows."""
    end = data.find(b"\r\n\r\n") + 4
    match = _LENGTH.search(data, 0, end) if end >= 4 else None
    if match is None or int(match[1]) != len(data) - end:
        return None
    start, stop = match.span(1)
    return data[:start] + data[stop:end], end
