"""The byte budget: what requests hold is counted, refused beyond it, and released when they end."""

from __future__ import annotations

import asyncio
import random
import zlib

import pytest

from scheduler.breaker import FAILURES
from sgl_ext.limits.bounds import BODY_GRACE_S, FIRST_BUFFER_BYTES, MIN_BODY_BYTES_PER_S
from tests.balancer.conftest import Connect, Serve
from tests.balancer.wire import Raw, answer, chunked, request, sse, until

CHAT = b"/v1/chat/completions"


def head(path: bytes, size: int, *lines: bytes) -> bytes:
    fixed = [b"POST %b HTTP/1.1" % path, b"content-type: application/json"]
    return b"\r\n".join([*fixed, *lines, b"content-length: %d" % size, b"", b""])


async def test_a_stated_length_takes_no_memory(serve: Serve, connect: Connect) -> None:
    balancer = await serve(Raw())
    for _ in range(8):
        wire = await connect(balancer)
        wire.writer.write(head(CHAT, 64 << 20))
    await until(lambda: balancer.account.used)
    assert balancer.account.used <= 8 * FIRST_BUFFER_BYTES


async def test_get_needs_no_body(serve: Serve, connect: Connect) -> None:
    wire = await connect(await serve(Raw()))
    sent = b"GET /health HTTP/1.1\r\ncontent-length: 67108864\r\n\r\n"
    status, body = await wire.ask(sent)
    assert status.startswith(b"HTTP/1.1 413")
    assert b"8192 bytes" in body


@pytest.mark.parametrize(
    ("path", "status"), [(CHAT, b"503 Service Unavailable"), (b"/v1/messages", b"529")]
)
async def test_a_body_beyond_the_budget_is_told_to_retry(
    serve: Serve, connect: Connect, path: bytes, status: bytes
) -> None:
    balancer = await serve(Raw([b""]), byte_budget=100_000, max_body_bytes=90_000)
    first, second = await connect(balancer), await connect(balancer)
    text = b'{"messages":[],"x":"%b"}' % (b"x" * 60_000)
    first.writer.write(request(text, path=CHAT))
    await until(lambda: balancer.account.used >= 60_000)
    answered, body = await second.ask(request(text, path=path))
    assert answered.startswith(b"HTTP/1.1 " + status)
    assert b"retry-after: 5" in answered
    assert b"retry later" in body
    # An inflated body counts as what it inflates to, and so does one in chunks.
    third, fourth = await connect(balancer), await connect(balancer)
    packed = zlib.compress(text)
    third.writer.write(head(path, len(packed), b"content-encoding: deflate") + packed)
    assert (await third.answer())[0].startswith(b"HTTP/1.1 " + status)
    lines = b"POST %b HTTP/1.1\r\ncontent-type: application/json\r\n" % path
    fourth.writer.write(lines + b"transfer-encoding: chunked\r\n\r\n" + chunked(text)[0])
    assert (await fourth.answer())[0].startswith(b"HTTP/1.1 " + status)
    first.writer.transport.abort()
    await until(lambda: not balancer.account.used)
    assert (await second.ask(request(b"{}", path=path)))[0].startswith(b"HTTP/1.1 200")


async def test_an_answer_is_counted_while_it_is_collected_or_unread(
    serve: Serve, connect: Connect
) -> None:
    size = 30 << 20
    worker = Raw([answer(b"x" * size)[:-9], b""])
    balancer = await serve(worker)
    wire = await connect(balancer)
    wire.writer.write(request(b"{}"))
    await until(lambda: balancer.account.used >= size - 9)
    worker.go_on(b"x" * 9)
    # The client has read nothing: what the sockets do not hold is still held here.
    (connection,) = balancer._connections
    await until(lambda: not connection.busy)
    assert balancer.account.used >= size // 2
    assert len((await wire.answer())[1]) == size
    await until(lambda: not balancer.account.used)


async def test_an_answer_larger_than_the_budget_is_given_up(serve: Serve, connect: Connect) -> None:
    worker = Raw(*[[answer(b"x" * 200_000)] for _ in range(FAILURES + 1)])
    balancer = await serve(worker, byte_budget=100_000)
    wire = await connect(balancer)
    for number in range(1, FAILURES + 2):
        answered, _ = await wire.ask(request(b"{}"))
        assert answered.startswith(b"HTTP/1.1 502")
        assert len(worker.requests) == number, "another engine's answer would be as large"
    assert balancer._services.workers.all[0].is_available, "it is no failure of the engine"


async def test_a_body_has_a_total_deadline(serve: Serve, connect: Connect) -> None:
    balancer = await serve(Raw())
    for task in balancer._tasks:
        task.cancel()
    begin = balancer.now
    wire = await connect(balancer)
    wire.writer.write(head(CHAT, 1000) + b"x")
    (connection,) = balancer._connections
    await until(lambda: connection._reader.in_body)
    for second in range(10, int(BODY_GRACE_S), 10):
        balancer.sweep(begin + second)
        wire.writer.write(b"x")
        await until(lambda n=second: connection._reader.arrived_bytes >= n // 10)
        assert connection.deadline <= begin + BODY_GRACE_S + 100 / MIN_BODY_BYTES_PER_S
    balancer.sweep(begin + BODY_GRACE_S + 1)
    assert (await wire.answer())[0].startswith(b"HTTP/1.1 408")
    await until(lambda: not balancer.account.used)


@pytest.mark.parametrize("seed", range(12))
async def test_the_account_is_empty_after_any_ends(
    serve: Serve, connect: Connect, seed: int
) -> None:
    """Requests of every kind end in every way: answered, refused, cut, left, timed out."""
    chance = random.Random(seed)
    long = b"x" * 100_000
    answers: list[list[bytes | None]] = [
        [answer(b"{}")],
        [answer(long)[:-5], None],
        [answer(long)],
        [*sse(b"data: 1\n\n", b"data: 2\n\n")],
        [*sse(b"data: 1\n\n", end=b""), None],
        [None],
        [b""],
    ]
    text = b'{"messages":[],"x":"%b"}' % long
    packed = zlib.compress(text)
    line = b"POST %b HTTP/1.1\r\ncontent-type: application/json\r\n" % CHAT
    requests = [
        request(text, path=CHAT),
        request(text, path=CHAT)[:-100],
        request(b"{}") * 3,
        request(b"no json"),
        head(CHAT, len(packed), b"content-encoding: deflate") + packed,
        head(CHAT, len(packed), b"content-encoding: deflate") + packed[:-40],
        head(CHAT, 500, b"content-encoding: gzip") + b"x" * 500,
        line + b"transfer-encoding: chunked\r\n\r\n" + b"".join(chunked(text)),
        line + b"transfer-encoding: chunked\r\n\r\n" + chunked(text)[0] + b"bad",
        b"GET /" + b"x" * 40_000,
        head(CHAT, 1 << 40),
    ]
    worker = Raw(*[list(chance.choice(answers)) for _ in range(60)])
    balancer = await serve(worker, byte_budget=400_000, max_body_bytes=200_000)
    for task in balancer._tasks:
        task.cancel()
    now = balancer.now
    wires = []
    for _ in range(30):
        wire = await connect(balancer)
        wires.append(wire)
        wire.writer.write(chance.choice(requests))
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)
        if chance.random() < 0.5:
            chance.choice(wires).writer.transport.abort()
        if chance.random() < 0.1:
            now += 40
            balancer.sweep(now)
    for wire in wires:
        wire.writer.transport.abort()
    await until(lambda: not balancer._connections)
    balancer.services.resends.close()  # no client sends its request again
    assert balancer.account.used == 0
    assert balancer.account.by_tenant == {}
