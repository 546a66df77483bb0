"""A worker connection on the wire: which responses are accepted, retried and rejected."""

from __future__ import annotations

import asyncio
import itertools

import orjson
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import suspects
from tests.balancer.conftest import Connect, Serve
from tests.balancer.wire import Raw, answer, chunked, connected, request, running, sse, until

JSON = b"content-type: application/json\r\n"


async def test_an_answer_is_passed_on_unchanged(serve: Serve, connect: Connect) -> None:
    head = b"HTTP/1.1 418 Teapot\r\nX-A: 1\r\nx-a: 2\r\nKeep-Alive: 5\r\nTrailer: x-t\r\n"
    worker = Raw([head + b"content-length: 3\r\n\r\nabc"])
    head, body = await (await connect(await serve(worker))).ask(request())
    lines = head.split(b"\r\n")
    assert lines[:3] == [b"HTTP/1.1 418 Teapot", b"x-a: 1", b"x-a: 2"]
    assert b"content-length: 3" in lines
    assert not {b"keep-alive: 5", b"trailer: x-t"} & set(lines)
    assert body == b"abc"


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", *chunked(b"ab", b"c")],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx-t: 1\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\n\r\n", b"ab", b"c", None],
        [b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\nabc"],
        [b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 3\r\n\r\nabc", None],
        [b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"],
        [
            b"HTTP/1.1 103 Hints\r\nlink: x\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc",
        ],
        [b"HTTP/1.1 200\r\ncontent-length: 3\r\n\r\nabc"],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabcHTTP/1.1 200 OK\r\n\r\n"],
    ],
)
async def test_every_framing_of_an_answer_is_understood(
    serve: Serve, connect: Connect, pieces: list[bytes | None]
) -> None:
    wire = await connect(await serve(Raw(pieces)))
    head, body = await wire.ask(request())
    assert head.startswith(b"HTTP/1.1 200")
    assert b"link" not in head
    assert b"x-t" not in head
    assert body == b"abc"
    assert (await wire.ask(request()))[1] == b"{}"


async def test_an_answer_without_a_body_has_no_length(serve: Serve, connect: Connect) -> None:
    wire = await connect(await serve(Raw([b"HTTP/1.1 204 Nothing\r\n\r\n"])))
    wire.writer.write(request())
    head = await wire.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 204")
    assert b"content-length" not in head
    assert (await wire.ask(request()))[1] == b"{}"


@pytest.mark.parametrize("status", [b"204 Nothing", b"304 Same"])
@pytest.mark.parametrize("framing", [b"content-length: 0\r\n", b"transfer-encoding: chunked\r\n"])
async def test_a_stream_without_a_body_is_only_a_head(
    serve: Serve, connect: Connect, status: bytes, framing: bytes
) -> None:
    head = b"HTTP/1.1 %b\r\ncontent-type: text/event-stream\r\n%b\r\n" % (status, framing)
    wire = await connect(await serve(Raw([head])))
    wire.writer.write(request())
    head = await wire.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert b"transfer-encoding" not in head
    assert (await wire.ask(request()))[0].startswith(b"HTTP/1.1 200")


async def test_a_reason_in_two_parts_is_passed_on_whole(serve: Serve, connect: Connect) -> None:
    worker = Raw([b"HTTP/1.1 418 Tea", b"pot\r\ncontent-length: 0\r\n\r\n"])
    assert (await (await connect(await serve(worker))).ask(request()))[0].startswith(
        b"HTTP/1.1 418 Teapot\r\n"
    )


async def test_a_connection_with_bytes_after_an_answer_is_not_used_again(
    serve: Serve, connect: Connect
) -> None:
    worker = Raw([b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTT"])
    wire = await connect(await serve(worker))
    for _ in range(2):
        assert (await wire.ask(request()))[1] == b"{}"
    assert (worker.connections, len(worker.requests)) == (2, 2)


MALFORMED = [
    [b"nonsense\r\n\r\n"],
    [b"HTTP/1.1 abc\r\n\r\n"],
    [b"HTTP/1.1 099 Low\r\ncontent-length: 0\r\n\r\n"],
    [b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nraw"],
    [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc"],
    [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\nabc"],
    [b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nabc", None],
    [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n",
        b"0\r\n\r\n",
    ],
    [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\ncontent-length: 3\r\n\r\n"],
    [b"HTTP/1.1 200 O\x00K\r\ncontent-length: 0\r\n\r\n"],
    [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"],
    [b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc", None],
    [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", None],
    [b"HTTP/1.1 200 OK\r\na: " + b"x" * 300_000],
    [b"HTTP/1.1 200 OK\r\ncontent-le", None],
    [None],
]


@pytest.mark.parametrize("pieces", MALFORMED, ids=range(len(MALFORMED)))
async def test_a_broken_answer_is_retried_and_never_passed_on(
    serve: Serve,
    connect: Connect,
    pieces: list[bytes | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suspects, "SUSPECT_S", 3600.0)  # on a slow machine an answer takes a while
    workers = [Raw(pieces, pieces), Raw(pieces, pieces)]
    wire = await connect(await serve(*workers))
    assert (await wire.ask(request()))[0].startswith(b"HTTP/1.1 502")
    assert sorted(len(worker.requests) for worker in workers) == [1, 1]


@pytest.mark.parametrize("end", [b"zz\r\n", b"5\r\nabc", b"", b"HTTP/1.1 200 OK\r\n\r\n"])
async def test_a_stream_that_breaks_ends_in_an_error_event(
    serve: Serve, connect: Connect, end: bytes
) -> None:
    broken = sse(b"data: 1\n\n", b"data: brok", end=end)
    wire = await connect(await serve(Raw([*broken, None])))
    wire.writer.write(request())
    _, body = await wire.stream()
    events = body.split(b"\n\n")
    assert events[0] == b"data: 1"
    assert events[1].startswith(b"event: error\ndata: ")
    assert orjson.loads(events[1].partition(b"data: ")[2])["type"] == "error"
    assert events[2:] == [b""]


async def test_an_idle_connection_that_the_worker_closes_is_not_its_fault(
    serve: Serve, connect: Connect
) -> None:
    worker = Raw(answer_twice(b"1"), [None], answer_twice(b"2"))
    balancer = await serve(worker)
    wire = await connect(balancer)
    assert (await wire.ask(request()))[1] == b"1"
    assert (await wire.ask(request()))[1] == b"2"
    assert worker.connections == 2
    assert b"sgl_ext_retries_total 0.0" in balancer._services.metrics.render()


def answer_twice(body: bytes) -> list[bytes | None]:
    return [answer(body)]


async def test_a_new_connection_that_the_worker_closes_is_its_fault(
    serve: Serve, connect: Connect
) -> None:
    worker = Raw([None], [None], [None])
    wire = await connect(await serve(worker))
    assert (await wire.ask(request()))[0].startswith(b"HTTP/1.1 502")


async def test_an_idle_connection_is_closed_after_a_while(serve: Serve, connect: Connect) -> None:
    worker = Raw()
    balancer = await serve(worker)
    wire = await connect(balancer)
    await wire.ask(request())
    (pool,) = balancer._services.connections._pools.values()
    assert len(pool.connections) == 1
    for _ in range(4):
        assert pool._idle
        pool.sweep()
    assert not pool._idle
    await wire.ask(request())
    assert worker.connections == 2


async def test_bytes_without_a_request_end_the_connection(serve: Serve, connect: Connect) -> None:
    worker = Raw([answer(b"1"), answer(b"unasked")])
    wire = await connect(await serve(worker))
    assert (await wire.ask(request()))[1] == b"1"
    assert (await wire.ask(request()))[1] == b"{}"
    assert worker.connections == 2


async def test_an_answer_before_the_whole_request_ends_the_connection(
    serve: Serve, connect: Connect
) -> None:
    class Early(Raw):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                self.connections += 1
                writer.write(b"HTTP/1.1 413 Large\r\ncontent-length: 0\r\n\r\n")
                await self.closed.wait()
            else:
                writer.write(self.GOOD)
            writer.close()

    worker = Early()
    wire = await connect(await serve(worker))
    body = b'"' + b"x" * 20_000_000 + b'"'
    for number in (1, 2):
        assert (await wire.ask(request(body)))[0].startswith(b"HTTP/1.1 413")
        assert worker.connections == number
    worker.closed.set()


EVENTS = b"".join(b'data: {"n": %d}\n\n' % number for number in range(5))
ANSWERS = [
    b"".join(sse(*[event + b"\n\n" for event in EVENTS.split(b"\n\n")[:-1]])),
    b"".join(sse(EVENTS[:20], EVENTS[20:21], EVENTS[21:])),
    b"HTTP/1.1 200 OK\r\n" + JSON + b"content-length: %d\r\n\r\n" % len(EVENTS) + EVENTS,
]


@given(
    st.lists(
        st.tuples(st.sampled_from(ANSWERS), st.lists(st.integers(0, 400), max_size=8)),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=40)
def test_any_split_of_an_answer_is_the_same_answer(
    answers: list[tuple[bytes, list[int]]],
) -> None:
    def split(data: bytes, cuts: list[int]) -> list[bytes | None]:
        edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        return [data[a:b] for a, b in itertools.pairwise(edges)]

    async def run() -> None:
        worker = Raw(*(split(*each) for each in answers))
        async with running(worker) as balancer, connected(balancer) as wire:
            for data, _ in answers:
                wire.writer.write(request())
                whole = b"chunked" not in data
                _, body = await (wire.answer() if whole else wire.stream())
                assert body == EVENTS
        assert worker.connections == 1

    uvloop.run(run())


@given(st.lists(st.binary(max_size=30), max_size=5), st.booleans())
@settings(max_examples=50)
def test_any_bytes_from_a_worker_are_an_answer_or_an_error(
    pieces: list[bytes], begun: bool
) -> None:
    start = [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"] if begun else []

    async def run() -> None:
        script: list[bytes | None] = [*start, *pieces, None]
        worker = Raw(script, script)
        async with running(worker, interval_s=0.01) as balancer, connected(balancer) as wire:
            head, _ = await wire.ask(request())
            assert head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 502"))
            assert (await wire.ask(request(b"[]")))[0].startswith(b"HTTP/1.1 ")

    # Most of them make the request a suspect, which waits for its trial.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suspects, "SETTLE_S", 0.0)
        uvloop.run(run())


async def test_events_are_passed_on_at_once(serve: Serve, connect: Connect) -> None:
    """Each event is with the client before the worker makes the next."""
    go_on = asyncio.Event()

    class Stepwise(Raw):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
                for piece in sse(b"data: 1\n\n", b"data: 2\n\n"):
                    writer.write(piece)
                    if b"data" in piece:
                        go_on.clear()
                        await go_on.wait()
            else:
                writer.write(self.GOOD)
            writer.close()

    wire = await connect(await serve(Stepwise()))
    wire.writer.write(request())
    for number in (b"1", b"2"):
        assert (await wire.reader.readuntil(b"\n\n")).endswith(b"data: " + number + b"\n\n")
        go_on.set()
    assert await wire.reader.readuntil(b"0\r\n\r\n")


async def test_each_stream_has_its_own_date(serve: Serve, connect: Connect) -> None:
    head = b"HTTP/1.1 200 OK\r\nDate: %d\r\nx-a: %b\r\ntransfer-encoding: chunked\r\n\r\n"
    others = (b"1", b"1", b"2")
    answers = [[head % each, *chunked(b"ab")] for each in enumerate(others)]
    wire = await connect(await serve(Raw(*answers)))
    for number, other in enumerate(others):
        got, body = await wire.ask(request())
        assert got.count(b"date: %d\r\n" % number) == got.count(b"date:") == 1
        assert b"x-a: %b\r\n" % other in got
        assert body == b"ab"


async def test_an_exchange_leaves_no_references(serve: Serve, connect: Connect) -> None:
    worker = Raw(sse(b"data: 1\n\n"), [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", None])
    balancer = await serve(worker)
    wire = await connect(balancer)
    wire.writer.write(request())
    await wire.stream()
    assert (await wire.ask(request()))[0].startswith(b"HTTP/1.1 ")
    wire.writer.close()
    await until(lambda: not balancer._connections)
    assert [w.in_flight for w in balancer._services.workers.all] == [0]
