"""Prefill and decode engines: a request goes to one of each, and the decode engine answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, web

from tests.balancer.admin.test_state import repeated
from tests.balancer.conftest import Engine, Start
from tests.waiting import HANG_S

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
PATH = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello " * 400}]}
HEADER = "x-sgl-ext-bootstrap"


class Role(Engine):
    """An engine that states its role, and answers as its test says."""

    def __init__(self, role: str, answer: Answer | None = None) -> None:
        super().__init__(role, answer)
        self.role = role

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/ready":
            return web.Response(headers={"x-sgl-ext-role": self.role})
        return await super().handle(request)

    @property
    def rooms(self) -> list[str]:
        return [headers.get(HEADER, "") for path, _, headers in self.seen if path == PATH]


async def chat(client: ClientSession, text: str = "", **headers: str) -> tuple[int, Any]:
    body = {**BODY, "messages": [{"role": "user", "content": text}]} if text else BODY
    answer = await client.post(PATH, json=body, headers=headers)
    return answer.status, await answer.json()


def loads(client: ClientSession) -> Callable[[], Awaitable[dict[str, int]]]:
    async def shown() -> dict[str, int]:
        rows = (await (await client.get("/sgl_ext/workers")).json())["workers"]
        return {row["role"]: row["in_flight"] for row in rows}

    return shown


async def test_a_prefill_engine_computes_and_a_decode_engine_answers(start: Start) -> None:
    prefill, decode = Role("prefill 8998"), Role("decode")
    client = await start(prefill, decode)
    for _ in range(2):
        assert await chat(client, **{HEADER: "127.0.0.9 1 1"}) == (200, {"engine": "decode"})
    await repeated(loads(client), lambda _: len(prefill.rooms) == 2)
    assert sorted(prefill.rooms) == sorted(decode.rooms)
    assert len(set(prefill.rooms)) == 2, "each request has a room of its own"
    assert all(room.startswith("127.0.0.1 8998 ") for room in prefill.rooms)
    bodies = {body for path, body, _ in prefill.seen + decode.seen if path == PATH}
    assert len(bodies) == 1
    assert set((await loads(client)()).values()) == {0}


async def test_a_conversation_stays_with_its_prefill_engine_and_answers_are_spread(
    start: Start,
) -> None:
    gate = asyncio.Event()

    async def wait(_: web.Request) -> web.Response:
        await gate.wait()
        return web.json_response({})

    prefills = Role("prefill 1"), Role("prefill 2")
    decodes = Role("decode", wait), Role("decode", wait)
    client = await start(*prefills, *decodes)
    asked = [asyncio.create_task(chat(client, **{"x-session-id": "s"})) for _ in range(4)]
    both = prefills, decodes
    await repeated(
        loads(client), lambda _: [sum(len(e.rooms) for e in each) for each in both] == [4, 4]
    )
    assert [len(each.rooms) for each in decodes] == [2, 2]
    assert sorted(len(each.rooms) for each in prefills) == [0, 4]
    gate.set()
    await asyncio.gather(*asked)


async def test_many_conversations_keep_their_prefill_engines_and_share_the_decode_engines(
    start: Start,
) -> None:
    """Two engines of each role under load, simulated: a decode engine answers one after another."""
    most: list[int] = [0, 0]

    def answering(number: int) -> Answer:
        running, free = 0, asyncio.Semaphore(1)

        async def answer(_: web.Request) -> web.Response:
            nonlocal running
            running += 1
            most[number] = max(most[number], running)
            async with free:
                for _ in range(3):
                    await asyncio.sleep(0)
            running -= 1
            return web.json_response({})

        return answer

    prefills = Role("prefill 1"), Role("prefill 2")
    decodes = Role("decode", answering(0)), Role("decode", answering(1))
    client = await start(*prefills, *decodes)

    async def converse(session: str) -> None:
        for _ in range(3):
            text = f"{session} " * 300
            assert (await chat(client, text, **{"x-session-id": session}))[0] == 200

    await asyncio.gather(*(converse(f"s{number}") for number in range(24)))
    await repeated(loads(client), lambda _: sum(len(each.rooms) for each in prefills) == 72)
    computed = [
        {headers["x-session-id"] for path, _, headers in each.seen if path == PATH}
        for each in prefills
    ]
    assert not computed[0] & computed[1], "a conversation has one prefill engine"
    assert min(map(len, computed)) >= 6
    assert sum(len(each.rooms) for each in decodes) == 72
    assert abs(most[0] - most[1]) <= 2


async def test_what_generates_nothing_needs_no_decode_engine(start: Start) -> None:
    prefill, decode = Role("prefill 8998"), Role("decode")
    client = await start(prefill, decode)
    answer = await client.post("/v1/messages/count_tokens", json=BODY)
    assert await answer.json() == {"engine": "prefill 8998"}
    assert not decode.seen


async def test_without_an_engine_of_each_role_a_request_is_503(start: Start) -> None:
    client = await start(Role("prefill 8998"))
    status, body = await chat(client)
    assert status == 503
    assert "engine" in body["error"]["message"]
    ready = await client.get("/ready")
    assert await ready.text() == "no prefill or no decode engine is ready\n"


async def test_a_request_whose_prefill_engine_fails_is_sent_to_another(start: Start) -> None:
    async def fail(_: web.Request) -> web.Response:
        return web.Response(status=500)

    never = asyncio.Event()

    async def await_kv(request: web.Request) -> web.Response:
        if request.headers[HEADER].startswith("127.0.0.1 1 "):
            await never.wait()
        return web.json_response({"engine": "decode"})

    failing, working = Role("prefill 1", fail), Role("prefill 2")
    client = await start(failing, working, Role("decode", await_kv))
    for text in "abcdef":
        assert await chat(client, text * 100) == (200, {"engine": "decode"})
    assert failing.rooms
    await repeated(loads(client), lambda _: len(working.rooms) == 6)


async def test_an_answer_that_ends_early_ends_the_prefill(start: Start) -> None:
    came, left = asyncio.Event(), asyncio.Event()

    async def compute(_: web.Request) -> web.Response:
        came.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        raise AssertionError

    async def reject(_: web.Request) -> web.Response:
        await came.wait()
        return web.json_response({"error": {"message": "wrong"}}, status=400)

    client = await start(Role("prefill 1", compute), Role("decode", reject))
    assert (await chat(client))[0] == 400
    async with asyncio.timeout(HANG_S):
        await left.wait()
    assert set((await loads(client)()).values()) == {0}


async def test_both_engines_get_the_secret(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("s" * 40)
    file.chmod(0o600)
    prefill, decode = Role("prefill 1"), Role("decode")
    client = await start(prefill, decode, engine_secret=f"file:{file}")
    assert (await chat(client))[0] == 200
    await repeated(loads(client), lambda _: len(prefill.rooms) == 1)
    for engine in (prefill, decode):
        (sent,) = (headers for path, _, headers in engine.seen if path == PATH)
        assert sent["x-sgl-ext-engine-secret"] == "s" * 40
