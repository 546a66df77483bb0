"""How the bytes of a body are coded as it is sent: in chunks, and compressed.

In chunks (RFC 9112, section 7.1):

    SIZE [;extensions] CRLF  SIZE bytes  CRLF   ...   0 [;extensions] CRLF  *(trailer CRLF)  CRLF

The HTTP parser does not report where the body ends, and the next request may follow it at once.
So the balancer reads chunks itself. Extensions and trailers are dropped, and their size is
limited. A trailer about the framing is an error.

Compressed as gzip, zstd, and deflate with or without its zlib header: a body is inflated as it
arrives. A gzip body (RFC 1952) may have several members, and one of zstd (RFC 8878) several frames:
programs that compress in parallel write these. A few KB can inflate to many MB. So beyond a first
MB a body may only be MAX_RATIO times as large as what has arrived of it.
"""

import re
import zlib
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

import zstandard

from sgl_ext.limits.bounds import FREE_INFLATED_BYTES, INFLATED_STEP_BYTES, MAX_RATIO
from sgl_ext.protocols.errors import BalancerError, body_too_large

MAX_EXTRA_BYTES = 64 * 1024
_MAX_LINE = 4096
# Each chunk takes time. After the first ones they must have a size on average.
MAX_SMALL_CHUNKS = 5000
MIN_CHUNK_BYTES = 64
# Each member of a compressed body takes time, whatever its size.
MAX_MEMBERS = 1000
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


ZstdError = zstandard.ZstdError
MAX_WINDOW_BYTES: Final = 8 << 20
"""What a decoder must be able to look back, and need not exceed (RFC 9659)."""
_MAX_HEADER_BYTES, _BLOCK_HEADER_BYTES, _CHECKSUM_BYTES = 18, 3, 4
_RLE = 1


class ZstdDecoder:
    """The decoder of one zstd frame (RFC 8878), with the interface of `zlib.decompressobj`.

        frame   header, blocks, checksum
        block   3 bytes: whether it is the last, its kind, its size; then its content

    A library decodes. It gives all that its input becomes at once, however much that is. So it gets
    its input up to the end of one block at a time, which becomes 128 KiB at most. What a block
    becomes is given in steps, of a bounded size.

    unconsumed_tail: input that waits for the next call. unused_data: what follows the frame.
    """

    def __init__(self) -> None:
        self._decoder = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
        self._head: bytearray | None = bytearray()
        self._header = bytearray()
        self._left = 0
        self._has_checksum = False
        self._blocks = self._arrived = 0
        self._made = memoryview(b"")
        self.unconsumed_tail: bytes | memoryview = b""
        self.unused_data = b""

    @property
    def eof(self) -> bool:
        """Whether the frame is complete, and all of it was given."""
        return self._decoder.eof and not self._made

    def decompress(self, data: bytes | bytearray | memoryview, max_length: int) -> memoryview:
        """The next bytes, at most so many. Raises ZstdError if the data is no such frame."""
        view = memoryview(data)
        while view and not self._made and not self._decoder.eof:
            size = self._step(view)
            self._made = memoryview(self._decoder.decompress(view[:size]))
            view = view[size:]
        if self._decoder.eof and view:
            self.unused_data, view = bytes(view), view[:0]
        # A view of nothing would still forbid its owner to change.
        self.unconsumed_tail = view if view else b""
        given, self._made = self._made[:max_length], self._made[max_length:]
        return given

    def _step(self, view: memoryview) -> int:
        """How much of the input ends within or at the end of a block, or of the frame's header."""
        if self._head is not None:
            return self._read_head(view)
        if not self._left:
            size = min(_BLOCK_HEADER_BYTES - len(self._header), len(view))
            self._header += view[:size]
            if len(self._header) == _BLOCK_HEADER_BYTES:
                self._begin_block(int.from_bytes(self._header, "little"))
            return size
        size = min(self._left, len(view))
        self._left -= size
        self._arrived += size
        return size

    def _read_head(self, view: memoryview) -> int:
        """Takes one byte more of the frame's header, until it is complete."""
        assert self._head is not None
        self._head += view[:1]
        try:
            is_complete = len(self._head) >= zstandard.frame_header_size(self._head)
        except zstandard.ZstdError:
            if len(self._head) >= _MAX_HEADER_BYTES:
                raise
            is_complete = False
        if is_complete:
            self._has_checksum = zstandard.get_frame_parameters(self._head).has_checksum
            self._head = None
        return 1

    def _begin_block(self, header: int) -> None:
        self._header.clear()
        self._blocks += 1
        if self._blocks > MAX_SMALL_CHUNKS and self._blocks * MIN_CHUNK_BYTES > self._arrived:
            raise ZstdError(f"its blocks are smaller than {MIN_CHUNK_BYTES} bytes on average")
        self._left = 1 if header >> 1 & 3 == _RLE else header >> 3
        if header & 1 and self._has_checksum:
            self._left += _CHECKSUM_BYTES


class SkippableFrame:
    """The decoder of a zstd frame that becomes nothing: a program's own notes.

    frame   50 to 5f, 2a 4d 18; size (4 bytes); so many bytes
    """

    FIRST_BYTES = range(0x50, 0x60)
    _MAGIC = b"\x2a\x4d\x18"
    _HEADER_BYTES = 8
    unconsumed_tail = b""

    def __init__(self) -> None:
        self._header = bytearray()
        self._left = self._HEADER_BYTES
        self.eof = False
        self.unused_data = b""

    def decompress(self, data: bytes | bytearray | memoryview, max_length: int) -> bytes:
        """Takes bytes of the frame. Raises ZstdError if they are not of such a frame."""
        view = memoryview(data)
        while view and not self.eof:
            taken, view = view[: self._left], view[self._left :]
            self._left -= len(taken)
            if len(self._header) < self._HEADER_BYTES:
                self._header += taken
                if self._header[1:4] != self._MAGIC[: len(self._header) - 1]:
                    raise ZstdError("no frame begins so")
                if len(self._header) == self._HEADER_BYTES:
                    self._left = int.from_bytes(self._header[4:], "little")
            self.eof = not self._left
        self.unused_data = bytes(view)
        return b""


_WINDOW = {b"gzip": 31, b"x-gzip": 31, b"deflate": zlib.MAX_WBITS}
_ZSTD = b"zstd"
ENCODINGS = frozenset((*_WINDOW, _ZSTD))
# Codings whose bodies may be several members or frames.
_SEVERAL = frozenset((b"gzip", b"x-gzip", _ZSTD))


class CompressedBody:
    """Takes compressed bytes; `body` is what they inflate to."""

    def __init__(self, encoding: bytes, max_bytes: int) -> None:
        self.body = bytearray()
        self._encoding = encoding
        self._max_bytes = max_bytes
        self._arrived = 0
        self._members = 0
        self._decoder: zlib._Decompress | ZstdDecoder | SkippableFrame | None = None

    def take(self, data: bytes | bytearray, reserve: Callable[[int], None]) -> None:
        """Inflates the next bytes.

        reserve: called with the size of `body` each time that it has grown by
        INFLATED_STEP_BYTES or less. Raises BalancerError 400 if they are not compressed so, 413 if
        they inflate too far, and what `reserve` raises.
        """
        if not data:
            return
        decoder = self._decoder or self._next_decoder(data[0])
        self._arrived += len(data)
        allowed = max(FREE_INFLATED_BYTES, MAX_RATIO * self._arrived)
        left: bytes | bytearray | memoryview = data
        is_full = True
        while left or is_full:
            room = min(allowed, self._max_bytes) - len(self.body)
            step = min(room + 1, INFLATED_STEP_BYTES)
            try:
                if left and decoder.eof:
                    decoder = self._next_decoder(left[0])
                inflated = decoder.decompress(left, step)
            except (zlib.error, ZstdError):
                message = "body: does not have the form of its content-encoding"
                raise BalancerError(HTTPStatus.BAD_REQUEST, message) from None
            self.body += inflated
            if len(self.body) > self._max_bytes:
                raise body_too_large(self._max_bytes)
            if len(self.body) > allowed:
                message = f"body: inflates to more than {MAX_RATIO} times its compressed size"
                raise BalancerError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
            reserve(len(self.body))
            left, is_full = decoder.unconsumed_tail or decoder.unused_data, len(inflated) == step

    def _next_decoder(self, first: int) -> "zlib._Decompress | ZstdDecoder | SkippableFrame":
        """Begins the member or frame that has this byte first. Raises BalancerError 400 if none may
        follow."""
        if self._members and self._encoding not in _SEVERAL:
            raise _incomplete()
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise BalancerError(
                HTTPStatus.BAD_REQUEST, f"body: has more than {MAX_MEMBERS} compressed parts"
            )
        self._decoder = self._decoder_of(first)
        return self._decoder

    def _decoder_of(self, first: int) -> "zlib._Decompress | ZstdDecoder | SkippableFrame":
        if self._encoding == _ZSTD:
            return SkippableFrame() if first in SkippableFrame.FIRST_BYTES else ZstdDecoder()
        window = _WINDOW[self._encoding]
        if self._encoding == b"deflate" and first & 0x0F != zlib.DEFLATED:
            # Some clients send it without the zlib header.
            window = -window
        return zlib.decompressobj(wbits=window)

    def end(self) -> None:
        """All bytes were given. Raises BalancerError 400 if some are missing."""
        if self._decoder is not None and not self._decoder.eof:
            raise _incomplete()


def _incomplete() -> BalancerError:
    message = "body: its compressed data is incomplete, or other bytes follow it"
    return BalancerError(HTTPStatus.BAD_REQUEST, message)
