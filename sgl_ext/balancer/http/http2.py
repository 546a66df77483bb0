"""The refusal of HTTP/2 in its own frames, for a client that starts with it unasked.

An answer in HTTP/1.1 is no frame, so such a client would show "framing error" or "empty reply".
Frames and error codes: RFC 9113. Literal header fields: RFC 7541, section 6.2.2.
"""

import struct

from sgl_ext.limits.bounds import MAX_HEAD_BYTES

PREFACE_HEAD = b"PRI * HTTP/2.0\r\n\r\n"
"""How HTTP/2 begins, as far as it looks like a head of HTTP/1."""
MESSAGE = "HTTP/2 is not served here: use HTTP/1.1."
_PREFACE = PREFACE_HEAD + b"SM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _GOAWAY = 0, 1, 4, 7
_END_STREAM, _END_HEADERS = 1, 4
_HTTP_1_1_REQUIRED = 13
_HEAD = struct.Struct(">BHBBI")  # length in 3 bytes, type, flags, stream
# `:status: 505`, and the name `content-type`. The client must index neither.
_STATUS_505, _CONTENT_TYPE = b"\x08\x03505", b"\x0f\x10"


def has_request(received: bytes | bytearray) -> bool:
    """Whether the client's first request has begun: no answer may come before. It is also true if
    none begins in as many bytes as a head may have."""
    at = len(_PREFACE)
    while at + _HEAD.size <= len(received):
        high, low, kind, _, _ = _HEAD.unpack_from(received, at)
        if kind == _HEADERS:
            return True
        at += _HEAD.size + (high << 16) + low
    return len(received) > MAX_HEAD_BYTES


def refusal(body: bytes) -> bytes:
    """All that the server sends: status 505 with this JSON body to the first request, and the end
    of the connection."""
    kind = b"application/json"
    head = _STATUS_505 + _CONTENT_TYPE + bytes([len(kind)]) + kind
    end = struct.pack(">II", 1, _HTTP_1_1_REQUIRED) + MESSAGE.encode()
    return (
        _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, 1, head)
        + _frame(_DATA, _END_STREAM, 1, body)
        + _frame(_GOAWAY, 0, 0, end)
    )


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    high, low = divmod(len(payload), 1 << 16)
    return _HEAD.pack(high, low, kind, flags, stream) + payload
