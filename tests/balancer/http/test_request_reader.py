"""The reader: the requests do not depend on how the bytes arrive, and no bytes break it."""

from __future__ import annotations

import functools
import gzip
import itertools
import zlib

import httptools
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.balancer.http.body_codings import MAX_SMALL_CHUNKS, ChunkedBody
from sgl_ext.balancer.http.request_head import RequestHead, RequestHeadCache
from sgl_ext.balancer.http.request_reader import Request, RequestReader
from sgl_ext.limits.bounds import (
    FIRST_BUFFER_BYTES,
    FREE_INFLATED_BYTES,
    INFLATED_STEP_BYTES,
    MAX_HEAD_BYTES,
    MAX_SKIPPED_BYTES,
)
from sgl_ext.limits.byte_account import ByteAccount, Hold
from sgl_ext.protocols.errors import BalancerError

LIMIT = 100_000
# Without the time of the call: what it packs is part of tests' names.
_gzip = functools.partial(gzip.compress, mtime=0)


def reader(limit: int = LIMIT, refused: bytes = b"/refused") -> RequestReader:
    def admit(head: RequestHead) -> None:
        if head.target == refused:
            raise BalancerError(401, "no")  # type: ignore[arg-type]

    return RequestReader(RequestHeadCache(admit), limit, ByteAccount(2 * limit))


def feed(source: RequestReader, data: bytes) -> None:
    """Puts bytes into the reader's buffer, as a transport does."""
    while data:
        buffer = source.buffer()
        size = min(len(buffer), len(data))
        assert size
        buffer[:size] = data[:size]
        del buffer
        source.received(size)
        data = data[size:]


def read_all(source: RequestReader, pieces: list[bytes]) -> list[Request | int]:
    """The requests, and the status of what ended them, if bytes were no request."""
    requests: list[Request | int] = []
    try:
        for piece in pieces:
            while piece:
                size = min(len(source.buffer()), len(piece))
                feed(source, piece[:size])
                piece = piece[size:]
                while request := source.next():
                    requests.append(request)
                    if request.unread:
                        return requests
    except BalancerError as error:
        requests.append(int(error.status))
    return requests


def facts(requests: list[Request | int]) -> list[object]:
    return [
        request
        if isinstance(request, int)
        else (
            request.head.target,
            bytes(request.body),
            request.rejection and int(request.rejection.status),
            request.keep_alive,
        )
        for request in requests
    ]


def chunked(*chunks: bytes, trailer: bytes = b"") -> bytes:
    framed = [b"%x;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks if chunk]
    return b"".join([*framed, b"0\r\n", trailer, b"\r\n"])


def post(target: bytes, body: bytes, *lines: bytes) -> bytes:
    head = [b"POST %b HTTP/1.1" % target, *lines, b"Content-Length: %d" % len(body)]
    return b"\r\n".join([*head, b"", body])


def post_chunked(target: bytes, *chunks: bytes, lines: tuple[bytes, ...] = ()) -> bytes:
    head = [b"POST %b HTTP/1.1" % target, *lines, b"Transfer-Encoding: chunked"]
    return b"\r\n".join([*head, b"", chunked(*chunks, trailer=b"x-t: 1\r\n")])


STREAM = b"".join(
    [
        post(b"/a", b"one"),
        b"\r\n",
        post(b"/b", b"", b"Connection: keep-alive"),
        post_chunked(b"/c", b"two", b"", b"x" * 300),
        post(b"/refused", b"GET /smuggled HTTP/1.1\r\n\r\n"),
        post(b"/d", _gzip(b"three" * 50), b"Content-Encoding: gzip"),
        post(b"/e", b"y" * 40_000),
        b"GET /f HTTP/1.1\r\n\r\n",
    ]
)
WANTED = [
    (b"/a", b"one", None, True),
    (b"/b", b"", None, True),
    (b"/c", b"two" + b"x" * 300, None, True),
    (b"/refused", b"", 401, True),
    (b"/d", b"three" * 50, None, True),
    (b"/e", b"y" * 40_000, None, True),
    (b"/f", b"", None, True),
]


def test_requests_come_out_in_order() -> None:
    assert facts(read_all(reader(), [STREAM])) == WANTED


def test_every_byte_alone_makes_the_same_requests() -> None:
    pieces = [STREAM[at : at + 1] for at in range(len(STREAM))]
    assert facts(read_all(reader(), pieces)) == WANTED


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_any_split_makes_the_same_requests(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in itertools.pairwise(edges)]
    assert facts(read_all(reader(), pieces)) == WANTED


PARTS = st.sampled_from(
    [
        post(b"/a", b"one"),
        post_chunked(b"/c", b"two"),
        b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n",
        b"0\r\n\r\n",
        b"\r\n\r\n",
        b"\r",
        b"\n",
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]
)


@given(st.lists(PARTS | st.binary(max_size=60), max_size=12), st.data())
def test_garbage_is_rejected_and_nothing_worse_happens(
    parts: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    edges = [0, *sorted(cuts), len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
    split = facts(read_all(reader(), pieces))
    assert split == facts(read_all(reader(), [stream]))
    assert all(fact in (400, 431) for fact in split if isinstance(fact, int))


def test_an_endless_head_is_431_and_bounded() -> None:
    source = reader()
    (status,) = read_all(source, [b"GET / HTTP/1.1\r\n", b"a: " + b"x" * 2 * MAX_HEAD_BYTES])
    assert status == 431
    assert len(source.ahead) < 2 * MAX_HEAD_BYTES


def test_a_long_head_in_one_piece_is_431() -> None:
    data = b"GET / HTTP/1.1\r\na: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n"
    assert facts(read_all(reader(), [data])) == [431]


@pytest.mark.parametrize("size", [LIMIT, LIMIT + 1])
def test_a_body_is_read_up_to_the_limit(size: int) -> None:
    (fact,) = facts(read_all(reader(), [post(b"/", b"x" * size)]))
    assert fact == (
        b"/",
        b"x" * size if size <= LIMIT else b"",
        None if size <= LIMIT else 413,
        True,
    )


def test_a_body_far_over_the_limit_is_not_awaited() -> None:
    source = reader()
    head = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (LIMIT + MAX_SKIPPED_BYTES + 1)
    (request,) = read_all(source, [head])
    assert isinstance(request, Request)
    assert request.unread
    assert not request.keep_alive


def test_no_memory_is_allocated_for_a_rejected_body() -> None:
    source = reader(limit=1 << 40)
    feed(source, b"POST /refused HTTP/1.1\r\nContent-Length: 900000\r\n\r\n")
    assert source.next() is None
    feed(source, b"x" * 500_000)
    assert source.next() is None
    assert len(source.ahead) == 0
    feed(source, b"x" * 400_000)
    request = source.next()
    assert request is not None
    assert not request.unread


def test_a_chunked_body_over_the_limit_ends_the_connection() -> None:
    (fact,) = facts(read_all(reader(10), [post_chunked(b"/", b"x" * 8, b"y" * 8)]))
    assert fact == (b"/", b"", 413, False)


@pytest.mark.parametrize(
    "body",
    [
        b"5\nhello\r\n0\r\n\r\n",
        b"5 \r\nhello\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhelloo\r\n0\r\n\r\n",
        b"5\r\nhello0\r\n\r\n",
        b"\r\n",
        b"-1\r\n",
        b"5;\x00\r\nhello\r\n0\r\n\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\na: b\nc: d\r\n\r\n",
        b"0\r\n\x00: b\r\n\r\n",
        b"0\r\nContent-Length: 5\r\n\r\n",
        b"0\r\nTransfer-encoding: chunked\r\n\r\n",
        b"11111111111111111\r\n",
        b"5" + b";" + b"x" * 5000,
    ],
)
def test_a_malformed_chunk_is_400_and_ends_the_connection(body: bytes) -> None:
    head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert facts(read_all(reader(), [head + body])) == [(b"/", b"", 400, False)]


def test_extensions_and_trailers_are_bounded() -> None:
    head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    extensions = b"".join(b"1;%b\r\nx\r\n" % (b"e" * 4000) for _ in range(20))
    trailers = b"0\r\n" + b"t: 1\r\n" * 20_000
    for body in (extensions, trailers):
        assert facts(read_all(reader(), [head + body])) == [(b"/", b"", 400, False)]


def test_chunks_must_have_a_size_on_average() -> None:
    head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    small, end = b"1\r\nx\r\n", b"0\r\n\r\n"
    assert facts(read_all(reader(), [head + small * MAX_SMALL_CHUNKS + end]))[0] == (
        b"/",
        b"x" * MAX_SMALL_CHUNKS,
        None,
        True,
    )
    data = head + small * (MAX_SMALL_CHUNKS + 1) + end
    assert facts(read_all(reader(), [data])) == [(b"/", b"", 400, False)]


_PACK = {b"deflate": zlib.compress, b"zstd": zstandard.compress, b"identity": bytes}


@pytest.mark.parametrize("level", [0, 9])
def test_a_compressed_body_inflates_to_a_hundred_times_its_size_at_most(level: int) -> None:
    """Level 0 does not compress at all."""
    text = b"x" * (FREE_INFLATED_BYTES + 1)
    data = post(b"/", zlib.compress(text, level), b"Content-Encoding: deflate")
    (fact,) = facts(read_all(reader(limit=4 * len(text)), [data]))
    assert fact == (b"/", b"" if level else text, 413 if level else None, True)
    free = post(b"/", zlib.compress(text[1:], 9), b"Content-Encoding: deflate")
    assert facts(read_all(reader(limit=4 * len(text)), [free])) == [(b"/", text[1:], None, True)]


@pytest.mark.parametrize("encoding", [b"deflate", b"zstd"])
def test_a_body_does_not_inflate_beyond_the_room_of_its_account(encoding: bytes) -> None:
    account, made = ByteAccount(200_000), []
    source = RequestReader(RequestHeadCache(lambda head: None), 1 << 30, account)
    take_up_to = Hold.take_up_to

    def note(hold: Hold, size: int) -> bool:
        made.append(size)
        return take_up_to(hold, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hold, "take_up_to", note)
        text = b"x" * FREE_INFLATED_BYTES
        data = post(b"/", _PACK[encoding](text), b"Content-Encoding: " + encoding)
        assert facts(read_all(source, [data])) == [(b"/", b"", 503, True)]
    assert account.used == 0
    assert max(made) <= account.limit_bytes + INFLATED_STEP_BYTES


def test_a_buffer_grows_with_what_arrives() -> None:
    account = ByteAccount(1 << 40)
    source = RequestReader(RequestHeadCache(lambda head: None), 1 << 30, account)
    feed(source, b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (1 << 30))
    arrived = 0
    while arrived < 3_000_000:
        assert source.next() is None
        assert account.used <= max(4 * arrived, FIRST_BUFFER_BYTES)
        feed(source, b"x" * 10_000)
        arrived += 10_000
    source.close()
    assert account.used == 0


class _Oracle:
    """What llhttp makes of a chunked body."""

    def __init__(self, data: bytes) -> None:
        self.body = b""
        self.complete = False
        self.bad = False
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + data)
        except httptools.HttpParserError:
            self.bad = True

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


CHUNKS = st.sampled_from(
    [
        b"3\r\nabc\r\n",
        b"0\r\n",
        b"\r\n",
        b"1;a=b\r\nz\r\n",
        b"t: v\r\n",
        b"A\r\n0123456789\r\n",
        b"2\r\n",
    ]
)


@given(st.lists(CHUNKS | st.binary(max_size=4), max_size=6).map(b"".join))
def test_chunks_are_read_no_more_leniently_than_by_llhttp(data: bytes) -> None:
    ours, left = ChunkedBody(LIMIT), bytearray(data)
    oracle = _Oracle(data)
    try:
        complete = ours.take(left)
    except BalancerError:
        return
    if complete:
        assert oracle.complete
        assert bytes(ours.body) == oracle.body or oracle.bad
    else:
        assert not oracle.complete


@pytest.mark.parametrize(
    "encoding",
    [b"gzip", b"x-gzip", b"GZIP", b"deflate", b"zstd", b"Zstd", b"identity", b"gzip, identity"],
)
def test_compressed_bodies_are_decoded(encoding: bytes) -> None:
    text = b"text " * 1000
    pack = _PACK.get(encoding.lower(), _gzip)
    body = pack(text)
    line = b"Content-Encoding: " + encoding
    for data in (post(b"/", body, line), post_chunked(b"/", body, lines=(line,))):
        assert facts(read_all(reader(), [data])) == [(b"/", text, None, True)]


def test_bare_deflate_is_decoded_too() -> None:
    packer = zlib.compressobj(wbits=-15)
    body = packer.compress(b"text " * 1000) + packer.flush()
    data = post(b"/", body, b"Content-Encoding: deflate")
    assert facts(read_all(reader(), [data])) == [(b"/", b"text " * 1000, None, True)]


def _frame_of_any_size(text: bytes) -> bytes:
    packer = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return packer.compress(text) + packer.flush()


_NOTES = b"\x5a\x2a\x4d\x18\x04\x00\x00\x00abcd"
_HALF = b"text " * 500


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        (b"gzip", _gzip(_HALF) * 2),
        (b"x-gzip", _gzip(_HALF) + _gzip(b"") + _gzip(_HALF)),
        (b"gzip", b"".join(_gzip(_HALF[at : at + 5] * 2) for at in range(0, 2500, 5))),
        (b"zstd", _frame_of_any_size(_HALF) + zstandard.compress(_HALF)),
        (b"zstd", _NOTES + zstandard.compress(_HALF) + _NOTES + _frame_of_any_size(_HALF) + _NOTES),
        (b"zstd", _frame_of_any_size(_HALF * 2)),
        (b"identity, zstd", zstandard.ZstdCompressor(write_checksum=True).compress(_HALF * 2)),
    ],
)
def test_several_members_and_frames_are_one_body(encoding: bytes, body: bytes, step: int) -> None:
    data = post(b"/a", body, b"Content-Encoding: " + encoding) + post(b"/b", b"")
    pieces = [data[at : at + step] for at in range(0, len(data), step)]
    assert facts(read_all(reader(), pieces)) == [
        (b"/a", _HALF * 2, None, True),
        (b"/b", b"", None, True),
    ]


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        (b"gzip", _gzip(b"x") + _gzip(b"x")[:-1], 400),
        (b"gzip", _gzip(b"") * 1001, 400),
        (b"gzip", b"".join([_gzip(b"x" * (LIMIT // 2 + 1))] * 2), 413),
        (b"deflate", zlib.compress(b"x") * 2, 400),
        (b"zstd", zstandard.compress(b"x") + _NOTES[:-1], 400),
        (b"zstd", _NOTES[:6], 400),
        (b"zstd", b"\x5a\x2a\x4d\x19\x04\x00\x00\x00abcd", 400),
        (b"zstd", zstandard.compress(b"") * 1001, 400),
        (b"gzip", _gzip(b"x" * (LIMIT + 1)), 413),
        (b"gzip", _gzip(b"x" * 1000)[:-9], 400),
        (b"gzip", _gzip(b"x") + b"more", 400),
        (b"gzip", b"no gzip", 400),
        (b"deflate", b"x\x9cno", 400),
        (b"br", b"x", 415),
        (b"gzip, gzip", b"x", 415),
        (b"br, identity", b"x", 415),
        (b"zstd", zstandard.compress(b"x" * (LIMIT + 1)), 413),
        (b"zstd", zstandard.compress(b"x" * 1000)[:-1], 400),
        (b"zstd", zstandard.compress(b"x") + b"more", 400),
        (b"zstd", b"no zstd at all, and long", 400),
        (b"zstd", b"x", 400),
        (b"zstd", zstandard.compress(b"x")[:5], 400),
    ],
)
def test_an_undecodable_body_is_rejected_and_the_next_request_is_read(
    encoding: bytes, body: bytes, status: int
) -> None:
    data = post(b"/a", body, b"Content-Encoding: " + encoding) + post(b"/b", b"")
    assert facts(read_all(reader(), [data])) == [
        (b"/a", b"", status, True),
        (b"/b", b"", None, True),
    ]


def test_100_continue_is_due_once() -> None:
    source = reader()
    feed(source, b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
    assert source.next() is None
    assert [source.wants_continue() for _ in range(2)] == [True, False]
    feed(source, b"body")
    request = source.next()
    assert request is not None
    assert request.body == b"body"


def test_the_body_of_a_rejected_request_that_expects_100_continue_is_not_read() -> None:
    source = reader()
    feed(source, b"POST /refused HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
    request = source.next()
    assert request is not None
    assert request.unread
    assert not source.wants_continue()
