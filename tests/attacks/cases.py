"""The attacks: what is sent, and the status that answers it. A new one is one line in `CASES`."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from typing import NamedTuple

_MIB = 1 << 20
MESSAGES, CHAT, CONTEXTS = "/v1/messages", "/v1/chat/completions", "/v1/contexts"


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


_TEXT = b"All happy families are alike; each unhappy family is unhappy in its own way. "
_BLOCK = b'{"type":"text","text":"%b"}' % (_TEXT * 50)
_TURN = b'{"role":"user","content":[%b]}'
_HEADER = b'"x-anthropic-billing-header: %b"' % (b"a=b; " * 400_000 + b"c")
_ONE, _EMPTY = b'{"type":"text","text":"x"}', b"{}"
_RESULT = b'{"role":"user","content":[%b]}' % b",".join([_ONE] * 10_001)

# fmt: off  # one line a case
CASES = [
    # Memory without a key: what is declared, held back or inflated.
    Case("a long body of GET", lambda: declared("GET", "/health", 64 * _MIB), 413, times=8),
    Case(
        "a chunked body of GET",
        lambda: head("GET", "/health", "transfer-encoding: chunked") + b"ffffff\r\n",
        413,
    ),
    Case("a declared body", lambda: declared("POST", MESSAGES, 64 * _MIB), None, times=200),
    Case(
        "the first part of a declared body",
        lambda: declared("POST", MESSAGES, 64 * _MIB, b" " * _MIB),
        None,
        times=100,
    ),
    Case(
        "a head without an end",
        lambda: b"GET /health HTTP/1.1\r\na: " + b"x" * 60_000,
        None,
        times=100,
    ),
    Case("a head that is too long", lambda: b"GET / HTTP/1.1\r\na: " + b"x" * 70_000, 431),
    Case(
        "bodies that inflate a thousandfold",
        lambda: deflated(MESSAGES, b" " * 60 * _MIB),
        413,
        times=5,
    ),
    Case(
        "a gzip bomb",
        lambda: post(MESSAGES, gzip.compress(b" " * 60 * _MIB), "content-encoding: gzip"),
        413,
    ),
    # The event loop: many small elements.
    Case(
        "16 MB of one-letter blocks, deflated",
        lambda: deflated(MESSAGES, system_of(b'{"type":"text","text":"x"}', 16 * _MIB)),
        413,
    ),
    Case(
        "1 MB of one-letter texts, deflated",
        lambda: deflated(MESSAGES, system_of(b'"x"', _MIB - 1000)),
        400,
    ),
    Case("16 MB of one-letter texts", lambda: post(MESSAGES, system_of(b'"x"', 16 * _MIB)), 400),
    Case("20 MB of empty objects", lambda: post(CHAT, system_of(_EMPTY, 20 * _MIB)), 400),
    Case(
        "20 MB of nested lists",
        lambda: post(CHAT, system_of(b"[" * 500 + b"]" * 500, 20 * _MIB)),
        400,
    ),
    Case("20 MB of numbers", lambda: post("/generate", system_of(b"1", 20 * _MIB)), 400),
    Case("20 MB of keys", lambda: post(CHAT, system_of(b'{"a":1,"b":2,"c":3}', 20 * _MIB)), 400),
    Case(
        "8 MB of escaped quotes",
        lambda: post(CHAT, system_of(b'"%b"' % (b'\\"' * 4 * _MIB), 8 * _MIB)),
        200,
    ),
    Case("10,000 system blocks", lambda: post(MESSAGES, system_of(_ONE, 10_000 * 27)), 200),
    Case("10,100 system blocks", lambda: post(MESSAGES, system_of(_ONE, 10_100 * 27)), 400),
    Case("10,000 messages", lambda: post(MESSAGES, messages_of(_TURN % _ONE, 10_000)), 200),
    Case("11,000 messages", lambda: post(MESSAGES, messages_of(_TURN % _ONE, 11_000)), 400),
    Case("10,001 blocks in a message", lambda: post(MESSAGES, messages_of(_RESULT, 1)), 400),
    Case("2,000 tools", lambda: post(MESSAGES, tools_of(_EMPTY, 2000)), 200),
    Case("2,001 tools", lambda: post(MESSAGES, tools_of(_EMPTY, 2001)), 400),
    Case("330,000 tools", lambda: post(MESSAGES, tools_of(_EMPTY, 330_000)), 400),
    Case("a context of 330,000 tools", lambda: post(CONTEXTS, context_of(_EMPTY, 330_000)), 400),
    Case("a context of 2,001 tools", lambda: post(CONTEXTS, context_of(_EMPTY, 2001)), 400),
    Case(
        "a session header without an end",
        lambda: post(MESSAGES, system_of(_HEADER, len(_HEADER) + 1)),
        200,
    ),
    # What must pass: the longest conversations of real clients, and more.
    Case(
        "400 messages and 1,000 blocks of a million tokens",
        lambda: post(MESSAGES, messages_of(_TURN % b",".join([_BLOCK] * 3), 400)),
        200,
    ),
    Case(
        "a prompt of 400,000 token ids",
        lambda: post("/generate", b'{"input_ids":[%b]}' % b",".join([b"15496"] * 400_000)),
        200,
    ),
    Case(
        "8 MB of text",
        lambda: post(
            MESSAGES, messages_of(_TURN % b'{"type":"text","text":"%b"}' % (_TEXT * 110_000), 1)
        ),
        200,
    ),
]
