"""A body in chunks (RFC 9112, section 7.1), put together as it arrives.

    SIZE [;extensions] CRLF  SIZE bytes  CRLF   ...   0 [;extensions] CRLF  *(trailer CRLF)  CRLF

The HTTP parser does not report where the body ends, and the next request may follow it at once.
So the balancer reads chunks itself. Extensions and trailers are dropped, and their size is
limited. A trailer about the framing is an error.
"""

import re
from http import HTTPStatus

from sgl_ext.protocols.errors import BalancerError, body_too_large

MAX_EXTRA_BYTES = 64 * 1024
_MAX_LINE = 4096
# Each chunk takes time. After the first ones they must have a size on average.
MAX_SMALL_CHUNKS = 5000
MIN_CHUNK_BYTES = 64
_TRAILER = re.compile(
    rb"(?!(?i:content-length|transfer-encoding):)[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*"
)
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})((?:;[\t\x20-\x7e\x80-\xff]*)?)")


class ChunkedBody:
    """Takes bytes as they arrive; `body` is their content, and the caller may remove it."""

    def __init__(self, max_bytes: int) -> None:
        self.body = bytearray()
        self._max_bytes = max_bytes
        self._size = 0
        self._chunks = 0
        self._left = 0
        self._extra = 0
        self._complete = False
        self._read = self._size_line

    def take(self, data: bytearray) -> bool:
        """Removes the body's bytes from the front of `data`. True once the body is complete.

        Raises BalancerError 400 for a malformed chunk, 413 for too many bytes.
        """
        while not self._complete:
            if not self._read(data):
                return False
        return True

    def _size_line(self, data: bytearray) -> bool:
        line = self._line(data)
        if line is None:
            return False
        match = _SIZE.fullmatch(line)
        if match is None:
            raise _bad("a chunk's size is not a number")
        self._count_extra(len(match[2]))
        self._left = int(match[1], 16)
        self._size += self._left
        self._chunks += self._left > 0
        if self._chunks > MAX_SMALL_CHUNKS and self._chunks * MIN_CHUNK_BYTES > self._size:
            raise _bad(f"its chunks are smaller than {MIN_CHUNK_BYTES} bytes on average")
        if self._size > self._max_bytes:
            raise body_too_large(self._max_bytes)
        self._read = self._chunk if self._left else self._trailer
        return True

    def _chunk(self, data: bytearray) -> bool:
        piece = data[: self._left]
        self.body += piece
        self._left -= len(piece)
        del data[: len(piece)]
        if self._left:
            return False
        end = bytes(data[:2])
        if not b"\r\n".startswith(end):
            raise _bad("a chunk is longer than its size")
        if len(end) < 2:
            return False
        del data[:2]
        self._read = self._size_line
        return True

    def _trailer(self, data: bytearray) -> bool:
        line = self._line(data)
        if line is None:
            return False
        if line and not _TRAILER.fullmatch(line):
            raise _bad("a trailer is no header line, or about the framing")
        self._count_extra(len(line))
        self._complete = not line
        return True

    def _line(self, data: bytearray) -> bytes | None:
        end = data.find(b"\r\n")
        if end > _MAX_LINE or (end < 0 and len(data) > _MAX_LINE):
            raise _bad("a line between chunks is too long")
        if end < 0:
            return None
        line = bytes(data[:end])
        del data[: end + 2]
        return line

    def _count_extra(self, size: int) -> None:
        self._extra += size
        if self._extra > MAX_EXTRA_BYTES:
            raise _bad("the extensions and trailers are too long")


def _bad(reason: str) -> BalancerError:
    return BalancerError(HTTPStatus.BAD_REQUEST, f"Malformed chunked body: {reason}.")
