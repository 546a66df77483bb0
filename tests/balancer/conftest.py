"""A balancer in this process in front of scripted engines, for what real engines do too rarely."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uvloop
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from sgl_ext.balancer.server import Balancer
from sgl_ext.config import BalancerConfig


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], uvloop.Loop]]:
    """The loop that the balancer runs on; its transports differ in detail from asyncio's own."""
    return {"uvloop": uvloop.new_event_loop}


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Engine:
    """An HTTP server that answers as its test says, and keeps what it was sent."""

    def __init__(self, name: str, answer: Answer | None = None) -> None:
        self.name = name
        self.seen: list[tuple[str, bytes, Any]] = []
        self.server: TestServer | None = None
        self._answer = answer

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/ready":
            return web.Response()
        self.seen.append((request.path_qs, await request.read(), request.headers))
        if self._answer is None:
            return web.json_response({"engine": self.name})
        return await self._answer(request)


Start = Callable[..., Awaitable[ClientSession]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts engines and a balancer over them; returns a client of the balancer."""
    async with AsyncExitStack() as stack:

        async def begin(*engines: Engine, **config: Any) -> ClientSession:
            urls = []
            for engine in engines:
                app = web.Application(client_max_size=1 << 30)
                app.router.add_route("*", "/{path:.*}", engine.handle)
                engine.server = server = TestServer(app, handler_cancellation=True)
                await stack.enter_async_context(server)
                urls.append(str(server.make_url("")).rstrip("/"))
            balancer = Balancer(BalancerConfig(workers=tuple(urls), port=0, drain_s=0, **config))
            await balancer.start()
            stack.push_async_callback(balancer.stop)
            url = f"http://127.0.0.1:{balancer.port}"
            return await stack.enter_async_context(ClientSession(url))

        yield begin
