"""Pickers over scripted engines, and gateways that ask them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
import uvloop
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.balancer.conftest import Engine
from tests.integrations.gateway.gateway import Asked, Picker, running_picker


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], uvloop.Loop]]:
    """The loop that the picker runs on."""
    return {"uvloop": uvloop.new_event_loop}


Listen = Callable[..., Awaitable[str]]
"""Lets an engine listen; returns its address, HOST:PORT."""


@pytest.fixture
async def listen() -> AsyncIterator[Listen]:
    async with AsyncExitStack() as stack:

        async def begin(engine: Engine, port: int | None = None) -> str:
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", "/{path:.*}", engine.handle)
            engine.server = server = TestServer(app, port=port, handler_cancellation=True)
            await stack.enter_async_context(server)
            return engine.url.removeprefix("http://")

        yield begin


Pick = Callable[..., Awaitable[Picker]]


@pytest.fixture
async def pick(listen: Listen) -> AsyncIterator[Pick]:
    """Starts engines and a picker over them."""
    async with AsyncExitStack() as stack:

        async def begin(*engines: Engine, **config: Any) -> Picker:
            urls = [f"http://{await listen(engine)}" for engine in engines]
            return await stack.enter_async_context(running_picker(urls, **config))

        yield begin


Ask = Callable[[Picker], Asked]


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    """Opens streams of a gateway."""
    async with AsyncExitStack() as stack:
        channels: dict[str, grpc.aio.Channel] = {}

        def begin(picker: Picker) -> Asked:
            if picker.address not in channels:
                channel = grpc.aio.insecure_channel(picker.address)
                channels[picker.address] = channel
                stack.push_async_callback(channel.close)
            return Asked(channels[picker.address])

        yield begin
