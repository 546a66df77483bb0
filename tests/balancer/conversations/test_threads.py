"""Threads of /v1/messages: what engines get, and what clients are answered."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession, web

from tests.balancer.conftest import Engine, Start
from tests.balancer.test_routing import until

PATH = "/v1/messages"
MARK = {"cache_control": {"type": "ephemeral"}}
TOOLS = [{"name": "read", "input_schema": {"type": "object"}}]
CALL = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a"}}
SAID = [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, CALL]
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]}
_numbers = count(1)


def user(text: str, **mark: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text, **mark}]}


def begun(**fields: Any) -> dict[str, Any]:
    return {"system": "Help.", "tools": TOOLS, "thread": {"type": "create"}, **fields}


def going_on(id: str, **fields: Any) -> dict[str, Any]:
    return {"thread": {"type": "continue", "previous_message_id": id}, **fields}


class Answering:
    """An engine that answers /v1/messages with a call; is_cut: without the end of a stream."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.is_cut = False
        self.allowed = asyncio.Semaphore(1000)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.bodies.append(body)
        self.ids.append(f"msg_{next(_numbers)}")
        message = {"id": self.ids[-1], "type": "message", "role": "assistant"}
        if not body.get("stream"):
            return web.json_response({**message, "content": SAID, "stop_reason": "tool_use"})
        sent = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await sent.prepare(request)
        events: list[dict[str, Any]] = [{"type": "message_start", "message": message}]
        for index, (block, delta) in enumerate(
            (
                ({"type": "thinking", "thinking": "", "signature": ""}, {"thinking": "Hm."}),
                ({**CALL, "input": {}}, {"partial_json": '{"path":"a"}'}),
            )
        ):
            kind = "thinking_delta" if index == 0 else "input_json_delta"
            at = {"index": index}
            events += [
                {"type": "content_block_start", **at, "content_block": block},
                {"type": "content_block_delta", **at, "delta": {"type": kind, **delta}},
            ]
            if index == 0:
                signed = {"type": "signature_delta", "signature": "s"}
                events.append({"type": "content_block_delta", **at, "delta": signed})
            events.append({"type": "content_block_stop", **at})
        events.append({"type": "message_delta", "delta": {"stop_reason": "tool_use"}})
        events += [] if self.is_cut else [{"type": "message_stop"}]
        for event in events:
            await self.allowed.acquire()
            data = orjson.dumps(event)
            await sent.write(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data))
        return sent


@pytest.fixture
def engine() -> Answering:
    return Answering()


@pytest.fixture
async def client(start: Start, engine: Answering) -> ClientSession:
    return await start(Engine("a", engine.answer))


async def ask(client: ClientSession, body: dict[str, Any], tenant: str = "") -> tuple[int, Any]:
    answer = await client.post(PATH, json={"model": "m", **body}, headers={"x-tenant-id": tenant})
    read = answer.read if body.get("stream") else answer.json
    return answer.status, await read()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_continued_thread_is_sent_as_the_whole_conversation(
    client: ClientSession, engine: Answering, stream: bool
) -> None:
    first = user("One", **MARK)
    assert (await ask(client, begun(messages=[first], stream=stream)))[0] == 200
    second = going_on(engine.ids[0], messages=[RESULT], stream=stream, max_tokens=7)
    status, told = await ask(client, second)
    assert status == 200
    assert not stream or told.endswith(b"event: message_stop\ndata: %b\n\n" % STOP)
    whole = [user("One"), {"role": "assistant", "content": SAID}, RESULT]
    kept = {"model": "m", "system": "Help.", "tools": TOOLS, "stream": stream}
    assert engine.bodies[1] == {**kept, "messages": whole, "max_tokens": 7}
    third = user("Three", **MARK)
    await ask(client, going_on(engine.ids[1], messages=[third], stream=stream))
    messages = [*whole, {"role": "assistant", "content": SAID}, third]
    assert engine.bodies[2] == {**kept, "messages": messages}


STOP = orjson.dumps({"type": "message_stop"})


async def test_what_is_not_stored_is_named_so_that_the_sdk_sends_all(
    client: ClientSession, engine: Answering
) -> None:
    await ask(client, {"messages": [user("One")]})
    engine.is_cut = True
    await ask(client, begun(messages=[user("One")], stream=True))
    engine.is_cut = False
    await ask(client, begun(messages=[user("One")]), tenant="other")
    for id in (*engine.ids, "msg_made_up"):
        status, document = await ask(client, going_on(id, messages=[RESULT]))
        assert (status, document["error"]["type"]) == (404, "not_found_error")
        assert document["error"]["details"] == {"error_code": "thread_not_found"}
    assert len(engine.bodies) == 3


async def test_the_byte_budget_counts_what_is_recorded(
    client: ClientSession, engine: Answering
) -> None:
    async def held_bytes() -> float:
        page = await (await client.get("/metrics")).text()
        (line,) = [line for line in page.splitlines() if line.startswith("sgl_ext_held_bytes ")]
        return float(line.split()[1])

    engine.allowed = asyncio.Semaphore(1)
    body = {"model": "m", **begun(messages=[user("One")], stream=True)}
    async with client.post(PATH, json=body) as answer:
        begun_bytes = await held_bytes()

        async def is_recorded() -> bool:
            return await held_bytes() > begun_bytes + 300

        for _ in range(5):
            engine.allowed.release()
        await until(is_recorded)
        for _ in range(20):
            engine.allowed.release()
        await answer.read()

    async def is_released() -> bool:
        return await held_bytes() == 0

    await until(is_released)


async def test_without_a_store_no_thread_is_known(start: Start, engine: Answering) -> None:
    client = await start(Engine("a", engine.answer), store_limit_bytes=0)
    assert (await ask(client, begun(messages=[user("One")])))[0] == 200
    status, _ = await ask(client, going_on(engine.ids[0], messages=[RESULT]))
    assert status == 404


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"thread": "create"}, "thread.type"),
        ({"thread": {"type": "continue"}}, "thread.previous_message_id"),
        ({"system": "Other."}, "system"),
        ({"tools": TOOLS}, "tools"),
    ],
)
async def test_a_malformed_turn_names_its_field(
    client: ClientSession, engine: Answering, fields: dict[str, Any], field: str
) -> None:
    await ask(client, begun(messages=[user("One")]))
    body = {**going_on(engine.ids[0], messages=[RESULT]), **fields}
    status, document = await ask(client, body)
    assert status == 400
    assert document["error"]["message"].startswith(f"{field}: ")


async def test_tokens_of_a_thread_are_counted_whole(
    client: ClientSession, engine: Answering
) -> None:
    await ask(client, begun(messages=[user("One")]))
    body = {"model": "m", **going_on(engine.ids[0], messages=[RESULT])}
    await client.post(f"{PATH}/count_tokens", json=body)
    assert len(engine.bodies[1]["messages"]) == 3
