"""A client connection on the wire: framing, order, limits, and its end."""

from __future__ import annotations

import asyncio
import gzip
import socket

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ext.balancer.http.downstream import DownstreamConnection
from sgl_ext.balancer.server import Balancer
from sgl_ext.limits.bounds import BODY_GRACE_S, HEAD_S, IDLE_S, LINGER_S
from tests.balancer.conftest import Connect, Serve
from tests.balancer.wire import PATH, Raw, answer, connected, request, running, sse, until
from tests.waiting import HANG_S


async def test_a_connection_serves_one_request_after_the_other(
    serve: Serve, connect: Connect
) -> None:
    worker = Raw()
    wire = await connect(await serve(worker))
    for _ in range(3):
        head, body = await wire.ask(request())
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"connection:" not in head
        assert body == b"{}"
    assert worker.connections == 1


async def test_requests_sent_ahead_are_answered_in_order(serve: Serve, connect: Connect) -> None:
    worker = Raw(*([answer(b"[%d]" % number)] for number in range(5)))
    wire = await connect(await serve(worker))
    wire.writer.write(b"".join(request(b"[%d]" % number) for number in range(5)))
    for number in range(5):
        assert (await wire.answer())[1] == b"[%d]" % number
    assert [sent.rpartition(b"\r\n")[2] for sent in worker.requests] == [
        b"[%d]" % number for number in range(5)
    ]


async def test_a_flood_sent_ahead_is_answered_in_order(serve: Serve, connect: Connect) -> None:
    wire = await connect(await serve(Raw()))
    count = 3000
    wire.writer.write(b"GET /none HTTP/1.1\r\n\r\n" + request(b"{") * count)
    assert (await wire.answer())[0].startswith(b"HTTP/1.1 404")
    for _ in range(count):
        assert (await wire.answer())[0].startswith(b"HTTP/1.1 400")
    assert (await wire.ask(request()))[0].startswith(b"HTTP/1.1 200")


async def test_both_planes_are_on_one_connection(serve: Serve, connect: Connect) -> None:
    wire = await connect(await serve(Raw()))
    for _ in range(2):
        assert (await wire.ask(request()))[1] == b"{}"
        head, body = await wire.ask(b"GET /health HTTP/1.1\r\n\r\n")
        assert b'"ok"' in body
        wire.writer.write(b"HEAD /health HTTP/1.1\r\n\r\n")
        head = await wire.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")


async def test_a_streams_head_is_sent_with_its_first_events(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[bytes] = []
    write = DownstreamConnection.write

    def written(connection: DownstreamConnection, data: bytes) -> None:
        parts.append(data)
        write(connection, data)

    monkeypatch.setattr(DownstreamConnection, "write", written)
    worker = Raw(sse(b"data: 1\n\n", end=b""))
    wire = await connect(await serve(worker))
    wire.writer.write(request())
    assert (await wire.reader.readuntil(b"data: 1\n\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
    worker.go_on(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")
    assert await wire.reader.readuntil(b"0\r\n\r\n") == b"9\r\ndata: 2\n\n\r\n0\r\n\r\n"
    assert parts == [b"data: 2\n\n"]


async def test_http_1_0_is_answered_and_closed(serve: Serve, connect: Connect) -> None:
    wire = await connect(await serve(Raw()))
    wire.writer.write(request(version=b"HTTP/1.0"))
    head, body = await wire.answer()
    assert b"connection: close\r\n" in head
    assert body == b"{}"
    assert await wire.rest() == b""


async def test_http_1_0_may_keep_a_connection(serve: Serve, connect: Connect) -> None:
    wire = await connect(await serve(Raw()))
    for _ in range(2):
        head, _ = await wire.ask(request(b"{}", b"connection: keep-alive", version=b"HTTP/1.0"))
        assert b"connection: keep-alive\r\n" in head


async def test_a_stream_to_http_1_0_ends_with_the_connection(
    serve: Serve, connect: Connect
) -> None:
    wire = await connect(await serve(Raw(sse(b"data: 1\n\n"))))
    wire.writer.write(request(b"{}", b"connection: keep-alive", version=b"HTTP/1.0"))
    head, _, body = (await wire.rest()).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert body == b"data: 1\n\n"


async def test_connection_close_is_obeyed(serve: Serve, connect: Connect) -> None:
    wire = await connect(await serve(Raw()))
    head, _ = await wire.ask(request(b"{}", b"Connection: close"))
    assert b"connection: close\r\n" in head
    assert await wire.rest() == b""


async def test_a_client_that_expects_it_gets_100_continue(serve: Serve, connect: Connect) -> None:
    wire = await connect(await serve(Raw()))
    head, _, body = request(b"[1]", b"Expect: 100-continue").partition(b"\r\n\r\n")
    wire.writer.write(head + b"\r\n\r\n")
    interim = await wire.reader.readuntil(b"\r\n\r\n")
    assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert (await wire.ask(body))[1] == b"{}"


async def test_a_chunked_and_a_compressed_body_reach_the_worker_plain(
    serve: Serve, connect: Connect
) -> None:
    worker = Raw()
    wire = await connect(await serve(worker))
    packed = gzip.compress(b'{"a": 1}')
    head = (
        b"POST %b HTTP/1.1\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\n" % PATH
    )
    await wire.ask(
        head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(packed), packed)
    )
    (sent,) = worker.requests
    assert sent.endswith(b'content-length: 8\r\n\r\n{"a": 1}')
    assert b"encoding" not in sent


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\na: " + b"x" * 70_000, b"431"),
        (request(b"{}", b"transfer-encoding: chunked"), b"400"),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (b"POST / HTTP/1.1\r\ncontent-length: 99000000000\r\n\r\n", b"413"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"400"),
    ],
)
async def test_malformed_bytes_are_answered_and_end_the_connection(
    serve: Serve, connect: Connect, data: bytes, status: bytes
) -> None:
    balancer = await serve(Raw())
    wire, other = await connect(balancer), await connect(balancer)
    head, body = await wire.ask(data + b"GET /health HTTP/1.1\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert b"connection: close\r\n" in head
    assert b'"error"' in body
    assert await wire.rest() == b""
    assert (await other.ask(request()))[1] == b"{}"


async def test_a_rejection_reaches_a_client_that_is_still_sending(
    serve: Serve, connect: Connect
) -> None:
    wire = await connect(await serve(Raw(), max_body_bytes=100))
    size = 4_000_000
    wire.writer.write(b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (PATH, size))
    for _ in range(size // 100_000):
        wire.writer.write(b"x" * 100_000)
        await wire.writer.drain()
    assert (await wire.answer())[0].startswith(b"HTTP/1.1 415")


async def test_a_rejected_body_is_skipped_and_the_connection_continues(
    serve: Serve, connect: Connect
) -> None:
    wire = await connect(await serve(Raw(), max_body_bytes=100))
    assert (await wire.ask(request(b"x" * 5000)))[0].startswith(b"HTTP/1.1 413")
    assert (await wire.ask(request()))[0].startswith(b"HTTP/1.1 200")


@given(st.lists(st.binary(max_size=40), max_size=4))
@settings(max_examples=40)
def test_garbage_never_harms_another_connection(parts: list[bytes]) -> None:
    async def run() -> None:
        async with running(Raw()) as balancer, connected(balancer) as good:
            async with connected(balancer) as bad:
                for part in parts:
                    bad.writer.write(part)
                    assert (await good.ask(request()))[1] == b"{}"
            assert (await good.ask(request()))[1] == b"{}"

    uvloop.run(run())


def stop_clock(balancer: Balancer) -> None:
    """From now on the balancer's time is what the test says in `sweep`."""
    for task in balancer._tasks:
        task.cancel()


async def test_a_client_that_is_idle_or_slow_is_timed_out(serve: Serve, connect: Connect) -> None:
    balancer = await serve(Raw())
    stop_clock(balancer)
    idle, head, body = [await connect(balancer) for _ in range(3)]
    head.writer.write(b"GET / HT")
    body.writer.write(request(b"{}")[:-1])
    now = balancer.now
    due = [now + HEAD_S, now + BODY_GRACE_S, now + IDLE_S]
    await until(lambda: sorted(c.deadline for c in balancer._connections) == due)
    balancer.sweep(now + HEAD_S + 0.1)
    assert (await head.answer())[0].startswith(b"HTTP/1.1 408")
    balancer.sweep(now + BODY_GRACE_S + 0.1)
    assert (await body.answer())[0].startswith(b"HTTP/1.1 408")
    balancer.sweep(now + IDLE_S + 0.1)
    assert await idle.rest() == b""


async def test_bytes_that_trickle_do_not_prolong_a_head(serve: Serve, connect: Connect) -> None:
    balancer = await serve(Raw())
    stop_clock(balancer)
    wire = await connect(balancer)
    (connection,) = balancer._connections
    wire.writer.write(b"GET")
    await until(lambda: connection.deadline == balancer.now + HEAD_S)
    due = connection.deadline
    balancer.sweep(balancer.now + 5)
    wire.writer.write(b" / HTTP")
    await until(lambda: len(connection._reader.ahead) > 3)
    assert connection.deadline == due


async def test_every_head_has_its_own_deadline(serve: Serve, connect: Connect) -> None:
    balancer = await serve(Raw())
    stop_clock(balancer)
    wire = await connect(balancer)
    (connection,) = balancer._connections
    for _ in range(2):
        balancer.sweep(balancer.now + 1)
        wire.writer.write(request()[:9])
        await until(lambda: connection.deadline == balancer.now + HEAD_S)
        assert (await wire.ask(request()[9:]))[1] == b"{}"
        assert connection.deadline == balancer.now + IDLE_S


async def test_pipelined_bytes_are_bounded(serve: Serve, connect: Connect) -> None:
    worker = Raw([b""])
    balancer = await serve(worker)
    wire = await connect(balancer)
    (connection,) = balancer._connections
    wire.writer.write(request() * 200_000)
    await until(lambda: connection._reading_paused)
    assert len(connection._reader.ahead) < 200_000


async def test_a_lingering_close_ends(serve: Serve, connect: Connect) -> None:
    balancer = await serve(Raw())
    wire = await connect(balancer)
    await wire.ask(b"nonsense\r\n\r\n")
    wire.writer.write(b"more")
    balancer.sweep(balancer.now + LINGER_S + 0.1)
    await until(lambda: not balancer._connections)


async def test_a_slow_reader_does_not_fill_the_memory(serve: Serve, connect: Connect) -> None:
    events = 1000
    worker = Raw(sse(*[b"data: " + b"x" * 10_000 + b"\n\n"] * events))
    balancer = await serve(worker)
    wire = await connect(balancer)
    wire.writer.write(request())
    await until(lambda: any(c.paused for c in balancer._connections))
    (connection,) = balancer._connections
    held = 0
    for _ in range(200):
        await asyncio.sleep(0)
        held = max(held, connection._transport.get_write_buffer_size())
    assert held < 1_000_000
    assert (await wire.stream())[1].count(b"data: ") == events


async def test_a_disconnected_client_closes_the_workers_connection(
    serve: Serve, connect: Connect
) -> None:
    worker = Raw(sse(b"data: 1\n\n", end=b""))
    balancer = await serve(worker)
    wire = await connect(balancer)
    wire.writer.write(request())
    await wire.reader.readuntil(b"data: 1\n\n")
    wire.writer.close()
    await asyncio.wait_for(worker.closed.wait(), HANG_S)
    assert balancer._services.workers.all[0].in_flight == 0


async def test_a_client_that_disconnects_before_an_answer_closes_it_too(
    serve: Serve, connect: Connect
) -> None:
    worker = Raw([b""])
    balancer = await serve(worker)
    wire = await connect(balancer)
    wire.writer.write(request())
    await until(lambda: bool(worker.requests))
    wire.writer.transport.abort()
    await asyncio.wait_for(worker.closed.wait(), HANG_S)


@pytest.mark.parametrize("sent", [len(request()), 40])
async def test_a_client_that_closes_its_half_is_disconnected(
    serve: Serve, connect: Connect, sent: int
) -> None:
    balancer = await serve(Raw([b""]))
    wire = await connect(balancer)
    wire.writer.write(request()[:sent])
    await until(lambda: balancer._connections)
    wire.writer.write_eof()
    await until(lambda: not balancer._connections)
    assert await wire.rest() == b""


async def test_both_sides_send_small_packets_at_once(serve: Serve, connect: Connect) -> None:
    balancer = await serve(Raw())
    wire = await connect(balancer)
    await wire.ask(request())
    (connection,) = balancer._connections
    (pool,) = balancer._services.connections._pools.values()
    for transport in (connection._transport, next(iter(pool.connections))._transport):
        option = transport.get_extra_info("socket").getsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY
        )
        assert option


async def test_a_slow_reader_does_not_slow_the_next(serve: Serve, connect: Connect) -> None:
    big = sse(b"data: " + b"x" * 30_000_000 + b"\n\n")
    worker = Raw([b"".join(big)])
    balancer = await serve(worker)
    wire, next_one = await connect(balancer), await connect(balancer)
    wire.writer.write(request())
    await until(lambda: not any(c.busy for c in balancer._connections) and worker.requests)
    assert any(c.paused for c in balancer._connections)
    assert (await next_one.ask(request()))[1] == b"{}"
    assert worker.connections == 1


async def test_a_stream_that_ends_while_the_balancer_does_closes(
    serve: Serve, connect: Connect
) -> None:
    worker = Raw(sse(b"data: 1\n\n", end=b""))
    balancer = await serve(worker, drain_s=1000)
    wire = await connect(balancer)
    wire.writer.write(request())
    await wire.reader.readuntil(b"data: 1\n\n")
    stopping = asyncio.create_task(balancer.stop())
    await until(lambda: balancer.draining)
    worker.go_on(b"0\r\n\r\n")
    assert (await asyncio.wait_for(wire.rest(), HANG_S)).endswith(b"0\r\n\r\n")
    await asyncio.wait_for(stopping, HANG_S)


async def test_a_running_request_ends_before_the_balancer_does(
    serve: Serve, connect: Connect
) -> None:
    go_on = asyncio.Event()

    class Slow(Raw):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                self.requests.append(head)
                await go_on.wait()
            writer.write(self.GOOD)
            writer.close()

    worker = Slow()
    balancer = await serve(worker, drain_s=10)
    busy, idle = await connect(balancer), await connect(balancer)
    busy.writer.write(request())
    await until(lambda: bool(worker.requests))
    stopping = asyncio.create_task(balancer.stop())
    await until(lambda: balancer.draining)
    go_on.set()
    head, body = await busy.answer()
    assert b"connection: close\r\n" in head
    assert body == b"{}"
    assert await idle.rest() == b""
    await asyncio.wait_for(stopping, HANG_S)


@pytest.mark.parametrize("pieces", [1, 1000])
async def test_http2_is_refused_in_its_own_frames(
    serve: Serve, connect: Connect, pieces: int
) -> None:
    worker = Raw()
    wire = await connect(await serve(worker))
    settings_frame = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x64"
    head_frame = b"\x00\x00\x01\x01\x05\x00\x00\x00\x01\x82"
    sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings_frame + head_frame
    for piece in [sent] if pieces == 1 else [sent[i : i + 1] for i in range(len(sent))]:
        wire.writer.write(piece)
        await wire.writer.drain()
    answered = await wire.reader.read()
    frames = []
    while answered:
        size = int.from_bytes(answered[:3])
        frames.append((answered[3], answered[5:9][-1], answered[9 : 9 + size]))
        answered = answered[9 + size :]
    (settings_, head, body, goaway) = frames
    assert (settings_[0], head[:2], body[:2], goaway[0]) == (4, (1, 1), (0, 1), 7)
    assert head[2].startswith(b"\x08\x03505"), ":status: 505"
    assert b"use HTTP/1.1" in body[2]
    assert goaway[2][:8] == b"\x00\x00\x00\x01\x00\x00\x00\x0d", "HTTP_1_1_REQUIRED"
    assert not worker.requests


async def test_an_http2_client_that_asks_nothing_is_not_awaited_forever(
    serve: Serve, connect: Connect
) -> None:
    wire = await connect(await serve(Raw()))
    ping = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + bytes(8)
    wire.writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + ping * 10_000)
    assert b"use HTTP/1.1" in await wire.reader.read()
