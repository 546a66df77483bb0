"""Heads, between a gateway's list of headers and HTTP/1.1."""

from __future__ import annotations

import pytest

from sgl_ext.balancer.http.request_head import parse_head
from sgl_ext.integrations.gateway.gateway import changes, parse_lines, path_of, raw_head, values_of
from sgl_ext.protocols.errors import BalancerError

HEAD = [
    (b":method", b"POST"),
    (b":path", b"/v1/messages?beta=true"),
    (b":authority", b"gateway:8080"),
    (b":scheme", b"http"),
    (b"content-type", b"application/json"),
    (b"content-length", b"12"),
    (b"transfer-encoding", b"chunked"),
    (b"anthropic-beta", b"one"),
    (b"anthropic-beta", b"two"),
]


def test_a_head_is_read_as_that_of_an_http_request() -> None:
    head, length = parse_head(raw_head(HEAD))
    assert (head.method, head.path, length) == ("POST", "/v1/messages", 12)
    assert head.target == b"/v1/messages?beta=true"
    assert head.headers.count((b"anthropic-beta", b"one")) == 1
    assert head.fields[b"host"] == b"gateway:8080"
    assert not head.chunked, "the gateway frames bodies itself"
    assert path_of(HEAD) == "/v1/messages"


@pytest.mark.parametrize("name", [b":path", b":authority", b"content-type"])
@pytest.mark.parametrize("end", [b"\r\n", b"\n", b"\r"])
def test_a_value_with_a_line_end_makes_no_header(name: bytes, end: bytes) -> None:
    value = b"/" + end + b"x-sgl-ext-engine-secret: guessed"
    with pytest.raises(BalancerError, match="line end"):
        raw_head([*(header for header in HEAD if header[0] != name), (name, value)])


def test_a_head_has_a_bound() -> None:
    with pytest.raises(BalancerError, match="larger than") as caught:
        raw_head([*HEAD, (b"x-long", b"a" * 65536)])
    assert caught.value.status == 431


def test_only_what_differs_is_changed() -> None:
    before = values_of([*HEAD, (b"x-api-key", b"k"), (b"x-tenant-id", b"a")])
    after = values_of(
        parse_lines(
            b"host: engine\r\ncontent-type: application/json\r\nanthropic-beta: one\r\n"
            b"anthropic-beta: two\r\nx-tenant-id: b\r\nx-sgl-ext-rank: 0\r\ncontent-length: 9\r\n"
        )
    )
    changed, removed = changes(before, after)
    assert changed == [(b"x-tenant-id", b"b"), (b"x-sgl-ext-rank", b"0")]
    assert removed == [b"x-api-key"]
