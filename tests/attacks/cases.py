"""The attacks: what is sent, and the status that answers it. A new one is one line in `CASES`.

Attacks of one tenant on another, which need more than one request, are tested where the bound is:

    claims of an engine's memory    tests/scheduler/test_capacity.py
    pins, in number and in tokens   tests/radix/test_pins.py
    work that is not charged        tests/balancer/access/test_rate_limits.py
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from typing import NamedTuple

import zstandard

_MIB = 1 << 20
MESSAGES, CHAT, CONTEXTS = "/v1/messages", "/v1/chat/completions", "/v1/contexts"
RESPONSES = "/v1/responses"


class Case(NamedTuple):
    """status: of the answer; None if there is none as long as the connections are open.
    times: how many connections send the same, one after the other.
    """

    name: str
    data: Callable[[], bytes]
    status: int | None
    times: int = 1


def post(path: str, body: bytes, *lines: str) -> bytes:
    return head("POST", path, f"content-length: {len(body)}", *lines) + body


def head(method: str, path: str, *lines: str) -> bytes:
    fixed = (f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json")
    return "\r\n".join([*fixed, *lines, "", ""]).encode()


def deflated(path: str, body: bytes, *, level: int = 9) -> bytes:
    return post(path, zlib.compress(body, level), "content-encoding: deflate")


def declared(method: str, path: str, size: int, sent: bytes = b"") -> bytes:
    """A head that states a length, and some of the body."""
    return head(method, path, f"content-length: {size}") + sent


def system_of(block: bytes, size: int) -> bytes:
    """A request with `size` bytes of equal system blocks."""
    blocks = b",".join([block] * (size // (len(block) + 1)))
    return b'{"model":"m","max_tokens":1,"system":[%b],"messages":[]}' % blocks


def messages_of(message: bytes, count: int) -> bytes:
    turns = b",".join([message] * count)
    return b'{"model":"m","max_tokens":1,"messages":[%b]}' % turns


def tools_of(tool: bytes, count: int) -> bytes:
    listed = b",".join([tool] * count)
    return b'{"model":"m","max_tokens":1,"tools":[%b],"messages":[]}' % listed


def context_of(tool: bytes, count: int) -> bytes:
    listed = b",".join([tool] * count)
    block = b'{"id":"t","kind":"tools","layer":"stable","content":[%b]}' % listed
    return b'{"blocks":[%b]}' % block


def text_of(text: bytes) -> bytes:
    """A request with one long message."""
    return messages_of(_TURN % b'{"type":"text","text":"%b"}' % text, 1)


_UPGRADE = (
    *("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13"),
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
)
_MASK = bytes(4)
HANDSHAKE = head("GET", RESPONSES, *_UPGRADE)
FRAMES = {
    "garbage": lambda: b"GET / HTTP/1.1\r\n" * 100_000,
    "empty parts of a message": lambda: b"\x01\x80" + _MASK + (b"\0\x80" + _MASK) * 60_000,
    "parts of one byte": lambda: b"\x01\x81" + _MASK + b" " + (b"\0\x81" + _MASK + b" ") * 60_000,
    "pings": lambda: (b"\x89\x80" + _MASK) * 60_000,
    "empty messages": lambda: (b"\x81\x80" + _MASK) * 60_000,
    "a frame of 2^60 bytes": lambda: b"\x81\xff" + (1 << 60).to_bytes(8) + _MASK + _BLANKS,
}
"""What a client sends on a WebSocket, after its handshake."""
_TENANT = "x-tenant-id: " + "x" * 60_000
_CHUNKED = "transfer-encoding: chunked"
_CHUNKS = b"1\r\n \r\n" * 300_000 + b"2\r\n{}\r\n0\r\n\r\n"
_FOREIGN = "origin: https://evil.example"
_PART, _BLANKS = b" " * 300_000, b" " * 60 * _MIB
_ZSTD = zstandard.compress(_BLANKS)
_TEXT = b"All happy families are alike; each unhappy family is unhappy in its own way. "
_TURN = b'{"role":"user","content":[%b]}'
_LONG_TURN = _TURN % b",".join([b'{"type":"text","text":"%b"}' % (_TEXT * 50)] * 3)
_ONE, _EMPTY, _NESTED = b'{"type":"text","text":"x"}', b"{}", b"[" * 500 + b"]" * 500
_BLOCKS = b",".join([_ONE] * 10_001)
_DEEP = b"[" * 1010 + b"]" * 1010
_IDS = b",".join([b"15496"] * 250_000)
_MANY_IDS = b",".join([b"15496"] * 1_000_000)
_SHORT_TURN = _TURN % (b'{"type":"text","text":"%b"}' % (_TEXT * 65))
_IMAGE = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}'
_IMAGE_TURN = _TURN % (_IMAGE % (b"iVBORw0KGgo+" * 43_690))
_LARGE_CONTEXT = b'{"blocks":[{"id":"t","layer":"stable","content":"%b"}]}' % (_TEXT * 200_000)
_QUOTED = _TEXT + b'She said: \\"No.\\"\\n'
_HEADER = b'"x-anthropic-billing-header: %b"' % (b"a=b; " * 400_000 + b"c")
_HEADERS = b'"%b"' % (b"x-anthropic-billing-header: a=b;\\n" * 60_000)

_CREATE = "x-sgl-ext-context: create"
_MARK = b',"nvext":{"cache_control":{"type":"ephemeral"}}}'
_MANY_MARKED = messages_of(_TURN % _ONE, 10_000)[:-1] + _MARK
_BLOCKS_MARKED = messages_of(_TURN % b",".join([_ONE] * 9_990), 1)[:-1] + _MARK
_LONG_MARKED = text_of(_QUOTED * 200_000)[:-1] + _MARK

# fmt: off
CASES = [
    # Memory without a key: what is declared, held back or inflated.
    Case("a long body of GET", lambda: declared("GET", "/health", 64 * _MIB), 413, times=8),
    Case("a chunked body of GET", lambda: head("GET", "/health", _CHUNKED) + b"ffffff\r\n", 413),
    Case("a declared body", lambda: declared("POST", MESSAGES, 64 * _MIB), None, times=64),
    Case("a part of a body", lambda: declared("POST", CHAT, 64 * _MIB, _PART), None, times=8),
    Case("a head without an end", lambda: b"GET / HTTP/1.1\r\na: " + b"x" * 60_000, None, times=64),
    Case("a head that is too long", lambda: b"GET / HTTP/1.1\r\na: " + b"x" * 70_000, 431),
    Case("15,000 headers", lambda: head("GET", "/health", *["a:"] * 15_000), 200),
    Case("chunks of one byte", lambda: head("POST", MESSAGES, _CHUNKED) + _CHUNKS, 400),
    Case("bodies that inflate a thousandfold", lambda: deflated(CHAT, _BLANKS), 413, times=5),
    Case("a zstd bomb", lambda: post(CHAT, _ZSTD, "content-encoding: zstd"), 413),
    Case("a gzip bomb", lambda: post(CHAT, gzip.compress(_BLANKS), "content-encoding: gzip"), 413),
    # The event loop: many small elements, or a text that takes long to read.
    Case("16 MB of blocks, deflated", lambda: deflated(MESSAGES, system_of(_ONE, 16 * _MIB)), 413),
    Case("1 MB of texts, deflated", lambda: deflated(MESSAGES, system_of(b'"x"', _MIB - 99)), 400),
    Case("16 MB of texts", lambda: post(MESSAGES, system_of(b'"x"', 16 * _MIB)), 400),
    Case("20 MB of empty objects", lambda: post(CHAT, system_of(_EMPTY, 20 * _MIB)), 400),
    Case("20 MB of nested lists", lambda: post(CHAT, system_of(_NESTED, 20 * _MIB)), 400),
    Case("20 MB of numbers", lambda: post("/generate", system_of(b"1", 20 * _MIB)), 400),
    Case("20 MB of keys", lambda: post(CHAT, system_of(b'{"a":1,"b":2}', 20 * _MIB)), 400),
    Case("4 MB of escaped quotes", lambda: post(MESSAGES, text_of(b'\\"' * 2_000_000)), 200),
    Case("10,000 system blocks", lambda: post(MESSAGES, system_of(_ONE, 10_000 * 27)), 200),
    Case("10,100 system blocks", lambda: post(MESSAGES, system_of(_ONE, 10_100 * 27)), 400),
    Case("10,000 messages", lambda: post(MESSAGES, messages_of(_TURN % _ONE, 10_000)), 200),
    Case("10,001 messages", lambda: post(MESSAGES, messages_of(_TURN % _ONE, 10_001)), 400),
    Case("10,001 blocks", lambda: post(MESSAGES, messages_of(_TURN % _BLOCKS, 1)), 400),
    Case("2,000 tools", lambda: post(MESSAGES, tools_of(_EMPTY, 2000)), 200),
    Case("2,001 tools", lambda: post(MESSAGES, tools_of(_EMPTY, 2001)), 400),
    Case("330,000 tools", lambda: post(MESSAGES, tools_of(_EMPTY, 330_000)), 400),
    Case("a context of 330,000 tools", lambda: post(CONTEXTS, context_of(_EMPTY, 330_000)), 400),
    Case("a context of 2,001 tools", lambda: post(CONTEXTS, context_of(_EMPTY, 2001)), 400),
    Case("a session header of 2 MB", lambda: post(MESSAGES, system_of(_HEADER, 3 * _MIB)), 200),
    Case("60,000 session headers", lambda: post(MESSAGES, system_of(_HEADERS, 3 * _MIB)), 200),
    Case("a context of 15 MB", lambda: post(CONTEXTS, _LARGE_CONTEXT), 200),
    Case("a context made of 10,000 messages", lambda: post(CHAT, _MANY_MARKED, _CREATE), 200),
    Case("a context made of 10,000 blocks", lambda: post(CHAT, _BLOCKS_MARKED, _CREATE), 200),
    Case("a context made of 20 MB", lambda: post(CHAT, _LONG_MARKED, _CREATE), 200),
    # What the control plane and two parsers could be made to do.
    Case("a web page that adds a worker", lambda: post("/sgl_ext/workers", b"{}", _FOREIGN), 403),
    Case("an action by GET", lambda: head("GET", "/flush_cache"), 405),
    Case("a foreign Host", lambda: b"POST /flush_cache HTTP/1.1\r\nhost: a.example\r\n\r\n", 403),
    Case("a fragment", lambda: head("GET", "/v1/loads#x"), 400),
    Case("a model nested 1,010 deep", lambda: post(CHAT, b'{"model":%b}' % _DEEP), 400),
    Case("a query that is empty", lambda: head("GET", "/?"), 200),
    Case("half a WebSocket handshake", lambda: head("GET", RESPONSES, *_UPGRADE[:-1]), 400),
    Case("two transfer codings", lambda: head("POST", CHAT, _CHUNKED, _CHUNKED), 400),
    Case("a tenant's name of 60 KB", lambda: head("GET", "/metrics", _TENANT), 400),
    # What must pass: conversations as long as those of real clients, and more.
    Case("a million tokens", lambda: post(MESSAGES, messages_of(_LONG_TURN, 400)), 200),
    Case("250,000 token ids", lambda: post("/generate", b'{"input_ids":[%b]}' % _IDS), 200),
    Case("5 MB of text", lambda: post(MESSAGES, text_of(_TEXT * 70_000)), 200),
    Case("10 MB in 2,000 messages", lambda: post(MESSAGES, messages_of(_SHORT_TURN, 2000)), 200),
    Case("30 MB in 60 images", lambda: post(CHAT, messages_of(_IMAGE_TURN, 60)), 200),
    Case("a million token ids", lambda: post("/generate", b'{"input_ids":[%b]}' % _MANY_IDS), 200),
    Case("20 MB in one text", lambda: post(MESSAGES, text_of(_QUOTED * 200_000)), 200),
    Case("63 MB in one text", lambda: post(MESSAGES, text_of(_QUOTED * 630_000)), 200),
    Case("63 MB of letters, escaped", lambda: post(CHAT, text_of(b"\\u4e2d" * 11_000_000)), 200),
]
# fmt: on
