"""Cached response heads: only for exactly such a response, and equal to a parsed head."""

from __future__ import annotations

import pytest

from sgl_ext.balancer.http.upstream import ResponseHeadCache, read_response_head

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; x\r\nKeep-Alive: 5\r\nContent-Length: "
FIELDS = [(b"content-type", b"text/event-stream; x"), (b"keep-alive", b"5"), (b"x-a", b"1")]


def known() -> ResponseHeadCache:
    heads = ResponseHeadCache()
    heads.add(HEAD + b"2\r\n\r\nab", read_response_head(200, b"OK", FIELDS))
    return heads


def test_a_head_is_passed_on_without_connection_headers() -> None:
    head = read_response_head(200, b"OK", FIELDS)
    assert head.lines == b"content-type: text/event-stream; x\r\nx-a: 1\r\n"
    assert head.streams


def test_a_head_with_another_length_is_cached() -> None:
    found = known().read(HEAD + b"10\r\n\r\n0123456789")
    assert found is not None
    assert (found[0].status, found[1]) == (200, b"0123456789")


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"3\r\n\r\nab",
        HEAD + b"1\r\n\r\nab",
        HEAD + b"2\r\nx: y\r\n\r\nab",
        HEAD + b"+2\r\n\r\nab",
        HEAD + b"2\r\nContent-Length: 2\r\n\r\nab",
        HEAD.replace(b"200", b"201") + b"2\r\n\r\nab",
        HEAD + b"2",
        b"",
    ],
)
def test_any_other_head_is_not_cached(data: bytes) -> None:
    assert known().read(data) is None


def test_an_interim_head_is_not_cached_as_the_final_one() -> None:
    heads = ResponseHeadCache()
    interim = b"HTTP/1.1 103 Hints\r\nContent-Length: 40\r\n\r\n"
    data = interim + b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab"
    assert len(data) - len(interim) == 40
    heads.add(data, read_response_head(200, b"OK", []))
    assert heads.read(data) is None


def test_headers_that_the_connection_header_names_are_not_passed_on() -> None:
    fields = [
        (b"connection", b"close, X-A"),
        (b"x-a", b"1"),
        (b"connection", b"x-c"),
        (b"x-c", b""),
    ]
    assert read_response_head(200, b"OK", [*fields, (b"x-b", b"2")]).lines == b"x-b: 2\r\n"


@pytest.mark.parametrize("status", [204, 304])
def test_the_head_of_a_response_without_a_body_is_not_cached(status: int) -> None:
    heads = ResponseHeadCache()
    data = b"HTTP/1.1 %d -\r\ncontent-length: 0\r\n\r\n" % status
    heads.add(data, read_response_head(status, b"-", []))
    assert heads.read(data.replace(b"0\r\n", b"3\r\n") + b"abc") is None


def test_the_cache_of_response_heads_is_bounded() -> None:
    heads = ResponseHeadCache()
    for number in range(1000):
        data = b"HTTP/1.1 200 OK\r\ndate: %d\r\ncontent-length: 0\r\n\r\n" % number
        heads.add(data, read_response_head(200, b"OK", []))
    assert len(heads._cached) <= 256


def test_a_stream_is_neither_stored_nor_collected_by_proxies() -> None:
    stream = (b"content-type", b"text/event-stream")
    assert read_response_head(200, b"OK", [stream]).stream_lines == (
        b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
    )
    found = read_response_head(200, b"OK", [stream, (b"cache-control", b"no-store")])
    assert found.stream_lines == b"x-accel-buffering: no\r\n"


def test_the_head_of_a_chunked_response_is_read_once() -> None:
    heads = ResponseHeadCache()
    chunked = [*FIELDS, (b"transfer-encoding", b"chunked")]
    assert heads.of(200, b"OK", chunked) is heads.of(200, b"OK", [*chunked])
    assert heads.of(201, b"OK", chunked).status == 201
    assert heads.of(200, b"OK", FIELDS) is not heads.of(200, b"OK", FIELDS)
    named = [*chunked, (b"x-request-id", b"1")]
    assert heads.of(200, b"OK", named) is not heads.of(200, b"OK", named)
    for number in range(1000):
        heads.of(200, b"OK", [*chunked, (b"x-n", b"%d" % number)])
    assert len(heads._chunked) <= 256
