"""What a client sent, made into requests. No input or output in here: bytes in, requests out.

    reader.buffer()        where the next bytes go
    reader.received(n)     n of them are there
    reader.next()          the next complete request, if its bytes are all here

    HEAD --head complete--> FIXED or CHUNKED --body complete--> HEAD
      |                        |
      +--refused at its head---+--> SKIPPED --body skipped--> HEAD

A body of known length is received straight into the buffer that is then sent
to a worker. A request may be refused at its head, before anything of its body
is kept; what then still comes of the body is skipped. Bytes of later requests
wait in `ahead`; whoever drives this stops reading when they are many.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from enum import Enum
from http import HTTPStatus

from sgl_ext.balancer.chunked import ChunkedBody
from sgl_ext.balancer.errors import BalancerError, body_too_large
from sgl_ext.balancer.request import Request, parse_head

MAX_HEAD_BYTES = 64 * 1024
# More than this of a refused body is not worth keeping the connection for.
_MAX_SKIPPED_BYTES = 1024 * 1024
_WINDOW = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
# One for all connections: what is read into it is copied out before the next read.
_SCRATCH = bytearray(16 * 1024)
_SCRATCH_VIEW = memoryview(_SCRATCH)


class _Reading(Enum):
    HEAD = "head"
    FIXED = "fixed"
    CHUNKED = "chunked"
    SKIPPED = "skipped"


class RequestReader:
    """The reading half of one connection.

    `admit` is shown each request at its head and raises BalancerError to
    refuse it; the request then comes out with that refusal and no body.
    """

    def __init__(self, max_body_bytes: int, admit: Callable[[Request], None]) -> None:
        self._max_body_bytes = max_body_bytes
        self._admit = admit
        self._state = _Reading.HEAD
        self._ahead = bytearray()
        self._searched = 0
        self._request = Request()
        self._body = bytearray()
        self._view = memoryview(b"")
        self._filled = 0
        self._chunks: ChunkedBody | None = None

    @property
    def ahead(self) -> int:
        """How many bytes wait to be read as requests."""
        return len(self._ahead)

    @property
    def in_body(self) -> bool:
        """Whether a request's head is complete and its body is not."""
        return self._state is not _Reading.HEAD

    @property
    def _filling(self) -> bool:
        return self._state is _Reading.FIXED and self._filled < self._request.content_length

    def buffer(self) -> memoryview:
        """Where the next bytes go, until `received` is called."""
        return self._view[self._filled :] if self._filling else _SCRATCH_VIEW

    def received(self, size: int) -> None:
        """Takes the bytes that were put into the buffer."""
        if self._filling:
            self._filled += size
        else:
            self._ahead += _SCRATCH_VIEW[:size]

    def wants_continue(self) -> bool:
        """Whether the client waits to be told to send its body. True once a request."""
        waits = self.in_body and self._request.expects_continue
        self._request.expects_continue = False
        return waits

    def next(self) -> Request | None:
        """The next complete request, or None until more is received.

        Raises BalancerError if the bytes are no request; nothing can be read after it.
        """
        if self._state is _Reading.HEAD and not self._read_head():
            return None
        request = self._request
        if request.refusal is None:
            try:
                if not self._read_body():
                    return None
            except BalancerError as error:
                request.refusal = error
                request.body = b""
                request.unread = request.chunked
        if request.refusal is not None and not self._skip_body():
            return None
        self._state = _Reading.HEAD
        return request

    def _read_head(self) -> bool:
        ahead = self._ahead
        while ahead.startswith(b"\r\n"):
            del ahead[:2]
        end = ahead.find(b"\r\n\r\n", self._searched) + 4
        if end > MAX_HEAD_BYTES or (end < 4 and len(ahead) > MAX_HEAD_BYTES):
            raise BalancerError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"The request's head is larger than {MAX_HEAD_BYTES} bytes.",
            )
        if end < 4:
            self._searched = max(0, len(ahead) - 3)
            return False
        self._searched = 0
        self._request = request = parse_head(bytes(ahead[:end]))
        del ahead[:end]
        try:
            self._admit(request)
            self._start_body(request)
        except BalancerError as error:
            self._refuse(request, error)
        return True

    def _start_body(self, request: Request) -> None:
        encoding = request.fields.get(b"content-encoding", b"identity").lower()
        if encoding not in _WINDOW and encoding != b"identity":
            raise BalancerError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"content-encoding: must be gzip or deflate, not {encoding.decode('latin-1')!r}",
            )
        if request.chunked:
            self._state = _Reading.CHUNKED
            self._chunks = ChunkedBody(self._max_body_bytes)
            return
        size = request.content_length
        if size > self._max_body_bytes:
            raise body_too_large(self._max_body_bytes)
        self._state = _Reading.FIXED
        ahead = self._ahead
        if len(ahead) >= size:
            # Behind a small body the next request may already stand.
            self._body = ahead[:size]
            self._filled = size
            del ahead[:size]
            return
        self._body = bytearray(size)
        self._view = memoryview(self._body)
        self._filled = len(ahead)
        self._body[: self._filled] = ahead
        ahead.clear()

    def _refuse(self, request: Request, error: BalancerError) -> None:
        request.refusal = error
        self._state = _Reading.SKIPPED
        self._filled = 0
        too_long = request.content_length > _MAX_SKIPPED_BYTES
        request.unread = request.chunked or too_long or request.expects_continue

    def _skip_body(self) -> bool:
        """Drops what comes of a refused body. True once it was all there, or is not awaited."""
        request = self._request
        if request.unread:
            request.keep_alive = False
            return True
        if self._state is _Reading.SKIPPED:
            dropped = min(request.content_length - self._filled, len(self._ahead))
            del self._ahead[:dropped]
            self._filled += dropped
            return self._filled == request.content_length
        return True

    def _read_body(self) -> bool:
        request = self._request
        if self._chunks is not None:
            if not self._chunks.take(self._ahead):
                return False
            request.body, self._chunks = self._chunks.body, None
        else:
            if self._filled < request.content_length:
                return False
            request.body, self._body, self._view = self._body, bytearray(), memoryview(b"")
        if b"content-encoding" in request.fields and request.body:
            request.body = self._decoded(request)
        return True

    def _decoded(self, request: Request) -> bytes:
        window = _WINDOW.get(request.fields[b"content-encoding"].lower())
        if window is None:
            return bytes(request.body)
        if window == zlib.MAX_WBITS and request.body[0] & 0x0F != zlib.DEFLATED:
            # Some send deflate bare, without the zlib header that belongs to it.
            window = -zlib.MAX_WBITS
        decoder = zlib.decompressobj(wbits=window)
        try:
            body = decoder.decompress(request.body, self._max_body_bytes + 1)
        except zlib.error:
            raise BalancerError(
                HTTPStatus.BAD_REQUEST, "body: not what its content-encoding says"
            ) from None
        if len(body) > self._max_body_bytes:
            raise body_too_large(self._max_body_bytes)
        if not decoder.eof or decoder.unused_data:
            raise BalancerError(HTTPStatus.BAD_REQUEST, "body: its compressed data is cut")
        return body
