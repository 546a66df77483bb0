"""A session on a strained engine is prefilled on an idle one as well."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import ClientSession, web

from tests.balancer.conftest import Engine, Start
from tests.balancer.test_routing import CHAT, body, shown, until

MINE = {"x-sgl-ext-session-id": "mine"}
_LOAD = {"capacity_tokens": 1_000_000, "max_running": 1, "queued": 0}


class Gated(Engine):
    """Answers chats when its gate is open, and takes what is to be warmed at once."""

    def __init__(self, name: str, gate: asyncio.Event) -> None:
        super().__init__(name, self._answer)
        self._gate = gate
        line = {"seq": 1, "snapshot": True, "cleared": True, "publishes": ["load"], "load": _LOAD}
        lines: asyncio.Queue[bytes] = asyncio.Queue()
        lines.put_nowait(orjson.dumps(line) + b"\n")
        self.events.append(lines)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/prefill":
            return web.json_response({"queued": True}, status=202)
        await self._gate.wait()
        return web.json_response({"engine": self.name})

    @property
    def warmed(self) -> list[bytes]:
        return [data for path, data, _ in self.seen if path.startswith("/v1/prefill")]


async def in_flight(client: ClientSession) -> dict[str, int]:
    workers = (await (await client.get("/health")).json())["workers"]
    return {worker["url"]: worker["in_flight"] for worker in workers}


async def two_at_once(client: ClientSession) -> tuple[str, asyncio.Future[Any]]:
    """The engine of a session that has two requests there, which is all it takes; and these."""
    routing = body("Go", "Gone", "On")
    both = asyncio.gather(*(client.post(CHAT, json=routing, headers=MINE) for _ in range(2)))

    async def there() -> bool:
        return sorted((await in_flight(client)).values()) == [0, 2]

    await until(there)
    return max((load, url) for url, load in (await in_flight(client)).items())[1], both


async def test_a_strained_sessions_prompt_goes_to_an_idle_engine_once(start: Start) -> None:
    gate = asyncio.Event()
    engines = Gated("a", gate), Gated("b", gate)
    client = await start(*engines)
    home, both = await two_at_once(client)
    await until(lambda: shown(client, 'sgl_ext_standby_prefills_total{result="accepted"} 1.0'))
    (other,) = [engine for engine in engines if engine.url != home]
    ((path, data, headers),) = other.seen
    assert path == "/v1/prefill?wait=false&protocol=chat"
    assert orjson.loads(data) == body("Go", "Gone", "On")
    assert headers["x-sgl-ext-session-id"] == "mine"
    assert headers["x-sgl-ext-purpose"] == "standby"
    gate.set()
    assert headers["x-request-id"] in {answer.headers["x-request-id"] for answer in await both}
    gate.clear()
    _, both = await two_at_once(client)
    assert len(other.warmed) == 1, "it was warmed a moment ago"
    gate.set()
    await both


async def test_an_engine_with_capacity_needs_no_standby(start: Start) -> None:
    gate = asyncio.Event()
    gate.set()
    engines = Gated("a", gate), Gated("b", gate)
    client = await start(*engines)
    for _ in range(3):
        await client.post(CHAT, json=body("Go", "Gone", "On"), headers=MINE)
    assert not any(engine.warmed for engine in engines)
