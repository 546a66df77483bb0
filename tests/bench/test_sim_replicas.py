"""Two balancers in front of the same engines: they agree, and one that dies takes nothing along."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, web
from aiohttp.test_utils import TestServer
from sgl_ext_cpu.node import free_port

from bench.sim.engine import EngineConfig
from bench.sim.live_engine import Live
from bench.sim.server import make_app
from sgl_ext.balancer.server import Balancer
from sgl_ext.settings.schema import BalancerSettings

CHAT = "/v1/chat/completions"
QUICK = EngineConfig(prefill_tokens_per_s=400_000, prefill_base_s=0.001, decode_base_s=0.002)
HARNESS = "You are a coding agent. " * 400


def first_turn(session: int) -> list[dict[str, str]]:
    """A conversation of about 6,000 tokens, of which others share 2,400."""
    task = f"Task {session}: " + f"look at file {session}. " * 800
    return [{"role": "system", "content": HARNESS}, {"role": "user", "content": task}]


def body(messages: list[dict[str, str]]) -> dict[str, Any]:
    return {"model": "sim", "max_tokens": 8, "messages": messages}


class Engines:
    """Simulated engines in this process; `served` has each session's engines in order."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.served: dict[str, list[int]] = {}

    @asynccontextmanager
    async def running(self, count: int) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for number in range(count):
                app = make_app(Live(QUICK, plugin=True))
                app.middlewares.append(self._noting(number))
                server = await stack.enter_async_context(TestServer(app))
                self.urls.append(str(server.make_url("")).rstrip("/"))
            yield

    def _noting(self, number: int) -> Any:
        @web.middleware
        async def note(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            if request.path == CHAT:
                session = (await request.json())["messages"][1]["content"]
                self.served.setdefault(session, []).append(number)
            return await handler(request)

        return note


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    engines = Engines()
    async with engines.running(4):
        yield engines


async def is_ready(client: ClientSession) -> bool:
    with suppress(ClientError):
        return (await client.get("/ready")).status == 200
    return False


async def explained(client: ClientSession, messages: list[dict[str, str]]) -> dict[str, Any]:
    answer = await client.post("/sgl_ext/explain" + CHAT, json=body(messages))
    document: dict[str, Any] = await answer.json()
    return document


async def turn(client: ClientSession, messages: list[dict[str, str]]) -> float:
    """Sends a conversation and appends the answer and the next message. Returns which share of
    the prompt was cached. Raises ClientError."""
    async with client.post(CHAT, json=body(messages), raise_for_status=True) as answer:
        document = await answer.json()
    messages.append(document["choices"][0]["message"])
    messages.append({"role": "user", "content": "Go on."})
    usage = document["usage"]
    return float(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])


async def test_replicas_place_new_sessions_alike_and_find_each_other_s(engines: Engines) -> None:
    """They list the engines in another order, so that the engines' slots differ."""
    async with AsyncExitStack() as stack:
        clients = []
        for urls in (engines.urls, engines.urls[::-1]):
            balancer = Balancer(BalancerSettings(workers=tuple(urls), port=0, drain_s=0))
            await balancer.start()
            stack.push_async_callback(balancer.stop)
            address = f"http://127.0.0.1:{balancer.port}"
            clients.append(await stack.enter_async_context(ClientSession(address)))
        one, other = clients

        async def alike(messages: list[dict[str, str]], key: str) -> str:
            places = [(await explained(client, messages))[key] for client in clients]
            assert places[0] == places[1]
            return str(places[0])

        salted = [[{"role": "user", "content": f"{n} " * 500}] for n in range(40)]
        assert len({await alike(messages, "worker") for messages in salted}) == 4

        sessions = [first_turn(number) for number in range(6)]
        for session in sessions:
            await turn(one, session)

        async def both_know() -> bool:
            held = [
                max(worker["held_tokens"] for worker in (await explained(client, s))["workers"])
                for client in clients
                for s in sessions
            ]
            return min(held) > 5_000

        await until(both_know)
        for session in sessions:
            await alike(session, "home")
            await turn(other, session)
        assert all(len(set(places)) == 1 for places in engines.served.values())


async def start_process(port: int, urls: list[str]) -> Process:
    workers = [flag for url in urls for flag in ("--worker", url)]
    command = ["-m", "sgl_ext.balancer.serve", "--port", str(port), *workers]
    return await asyncio.create_subprocess_exec(sys.executable, *command)


@pytest.mark.long
async def test_a_killed_replica_loses_its_open_sockets_and_nothing_else(engines: Engines) -> None:
    ports = [free_port() for _ in range(2)]
    processes = [await start_process(port, engines.urls) for port in ports]
    lost = 0
    stop = asyncio.Event()
    shares: dict[int, list[float]] = {}

    async def converse(number: int) -> None:
        """Every second session uses the balancer that dies, and goes on at the other."""
        nonlocal lost
        client, messages = clients[number % 2], first_turn(number)
        while not stop.is_set():
            try:
                share = await turn(client, messages)
            except ClientError:
                assert client is clients[1], "through the other no request fails"
                lost, client = lost + 1, clients[0]
                continue
            shares.setdefault(number, []).append(share)
            await asyncio.sleep(0.05)

    async with AsyncExitStack() as stack:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        clients = [await stack.enter_async_context(ClientSession(url)) for url in urls]
        for client in clients:
            await until(lambda client=client: is_ready(client))
        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(converse(number))
            await until(turns(shares, 8, 4))
            processes[1].kill()
            await processes[1].wait()
            done = {number: len(found) for number, found in shares.items()}
            await until(turns(shares, 8, max(done.values()) + 4))
            stop.set()
        processes[0].terminate()
        await processes[0].wait()
    assert lost <= 4, "a request of each session at the killed one, at most"
    assert all(len(set(places)) == 1 for places in engines.served.values()), "none has moved"
    assert all(share > 0.95 for found in shares.values() for share in found[1:])


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    """Returns once something is so; the limit is for a hang."""
    async with asyncio.timeout(200):
        while not await true():  # noqa: ASYNC110 - what is waited for happens in a server
            await asyncio.sleep(0.02)


def turns(shares: dict[int, list[float]], sessions: int, least: int) -> Any:
    """Whether each session has had so many turns."""

    async def had() -> bool:
        return len(shares) == sessions and min(map(len, shares.values())) >= least

    return had
