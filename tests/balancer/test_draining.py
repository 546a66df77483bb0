"""A balancer that drains: it still listens, rejects new requests, and lets running ones end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest

from sgl_ext.balancer.server import Balancer
from tests.balancer.conftest import Connect, Serve
from tests.balancer.wire import Raw, Wire, request, sse, until
from tests.waiting import HANG_S

EVENT = b'data: {"n": 1}\n\n'


@asynccontextmanager
async def draining(balancer: Balancer) -> AsyncIterator[None]:
    """Stops the balancer, which a running request keeps from ending until the block has ended."""
    stopping = asyncio.create_task(balancer.stop())
    await until(lambda: balancer.draining)
    yield
    async with asyncio.timeout(HANG_S):
        await stopping


async def begin_stream(balancer: Balancer, connect: Connect) -> Wire:
    wire = await connect(balancer)
    wire.writer.write(request())
    await wire.reader.readuntil(EVENT)
    return wire


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        (b"/v1/messages", b"529", "overloaded_error"),
        (b"/v1/chat/completions", b"503", "server_error"),
        (b"/v1/responses", b"503", "server_error"),
    ],
)
async def test_new_requests_are_rejected_in_their_protocol_and_running_ones_end(
    serve: Serve, connect: Connect, path: bytes, status: bytes, kind: str
) -> None:
    worker = Raw(sse(EVENT, end=b""))
    balancer = await serve(worker, drain_s=60)
    kept = await connect(balancer)
    await kept.ask(b"GET / HTTP/1.1\r\n\r\n")
    running = await begin_stream(balancer, connect)
    async with draining(balancer):
        for wire in (kept, await connect(balancer)):
            head, body = await wire.ask(request(path=path))
            assert head.startswith(b"HTTP/1.1 " + status)
            assert b"\r\nretry-after: 5\r\n" in head
            assert b"\r\nconnection: close\r\n" in head
            error = orjson.loads(body)["error"]
            assert (error["type"], error["message"]) == (kind, "The server is shutting down.")
            assert await wire.rest() == b""
        for probed, expected in ((b"/health", b"503"), (b"/metrics", b"200")):
            wire = await connect(balancer)
            head, body = await wire.ask(b"GET " + probed + b" HTTP/1.1\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 " + expected)
            assert probed != b"/health" or orjson.loads(body)["status"] == "draining"
        worker.go_on(b"%x\r\n%b\r\n0\r\n\r\n" % (len(EVENT), EVENT))
        assert EVENT in await running.rest()
    assert not balancer._server.is_serving()


async def test_an_idle_balancer_still_listens_so_that_a_load_balancer_sees_that_it_drains(
    serve: Serve, connect: Connect
) -> None:
    balancer = await serve(Raw(), drain_s=600, drain_min_s=600)
    kept = await connect(balancer)
    await kept.ask(request())
    async with draining(balancer):
        for wire in (kept, await connect(balancer)):
            head, body = await wire.ask(b"GET /ready HTTP/1.1\r\n\r\n")
            assert (head[:12], body) == (b"HTTP/1.1 503", b"draining\n")
        assert balancer._server.is_serving()
        balancer.hurry()
    assert not balancer._server.is_serving()


async def test_a_balancer_listens_no_longer_than_it_drains(serve: Serve, connect: Connect) -> None:
    balancer = await serve(Raw(), drain_s=0, drain_min_s=600)
    async with draining(balancer):
        pass
    assert not balancer._server.is_serving()


async def test_a_balancer_that_has_to_hurry_ends_what_runs_with_an_error(
    serve: Serve, connect: Connect
) -> None:
    balancer = await serve(Raw(sse(EVENT, end=b""), [b""]), drain_s=600)
    stream = await begin_stream(balancer, connect)
    waiting = await connect(balancer)
    waiting.writer.write(request())
    await until(lambda: balancer._services.workers.all[0].in_flight == 2)
    async with draining(balancer):
        balancer.hurry()
        told = await stream.rest()
        assert b"event: error" in told
        assert b"The server is shutting down." in told
        assert told.endswith(b"0\r\n\r\n")
        assert (await waiting.answer())[0].startswith(b"HTTP/1.1 529")


async def test_idle_connections_do_not_keep_a_balancer_from_ending(
    serve: Serve, connect: Connect
) -> None:
    balancer = await serve(Raw(), drain_s=600)
    idle = await connect(balancer)
    await idle.ask(request())
    async with draining(balancer):
        assert await idle.rest() == b""
