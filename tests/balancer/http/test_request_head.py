"""Request heads: how they are parsed, and that no ambiguous head is accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.balancer.http.request_head import RequestHead, RequestHeadCache, parse_head
from sgl_ext.protocols.errors import BalancerError


def head_of(*lines: bytes, start: bytes = b"POST /v1/messages?beta=true HTTP/1.1") -> bytes:
    return b"\r\n".join([start, *lines, b"", b""])


def test_a_head_is_parsed() -> None:
    head, length = parse_head(
        head_of(
            b"Host: here",
            b"Content-Type: Application/JSON; charset=utf-8",
            b"X-A: 1  ",
            b"x-a: 2",
            b"Content-Length: 12",
        )
    )
    assert (head.method, head.target, head.path) == (
        "POST",
        b"/v1/messages?beta=true",
        "/v1/messages",
    )
    assert head.content_type == "application/json"
    assert head.headers[2:] == [(b"x-a", b"1"), (b"x-a", b"2")]
    assert head.fields[b"x-a"] == b"2"
    assert length == 12
    assert b"content-length" not in head.fields
    assert head.keep_alive
    assert not head.chunked


@pytest.mark.parametrize(
    ("start", "line", "keeps"),
    [
        (b"GET / HTTP/1.1", b"a: b", True),
        (b"GET / HTTP/1.1", b"Connection: x, Close", False),
        (b"GET / HTTP/1.0", b"a: b", False),
        (b"GET / HTTP/1.0", b"Connection: Keep-Alive", True),
        (b"GET / HTTP/1.0", b"Connection: keep-alive, close", False),
    ],
)
def test_keep_alive_follows_the_version_and_the_header(
    start: bytes, line: bytes, keeps: bool
) -> None:
    assert parse_head(head_of(line, start=start))[0].keep_alive is keeps


def test_workers_do_not_get_connection_headers_or_keys() -> None:
    head, _ = parse_head(
        head_of(
            b"Host: here",
            b"Authorization: Bearer s",
            b"X-Api-Key: s",
            b"Connection: keep-alive, X-Hop",
            b"X-Hop: 1",
            b"Keep-Alive: 5",
            b"TE: trailers",
            b"Upgrade: h2c",
            b"Expect: 100-continue",
            b"Accept-Encoding: br",
            b"Content-Encoding: gzip",
            b"anthropic-beta: x",
            b"Content-Length: 3",
        )
    )
    assert head.upstream_lines == b"anthropic-beta: x\r\n"


def test_a_header_that_is_not_sent_on_is_not_read_either() -> None:
    lines = (b"Host: here", b"X-Tenant-Id: a", b"Connection: close, X-Tenant-ID, host", b"A: b")
    head, _ = parse_head(head_of(*lines))
    assert head.upstream_lines == b"a: b\r\n"
    assert b"x-tenant-id" not in head.fields
    assert b"x-tenant-id" not in dict(head.headers)
    assert head.fields[b"host"] == b"here"
    assert not head.keep_alive


@pytest.mark.parametrize(
    "lines",
    [
        (b"Content-Length: 5", b"Content-Length: 5"),
        (b"Content-Length: 5", b"Content-Length: 6"),
        (b"Content-Length: 5, 5",),
        (b"Content-Length: +5",),
        (b"Content-Length: 0x5",),
        (b"Content-Length: 5 6",),
        (b"Content-Length: -1",),
        (b"Content-Length:",),
        (b"Content-Length: 99999999999999999999999",),
        (b"Content-Length: 5", b"Transfer-Encoding: chunked"),
        (b"Transfer-Encoding: chunked", b"Content-Length: 5"),
        (b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
        (b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked"),
        (b"Transfer-Encoding: gzip, chunked",),
        (b"Transfer-Encoding: chunked, identity",),
        (b"Transfer-Encoding: xchunked",),
        (b"Transfer-Encoding: identity",),
        (b"Transfer-Encoding: \x0bchunked",),
        (b"Content-Length : 5",),
        (b"a: b", b" folded"),
        (b"a: b\nContent-Length: 5",),
        (b"a: b\rContent-Length: 5",),
        (b"a: \x00",),
        (b": empty",),
        (b"no colon",),
        (b"\xc3\xa9: x",),
        (b"Host: a", b"Host: b"),
        (b"Content-Type: text/plain", b"Content-Type: application/json"),
    ],
)
def test_ambiguous_heads_are_400(lines: tuple[bytes, ...]) -> None:
    with pytest.raises(BalancerError) as caught:
        parse_head(head_of(*lines))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "start",
    [
        b"GET /",
        b"GET / HTTP/0.9",
        b"GET / HTTP/2.0",
        b"GET / HTTP/1.2",
        b"GET / http/1.1",
        b"ANNOUNCE / RTSP/1.0",
        b"get / HTTP/1.1",
        b"CONNECT here:80 HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
        b"GET here HTTP/1.1",
        b"GET https://here/ HTTP/1.1",
        b"GET /\xc3\xa9 HTTP/1.1",
        b"GET / x HTTP/1.1",
        b"GET  / HTTP/1.1",
        b"GET http://he\nre:1?c HTTP/1.1",
        b"GET /  HTTP/1.1",
        b"\nGET / HTTP/1.1",
        b"\rGET / HTTP/1.1",
        b"GET /v1/loads#x HTTP/1.1",
        b"GET http://here/v1/loads#x HTTP/1.1",
        b"",
    ],
)
def test_a_malformed_request_line_is_400(start: bytes) -> None:
    with pytest.raises(BalancerError) as caught:
        parse_head(head_of(start=start))
    assert caught.value.status == 400


def test_chunked_is_only_for_http_1_1() -> None:
    assert parse_head(head_of(b"Transfer-Encoding: Chunked"))[0].chunked
    with pytest.raises(BalancerError):
        parse_head(head_of(b"Transfer-Encoding: chunked", start=b"POST / HTTP/1.0"))


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        (b"http://here:1/a/b?c=d", b"/a/b?c=d"),
        (b"HTTP://here", b"/"),
        (b"http://here?c", b"/?c"),
    ],
)
def test_an_absolute_url_is_its_path(target: bytes, wanted: bytes) -> None:
    assert parse_head(head_of(start=b"GET " + target + b" HTTP/1.1"))[0].target == wanted


def test_an_upgrade_is_declined() -> None:
    lines = (b"Upgrade: h2c", b"Connection: Upgrade", b"Content-Length: 3")
    head, length = parse_head(head_of(*lines))
    assert length == 3
    assert head.upstream_lines == b""


def outcome(heads: RequestHeadCache, raw: bytes) -> object:
    try:
        head, length = heads.read(raw)
    except BalancerError as error:
        return error.status
    known = {k: v for k, v in vars(head).items() if k != "rejection"}
    return known, head.rejection and head.rejection.status, length


LINES = st.sampled_from(
    [
        b"Content-Length: 1",
        b"Content-Length: 22",
        b"content-length: 333",
        b"CONTENT-LENGTH: 4",
        b"Content-Length:5",
        b"Content-Length: 00",
        b"Content-Length: ",
        b"Transfer-Encoding: chunked",
        b"X: content-length: 7",
        b"Connection: close",
        b"X-Api-Key: secret",
        b"Host: a",
    ]
)


@given(st.lists(st.lists(LINES, max_size=4), max_size=12))
def test_a_cached_head_equals_a_parsed_one(heads: list[list[bytes]]) -> None:
    def admit(head: RequestHead) -> None:
        if b"x-api-key" not in head.fields:
            raise BalancerError(401, "no")  # type: ignore[arg-type]

    remembering = RequestHeadCache(admit)
    for lines in heads:
        raw = head_of(*lines)
        assert outcome(remembering, raw) == outcome(RequestHeadCache(admit), raw)


def test_the_cache_of_request_heads_is_bounded() -> None:
    heads = RequestHeadCache(lambda head: None)
    for number in range(5000):
        heads.read(head_of(b"a: %d" % number))
    assert len(heads._cached) <= 1024


def test_an_empty_length_is_not_that_of_a_cached_head() -> None:
    heads = RequestHeadCache(lambda head: None)
    heads.read(head_of(b"Content-Length: 5"))
    with pytest.raises(BalancerError):
        heads.read(head_of(b"Content-Length: "))


def test_a_rejected_head_is_not_cached() -> None:
    routing = []

    def admit(head: RequestHead) -> None:
        routing.append(head)
        raise BalancerError(401, "no")  # type: ignore[arg-type]

    heads = RequestHeadCache(admit)
    for _ in range(2):
        assert heads.read(head_of())[0].rejection is not None
    assert len(routing) == 2


@given(st.binary(max_size=200))
def test_any_bytes_are_a_head_or_400(data: bytes) -> None:
    fact = outcome(RequestHeadCache(lambda head: None), b"GET /" + data + b"\r\n\r\n")
    assert isinstance(fact, tuple) or fact == 400
