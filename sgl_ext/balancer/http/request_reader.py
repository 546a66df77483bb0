"""A client's bytes, made into requests. No input or output: bytes in, requests out.

    reader.buffer()        where the next bytes go
    reader.received(n)     n of them are there
    reader.next()          the next complete request, if all of its bytes are here

    between requests --head--> in a body of known length, or chunked --end--> between requests
                       |                                                          ^
                       +--rejected at its head--> skipping its body --------------+

A body of known length is received into the buffer that is then sent to a worker. A request may be
rejected at its head, before any of its body is stored; the rest of the body is then skipped. Bytes
of later requests wait in `ahead`; the caller stops reading when there are many.
"""

import zlib
from dataclasses import dataclass
from http import HTTPStatus

from sgl_ext.balancer.http.chunked import ChunkedBody
from sgl_ext.balancer.http.request_head import RequestHead, RequestHeadCache
from sgl_ext.protocols.errors import BalancerError, body_too_large

MAX_HEAD_BYTES = 64 * 1024
# A rejected request with a longer body ends its connection.
MAX_SKIPPED_BYTES = 1024 * 1024
_WINDOW = {b"gzip": 31, b"x-gzip": 31, b"deflate": zlib.MAX_WBITS}
# Shared by all connections: its content is copied before the next read.
_SCRATCH = memoryview(bytearray(16 * 1024))


@dataclass(slots=True, eq=False)
class Request:
    """One request.

    rejection: why it cannot be served; its body was dropped.
    unread: the rest of its body was not read, so the connection cannot continue.
    keep_alive: whether the client wants the connection to continue.
    """

    head: RequestHead
    length: int
    keep_alive: bool
    rejection: BalancerError | None
    body: bytes | bytearray = b""
    unread: bool = False


class RequestReader:
    """Reads the requests of one connection."""

    def __init__(self, heads: RequestHeadCache, max_body_bytes: int) -> None:
        self._heads = heads
        self._max_body_bytes = max_body_bytes
        self.ahead = bytearray()
        self._searched = 0
        self._request: Request | None = None
        self._missing = 0
        self._body: bytearray | None = None
        self._view: memoryview | None = None
        self._chunks: ChunkedBody | None = None
        self._sent_continue = False

    @property
    def in_body(self) -> bool:
        """Whether a request's head is complete and its body is not."""
        return self._request is not None

    @property
    def path(self) -> str:
        """The path of the request whose body is incomplete; \"\" if there is none."""
        return "" if self._request is None else self._request.head.path

    def buffer(self) -> memoryview:
        """Where the next bytes go, until `received` is called."""
        return _SCRATCH if self._view is None else self._view

    def received(self, size: int) -> None:
        """Takes the bytes that were put into the buffer."""
        if self._view is None:
            self.ahead += _SCRATCH[:size]
            return
        self._missing -= size
        self._view = self._view[size:] if self._missing else None

    def wants_continue(self) -> bool:
        """Whether the client waits for a 100 Continue. True once for each request."""
        request = self._request
        waits = request is not None and request.head.expects_continue and not self._sent_continue
        self._sent_continue = self._sent_continue or waits
        return waits

    def next(self) -> Request | None:
        """The next complete request, or None until more bytes arrive.

        Raises BalancerError if the bytes are no request. Nothing can be read after that.
        """
        request = self._request
        if request is None:
            request = self._read_head()
            if request is None:
                return None
        if request.rejection is None:
            try:
                if not self._read_body(request):
                    return None
            except BalancerError as error:
                self._reject(request, error)
        if request.rejection is not None and not self._skip_body(request):
            return None
        self._request = None
        return request

    def _read_head(self) -> Request | None:
        ahead = self.ahead
        while ahead.startswith(b"\r\n"):
            del ahead[:2]
        end = ahead.find(b"\r\n\r\n", self._searched) + 4
        if end < 4:
            self._searched = max(0, len(ahead) - 3)
        if max(end, self._searched) > MAX_HEAD_BYTES:
            raise BalancerError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"The request's head is larger than {MAX_HEAD_BYTES} bytes.",
            )
        if end < 4:
            return None
        self._searched = 0
        head, length = self._heads.read(bytes(ahead[:end]))
        del ahead[:end]
        self._sent_continue = False
        self._missing = length
        self._request = request = Request(head, length, head.keep_alive, head.rejection)
        try:
            if request.rejection is not None:
                raise request.rejection
            self._start_body(request)
        except BalancerError as error:
            self._reject(request, error)
        return request

    def _start_body(self, request: Request) -> None:
        """Prepares for a body. Raises BalancerError if it cannot be accepted."""
        encoding = request.head.fields.get(b"content-encoding")
        if encoding is not None and encoding.lower() not in _WINDOW:
            raise BalancerError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"content-encoding: must be gzip or deflate, not {encoding.decode('latin-1')!r}",
            )
        if request.head.chunked:
            self._chunks = ChunkedBody(self._max_body_bytes)
            return
        size = request.length
        if size > self._max_body_bytes:
            raise body_too_large(self._max_body_bytes)
        ahead = self.ahead
        if len(ahead) <= size:
            self._body = body = bytearray(size)
            body[: len(ahead)] = ahead
            self._missing = size - len(ahead)
            self._view = memoryview(body)[len(ahead) :] if self._missing else None
            ahead.clear()
        else:
            # The next request follows the body.
            self._body = ahead[:size]
            self._missing = 0
            del ahead[:size]

    def _read_body(self, request: Request) -> bool:
        """Gives the request its body. False until it is complete."""
        if self._chunks is not None:
            if not self._chunks.take(self.ahead):
                return False
            request.body, self._chunks = self._chunks.body, None
        else:
            if self._missing:
                return False
            assert self._body is not None
            request.body, self._body = self._body, None
        if request.body and b"content-encoding" in request.head.fields:
            request.body = self._decoded(request)
        return True

    def _decoded(self, request: Request) -> bytes:
        encoding = request.head.fields[b"content-encoding"].lower()
        window = _WINDOW[encoding]
        if encoding == b"deflate" and request.body[0] & 0x0F != zlib.DEFLATED:
            # Some clients send it without the zlib header.
            window = -window
        decoder = zlib.decompressobj(wbits=window)
        try:
            body = decoder.decompress(request.body, self._max_body_bytes + 1)
        except zlib.error:
            message = "body: does not have the form of its content-encoding"
            raise BalancerError(HTTPStatus.BAD_REQUEST, message) from None
        if len(body) > self._max_body_bytes:
            raise body_too_large(self._max_body_bytes)
        if not decoder.eof or decoder.unused_data:
            message = "body: its compressed data is incomplete, or other bytes follow it"
            raise BalancerError(HTTPStatus.BAD_REQUEST, message)
        return body

    def _reject(self, request: Request, error: BalancerError) -> None:
        """Drops the body. The rest of it is skipped when it arrives, unless it is too long."""
        request.rejection = error
        request.body = b""
        self._body = self._view = self._chunks = None
        head = request.head
        if head.chunked or head.expects_continue or self._missing > MAX_SKIPPED_BYTES:
            request.unread = True
            request.keep_alive = False

    def _skip_body(self, request: Request) -> bool:
        """True once the body is skipped, or will not be read."""
        if request.unread:
            return True
        skipped = min(self._missing, len(self.ahead))
        del self.ahead[:skipped]
        self._missing -= skipped
        return not self._missing
