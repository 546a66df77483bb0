"""A balancer in this process in front of engines that only claim to be busy."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from sgl_ext.balancer.server import Balancer
from sgl_ext.reading.usage import Usage
from sgl_ext.settings.schema import BalancerSettings

CAPACITY = 180_000


def load(number: int) -> dict[str, int]:
    """What a busy engine reports of itself."""
    return {
        "running": 12 + number % 7,
        "queued": number % 4,
        "pending_tokens": 9000,
        "used_tokens": 60_000 + 9000 * (number % 9),
        "pinned_tokens": 21_000 + 2500 * (number % 5),
        "pin_budget_tokens": 60_000,
        "pins_declined": {"less valuable": 3 + number, "budget": 1},
        "capacity_tokens": CAPACITY,
        "max_running": 64,
    }


def pin(number: int, **about: Any) -> dict[str, Any]:
    usual = {
        "prefix": f"{(number + 1) * 0x9E3779B97F4A7C15F39CC0605CEDC834 % 2**128:032x}",
        "segment": None,
        "tokens": max(24_000 - 1700 * number, 900),
        "ttl_s": 3600.0,
        "left_s": max(3500.0 - 311 * number, 20.0),
        "hits": max(40 - 5 * number, 0),
        "owner": ("alice", "bob", "ci")[number % 3],
        "session": "",
    }
    return {**usual, **about}


class FakeEngine:
    """Reports a load and pins, and deletes the pins that it is told to."""

    def __init__(
        self, number: int, pins: Sequence[dict[str, Any]] = (), is_ready: bool = True
    ) -> None:
        self.number = number
        self.pins = {each["prefix"]: each for each in pins}
        self.is_ready = is_ready
        self.deleted: list[str] = []
        self.model = "qwen3-coder-30b"
        self._lines: list[asyncio.Queue[dict[str, Any]]] = []

    def tell(self, line: dict[str, Any]) -> None:
        """Sends an event."""
        for lines in self._lines:
            lines.put_nowait(line)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/ready":
            return web.Response(status=200 if self.is_ready else 503)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": self.model}]})
        if request.path == "/sgl_ext/events":
            return await self._events(request)
        if request.path == "/v1/pins":
            return self._delete(request.query["prefix"])
        body = await request.json()
        return web.json_response({"usage": body["usage"]})

    def _delete(self, prefix: str) -> web.Response:
        self.deleted.append(prefix)
        found = self.pins.pop(prefix, None)
        self.tell({"unpinned": [prefix]})
        return web.json_response({"deleted": int(found is not None)})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if not self.is_ready:
            return web.Response(status=404)
        response = web.StreamResponse()
        await response.prepare(request)
        lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._lines.append(lines)
        pins = [*self.pins.values()]
        first = {"snapshot": True, "cleared": True, "publishes": ["prefixes", "load"]}
        lines.put_nowait({**first, "load": load(self.number)})
        lines.put_nowait({"pinned": pins, "complete": True})
        for number in range(1 << 30):
            line = {"seq": number, **await lines.get()}
            await response.write(json.dumps(line).encode() + b"\n")
        return response


class FakeNode:
    """A running balancer; `url` is its address."""

    def __init__(self, balancer: Balancer) -> None:
        self.balancer = balancer
        self.url = f"http://127.0.0.1:{balancer.port}"

    def remember(self, hours: float = 1.0) -> None:
        """Makes it a node that has served for hours."""
        activity = self.balancer._services.activity
        now_s = time.time()
        activity.history._started_s = now_s - hours * 3600
        for ago_s in range(int(hours * 3600), 0, -5):
            wave = math.sin(ago_s / 300) + 0.4 * math.sin(ago_s / 47)
            prompt = 20_000 + int(5000 * wave)
            cached = int(prompt * min(0.90 + 0.04 * wave, 0.99))
            for each in range(6 + int(3 * wave)):
                ttft_s = (0.12 + 0.05 * wave) * (1 + each**2 / 5)
                usage = Usage(prompt, cached, prompt - cached + 350 + 100 * each)
                activity.add(now_s - ago_s, "alice", None, "", prompt, usage, ttft_s)

    def diverge(self, harness: str, model: str, found: dict[str, Any]) -> None:
        """Makes it find that a prompt diverges."""
        detector = self.balancer._services.request_log.detector
        assert detector is not None, "it compares prompts"
        detector.findings.add(harness, model, 20_000, found)

    def streams(self) -> int:
        """How many live streams are open."""
        gauge = self.balancer._services.metrics.live_streams
        return int(next(iter(gauge.collect())).samples[0].value)

    async def answer(self, count: int, tenants: tuple[str, ...] = ("alice", "bob", "ci")) -> None:
        """Answers requests of so many sessions."""
        async with ClientSession(self.url) as client:
            for number in range(count):
                prompt = 8000 + number * 997 % 60_000
                cached = int(prompt * (0.55 + number * 7 % 45 / 100))
                usage = {
                    "prompt_tokens": prompt,
                    "completion_tokens": 200 + number % 300,
                    "prompt_tokens_details": {"cached_tokens": cached},
                }
                messages = [{"role": "user", "content": f"Task {number}"}]
                tenant = tenants[number % len(tenants)]
                headers = {"x-session-id": f"s{number}", "x-tenant-id": tenant}
                body = {"model": "m", "messages": messages, "usage": usage}
                path = "/v1/chat/completions"
                async with client.post(path, json=body, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()

    async def ask_as_claude_code(self, session: str, agent: str) -> None:
        """A request of a session's lead, or of its sub-agent of this id."""
        headers = {"user-agent": "claude-cli/2.1.0 (external, cli)", "anthropic-version": "1"}
        headers |= {"x-claude-code-session-id": session}
        headers |= {"x-claude-code-agent-id": agent} if agent else {}
        messages = [{"role": "user", "content": f"Task of {agent}"}]
        usage = {"input_tokens": 100, "cache_read_input_tokens": 900, "output_tokens": 20}
        body = {"model": "m", "max_tokens": 20, "messages": messages, "usage": usage}
        async with (
            ClientSession(self.url) as client,
            client.post("/v1/messages", json=body, headers=headers) as answer,
        ):
            assert answer.status == 200, await answer.text()


@asynccontextmanager
async def fake_node(*engines: FakeEngine, port: int = 0, **config: Any) -> AsyncIterator[FakeNode]:
    """A balancer in front of engines."""
    async with AsyncExitStack() as stack:
        urls = []
        for engine in engines:
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", "/{path:.*}", engine.handle)
            server = await stack.enter_async_context(TestServer(app, handler_cancellation=True))
            urls.append(str(server.make_url("")).rstrip("/"))
        settings: Mapping[str, Any] = {"workers": tuple(urls), "port": port, "drain_s": 0, **config}
        balancer = Balancer(BalancerSettings(**settings), interval_s=0.1)
        await balancer.start()
        stack.push_async_callback(balancer.stop)
        yield FakeNode(balancer)
