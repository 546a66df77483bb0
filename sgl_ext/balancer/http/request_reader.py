"""A client's bytes, made into requests. No input or output: bytes in, requests out.

    reader.buffer()        where the next bytes go
    reader.received(n)     n of them are there
    reader.next()          the next complete request, if all of its bytes are here
    reader.next(n)         both

    between requests --head--> in a body of known length, or chunked --end--> between requests
                       |                                                          ^
                       +--rejected at its head--> skipping its body --------------+

A body of known length is received into the buffer that is then sent to a worker. The buffer grows
with what arrives, whatever length the head states, and every growth needs room in the account of
the process. A request may be rejected at its head, before any of its body is stored; the rest of
the body is then skipped. Bytes of later requests wait in `ahead`; the caller stops reading when
there are many.
"""

import struct
from functools import partial
from http import HTTPStatus

import msgspec

from sgl_ext.balancer.http.body_codings import ChunkedBody, CompressedBody
from sgl_ext.balancer.http.request_head import RequestHead, RequestHeadCache
from sgl_ext.limits.bounds import (
    BUFFER_GROWTH,
    FIRST_BUFFER_BYTES,
    MAX_GROWTH_BYTES,
    MAX_HEAD_BYTES,
    MAX_SKIPPED_BYTES,
)
from sgl_ext.limits.byte_account import ByteAccount, Hold
from sgl_ext.protocols.errors import BalancerError, no_memory


def take(hold: Hold, size: int) -> None:
    """Holds this many bytes. Raises BalancerError 503 if the account has no room."""
    if not hold.take_up_to(size):
        raise no_memory()


# A head is charged to the account if it is longer than usual.
_USUAL_HEAD_BYTES = 8 * 1024
# Shared by all connections: its content is copied before the next read.
_SCRATCH = memoryview(bytearray(16 * 1024))


class Request(msgspec.Struct, eq=False):
    """One request.

    rejection: why it cannot be served; its body was dropped.
    unread: the rest of its body was not read, so the connection cannot continue.
    keep_alive: whether the client wants the connection to continue.
    hold: what it holds of the account, until its exchange or its reader releases it.
    """

    head: RequestHead
    length: int
    keep_alive: bool
    rejection: BalancerError | None
    hold: Hold
    body: bytes | bytearray = b""
    unread: bool = False


class RequestReader:
    """Reads the requests of one connection.

    arrived_bytes: what has arrived since the head of the incomplete request.
    is_http2: the client speaks HTTP/2, which is refused.
    """

    def __init__(self, heads: RequestHeadCache, max_body_bytes: int, account: ByteAccount) -> None:
        self._heads = heads
        self._max_body_bytes = max_body_bytes
        self._account = account
        self.ahead = bytearray()
        self.arrived_bytes = 0
        self.is_http2 = False
        self._head_hold: Hold | None = None  # most heads need none
        self._searched = 0
        self._request: Request | None = None
        self._missing = 0
        self._body: bytearray | None = None
        self._view: memoryview | None = None
        self._chunks: ChunkedBody | None = None
        self._compressed: CompressedBody | None = None
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
        """Where the next bytes go, until `received` is called. Then no view of it may be left."""
        if self._body is None:
            return _SCRATCH
        if self._view is None:
            # It is full. While the caller has a view of it, its size cannot change.
            size = len(self._body)
            self._body += bytes(self._growth(self._body))
            self._view = memoryview(self._body)[size:]
        return self._view

    def _growth(self, body: bytearray) -> int:
        """By how much a full buffer grows, at most up to the length of the body."""
        return min((BUFFER_GROWTH - 1) * len(body), MAX_GROWTH_BYTES, self._missing)

    def received(self, size: int) -> None:
        """Takes the bytes that were put into the buffer."""
        self.arrived_bytes += size
        if self._view is None:
            self.ahead += _SCRATCH[:size]
            return
        self._missing -= size
        self._view = self._view[size:] if size < len(self._view) else None

    def close(self) -> None:
        """Nothing is read any more: an incomplete request holds nothing. May be called twice."""
        if self._head_hold is not None:
            self._head_hold.release()
        request, self._request = self._request, None
        if request is not None:
            request.hold.release()
            self._body = self._view = self._chunks = self._compressed = None

    def wants_continue(self) -> bool:
        """Whether the client waits for a 100 Continue. True once for each request."""
        request = self._request
        waits = request is not None and request.head.expects_continue and not self._sent_continue
        self._sent_continue = self._sent_continue or waits
        return waits

    def next(self, received: int = 0) -> Request | None:
        """The next complete request, or None until more bytes arrive. received: how many were put
        into the buffer.

        Raises BalancerError if the bytes are no request. Nothing can be read after that.
        """
        if received:
            self.received(received)
        request = self._request
        if request is None:
            request = self._read_head()
            if request is None:
                return None
        if request.rejection is None and not request.body:
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
            if len(ahead) > _USUAL_HEAD_BYTES:
                self._head_hold = self._head_hold or Hold(self._account, "")
                take(self._head_hold, len(ahead))
            return None
        if self._head_hold is not None:
            self._head_hold.release()
            self._head_hold = None
        self._searched = 0
        if ahead.startswith(PREFACE_HEAD):
            if not has_http2_request(ahead):
                return None
            self.is_http2 = True
            raise BalancerError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, HTTP2_MESSAGE)
        head, length = self._heads.read(bytes(ahead[:end]))
        del ahead[:end]
        self._sent_continue = False
        self._missing = length
        self.arrived_bytes = 0
        limit, rejection = 0, head.rejection
        if rejection is None:
            try:
                limit = head.body_limit(length, self._max_body_bytes)
                if head.encoding:
                    self._compressed = CompressedBody(head.encoding, limit)
            except BalancerError as error:
                rejection = error
        hold = Hold(self._account, head.tenant)
        self._request = request = Request(head, length, head.keep_alive, rejection, hold)
        try:
            if rejection is not None:
                raise rejection
            if head.chunked:
                self._chunks = ChunkedBody(limit)
            elif self._compressed is None and len(ahead) < length:
                self._start_buffer(hold, length)
            elif self._compressed is None:  # all is here, and perhaps the next request
                if not hold.take_up_to(length):
                    raise no_memory()
                request.body = ahead[:length]
                self._missing = 0
                del ahead[:length]
        except BalancerError as error:
            self._reject(request, error)
        return request

    def _start_buffer(self, hold: Hold, size: int) -> None:
        """Begins a body of known length with what has arrived of it, which is not all."""
        ahead = self.ahead
        arrived = len(ahead)
        capacity = min(size, max(BUFFER_GROWTH * arrived, FIRST_BUFFER_BYTES))
        take(hold, capacity)
        self._body = body = bytearray(capacity)
        body[:arrived] = ahead
        self._missing = size - arrived
        self._view = memoryview(body)[arrived:]
        ahead.clear()

    def _read_body(self, request: Request) -> bool:
        """Gives the request its body. False until it is complete."""
        if self._body is not None:
            if self._missing:
                if self._view is None:
                    take(request.hold, len(self._body) + self._growth(self._body))
                return False
            request.body, self._body = self._body, None
            return True
        if self._chunks is not None:
            is_complete = self._chunks.take(self.ahead)
            body = self._chunks.body
        else:
            body = self.ahead[: self._missing]
            del self.ahead[: len(body)]
            self._missing -= len(body)
            is_complete = not self._missing
        compressed = self._compressed
        if compressed is not None:
            compressed.take(body, partial(take, request.hold))
            body.clear()
            body = compressed.body
        take(request.hold, len(body))
        if is_complete:
            if compressed is not None:
                compressed.end()
            request.body = body
            self._chunks = self._compressed = None
        return is_complete

    def _reject(self, request: Request, error: BalancerError) -> None:
        """Drops the body. The rest of it is skipped when it arrives, unless it is too long."""
        request.rejection = error
        request.body = b""
        request.hold.release()
        self._body = self._view = self._chunks = self._compressed = None
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


# The refusal of HTTP/2 in its own frames, for a client that starts with it unasked.
#
# An answer in HTTP/1.1 is no frame, so such a client would show "framing error" or "empty reply".
# Frames and error codes: RFC 9113. Literal header fields: RFC 7541, section 6.2.2.

PREFACE_HEAD = b"PRI * HTTP/2.0\r\n\r\n"
"""How HTTP/2 begins, as far as it looks like a head of HTTP/1."""
HTTP2_MESSAGE = "HTTP/2 is not served here: use HTTP/1.1."
_PREFACE = PREFACE_HEAD + b"SM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _GOAWAY = 0, 1, 4, 7
_END_STREAM, _END_HEADERS = 1, 4
_HTTP_1_1_REQUIRED = 13
_HEAD = struct.Struct(">BHBBI")  # length in 3 bytes, type, flags, stream
# `:status: 505`, and the name `content-type`. The client must index neither.
_STATUS_505, _CONTENT_TYPE = b"\x08\x03505", b"\x0f\x10"


def has_http2_request(received: bytes | bytearray) -> bool:
    """Whether the client's first request has begun: no answer may come before. It is also true if
    none begins in as many bytes as a head may have."""
    at = len(_PREFACE)
    while at + _HEAD.size <= len(received):
        high, low, kind, _, _ = _HEAD.unpack_from(received, at)
        if kind == _HEADERS:
            return True
        at += _HEAD.size + (high << 16) + low
    return len(received) > MAX_HEAD_BYTES


def http2_refusal(body: bytes) -> bytes:
    """All that the server sends: status 505 with this JSON body to the first request, and the end
    of the connection."""
    kind = b"application/json"
    head = _STATUS_505 + _CONTENT_TYPE + bytes([len(kind)]) + kind
    end = struct.pack(">II", 1, _HTTP_1_1_REQUIRED) + HTTP2_MESSAGE.encode()
    return (
        _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, 1, head)
        + _frame(_DATA, _END_STREAM, 1, body)
        + _frame(_GOAWAY, 0, 0, end)
    )


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    high, low = divmod(len(payload), 1 << 16)
    return _HEAD.pack(high, low, kind, flags, stream) + payload
