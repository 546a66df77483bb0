"""A balancer in this process in front of scripted engines, for rare cases of real engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uvloop
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from sgl_ext.balancer.server import Balancer
from sgl_ext.settings.schema import BalancerSettings
from tests.balancer.wire import AT_ONCE, Raw, Wire, connected, running


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], uvloop.Loop]]:
    """The loop that the balancer runs on; its transports differ in detail from asyncio's own."""
    return {"uvloop": uvloop.new_event_loop}


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Engine:
    """An HTTP server that answers as its test says, and keeps what it was sent."""

    def __init__(
        self,
        name: str,
        answer: Answer | None = None,
        model: str = "",
        adapters: tuple[str, ...] = (),
    ) -> None:
        """model: the one that it states; "": it states none. adapters: those that are loaded."""
        self.name = name
        self.model = model
        self.adapters = adapters
        self.seen: list[tuple[str, bytes, Any]] = []
        self.server: TestServer | None = None
        self.events: list[asyncio.Queue[bytes]] = []
        self._told = 0
        self.answer = answer

    @property
    def url(self) -> str:
        assert self.server is not None
        return str(self.server.make_url("")).rstrip("/")

    async def _tell(self, request: web.Request) -> web.StreamResponse:
        """Its prefix events: what its test puts into `events`, a queue a connection."""
        if not self.events:
            return web.Response(status=404)
        lines = self.events[min(self._told, len(self.events) - 1)]
        self._told += 1
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(await lines.get())

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/ready":
            return web.Response()
        if request.path == "/sgl_ext/events":
            return await self._tell(request)
        if request.path == "/sgl_ext/work":  # as an engine that says nothing about its work
            return web.Response(status=404)
        if request.headers.get("x-sgl-ext-purpose") == "probe":  # nor about its model
            if self.model:
                cards: list[dict[str, Any]] = [{"id": self.model, "max_model_len": 1000}]
                cards += [{"id": name, "parent": self.model} for name in self.adapters]
                return web.json_response({"data": cards})
            return web.Response(status=404)
        self.seen.append((request.path_qs, await request.read(), request.headers))
        if self.answer is None:
            return web.json_response({"engine": self.name})
        return await self.answer(request)


Serve = Callable[..., Awaitable[Balancer]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts raw workers and a balancer over them; returns the balancer."""
    async with AsyncExitStack() as stack:

        async def begin(*workers: Raw, **config: Any) -> Balancer:
            return await stack.enter_async_context(running(*workers, **config))

        yield begin


Connect = Callable[[Balancer], Awaitable[Wire]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Opens bare connections to a balancer."""
    async with AsyncExitStack() as stack:

        async def begin(balancer: Balancer) -> Wire:
            return await stack.enter_async_context(connected(balancer))

        yield begin


Start = Callable[..., Awaitable[ClientSession]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts engines and a balancer over them; returns a client of the balancer."""
    async with AsyncExitStack() as stack:

        async def begin(*engines: Engine, interval_s: float = 0.02, **config: Any) -> ClientSession:
            urls = []
            for engine in engines:
                app = web.Application(client_max_size=1 << 30)
                app.router.add_route("*", "/{path:.*}", engine.handle)
                engine.server = server = TestServer(app, handler_cancellation=True)
                await stack.enter_async_context(server)
                urls.append(engine.url)
            settings = {"workers": tuple(urls), "port": 0, **AT_ONCE, **config}
            balancer = Balancer(BalancerSettings(**settings), interval_s=interval_s)
            await balancer.start()
            stack.push_async_callback(balancer.stop)
            url = f"http://127.0.0.1:{balancer.port}"
            return await stack.enter_async_context(ClientSession(url))

        yield begin
