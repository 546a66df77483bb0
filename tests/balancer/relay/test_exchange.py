"""The life of a request: what arrives, what returns, and what happens when a side is lost."""

from __future__ import annotations

import asyncio
import gc

import orjson
import pytest
from aiohttp import web

from sgl_ext.balancer.relay.exchange import Exchange
from sgl_ext.settings.schema import BalancerSettings
from sgl_ext.wire.headers import CONVERSATION_HEADER, QUEUED_HEADER, WINDOW_HEADER
from tests.balancer.conftest import Engine, Start
from tests.waiting import HANG_S

EVENT = b'data: {"n": 1}\n\n'
PATHS = ["/v1/messages", "/v1/chat/completions", "/v1/responses", "/generate"]


async def stream_of(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    return response


async def cut_before_an_answer(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def cut_after_one_event(request: web.Request) -> web.StreamResponse:
    response = await stream_of(request)
    await response.write(EVENT + b'data: {"n":')
    assert request.transport is not None
    request.transport.close()
    return response


async def test_a_request_arrives_unchanged(start: Start) -> None:
    engine = Engine("a")
    client = await start(engine)
    body = b'{ "messages": [ ],  "model":"m" }'
    headers = {
        "content-type": "application/json; charset=utf-8",
        "anthropic-beta": "x",
        "connection": "keep-alive, x-hop",
    }
    answer = await client.post("/v1/messages?beta=true", data=body, headers=headers)
    assert await answer.json() == {"engine": "a"}
    ((target, received, sent),) = engine.seen
    assert (target, received) == ("/v1/messages?beta=true", body)
    assert sent["anthropic-beta"] == "x"


async def test_an_engine_learns_which_conversation_a_turn_is_of(start: Start) -> None:
    engine = Engine("a")
    client = await start(engine)
    headers = {CONVERSATION_HEADER: "1"}  # a client's own is removed
    for first, turns in (("a", 2), ("b", 1)):
        said = [{"role": "user", "content": first}]
        for _ in range(turns):
            await client.post("/v1/messages", json={"messages": said}, headers=headers)
            said = [*said, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    numbers = [sent.getall(CONVERSATION_HEADER) for *_, sent in engine.seen]
    assert [len(stated) for stated in numbers] == [1, 1, 1]
    first, same, other = (int(number, 16) for (number,) in numbers)
    assert first == same != other


async def test_an_answered_request_leaves_nothing_to_the_garbage_collector(start: Start) -> None:
    client = await start(Engine("a"))
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    gc.collect()
    gc.disable()
    try:
        for path in PATHS[:2]:
            answer = await client.post(path, json=body)
            assert answer.status == 200
        assert not any(type(one) is Exchange for one in gc.get_objects())
    finally:
        gc.enable()


async def test_an_engine_learns_from_the_balancer_alone_how_long_a_request_waited(
    start: Start,
) -> None:
    release = asyncio.Event()

    async def slow(_: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.json_response({})

    engine = Engine("a", slow)
    client = await start(engine, max_in_flight=1)
    headers = {QUEUED_HEADER: "3600", WINDOW_HEADER: "3600"}

    async def send(text: str) -> None:
        said = {"messages": [{"role": "user", "content": text}]}
        assert (await client.post("/v1/messages", json=said, headers=headers)).status == 200

    async def is_queued() -> bool:
        page = await (await client.get("/metrics")).text()
        return "sgl_ext_queued_requests 1.0" in page

    async with asyncio.TaskGroup() as group, asyncio.timeout(HANG_S):
        group.create_task(send("first"))
        while not engine.seen:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
        group.create_task(send("second"))
        while not await is_queued():
            pass
        release.set()
    (_, _, at_once), (_, _, queued) = engine.seen
    assert not {QUEUED_HEADER, WINDOW_HEADER} & {*at_once}
    assert [0 < float(value) < 20 for value in queued.getall(QUEUED_HEADER)] == [True]
    assert [float(value) for value in queued.getall(WINDOW_HEADER)] == [BalancerSettings().aging_s]


async def test_events_arrive_one_by_one(start: Start) -> None:
    go_on = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        response = await stream_of(request)
        await response.write(EVENT)
        await go_on.wait()
        await response.write(EVENT)
        return response

    client = await start(Engine("a", slow))
    answer = await client.post("/v1/messages", json={})
    assert await answer.content.readuntil(b"\n\n") == EVENT
    go_on.set()
    assert await answer.read() == EVENT


@pytest.mark.parametrize("path", PATHS)
async def test_a_failure_before_the_first_byte_is_retried_elsewhere(
    start: Start, path: str
) -> None:
    engines = [Engine("a", cut_before_an_answer), Engine("b")]
    client = await start(*engines)
    for turn in range(32):
        said = [{"role": "user", "content": f"{turn}"}]
        request = {"model": f"m{turn}", "text": f"{turn}", "messages": said, "input": said}
        answer = await client.post(path, json=request)
        assert await answer.json() == {"engine": "b"}
    assert engines[0].seen, "some of these prefixes belong to the engine that fails"


async def test_a_stream_without_a_first_event_is_retried_elsewhere(start: Start) -> None:
    async def cut_an_empty_stream(request: web.Request) -> web.StreamResponse:
        response = await stream_of(request)
        await response.write(b'data: {"n":')
        assert request.transport is not None
        request.transport.close()
        return response

    engines = [Engine("a", cut_an_empty_stream), Engine("b")]
    client = await start(*engines)
    for turn in range(32):
        answer = await client.post("/v1/messages", json={"model": f"m{turn}", "system": "s"})
        assert await answer.json() == {"engine": "b"}
    assert engines[0].seen


@pytest.mark.parametrize(
    ("path", "event"),
    [
        ("/v1/messages", {"type": "error", "error": {"type": "api_error"}}),
        ("/v1/responses", {"type": "error", "code": "server_error", "sequence_number": 1}),
        ("/v1/chat/completions", {"error": {"type": "server_error", "code": None}}),
        ("/generate", {"error": {"type": "server_error", "code": None}}),
    ],
)
async def test_a_cut_stream_ends_in_the_protocols_error_event_and_is_not_replayed(
    start: Start, path: str, event: dict[str, object]
) -> None:
    engines = [Engine("a", cut_after_one_event), Engine("b", cut_after_one_event)]
    client = await start(*engines)
    answer = await client.post(path, json={"model": "m"})
    first, last, rest = (await answer.read()).split(b"\n\n")
    assert first + b"\n\n" == EVENT
    assert rest == b""
    data = orjson.loads(last.rpartition(b"data: ")[2])
    assert data.items() >= {k: v for k, v in event.items() if k != "error"}.items()
    if isinstance(wanted := event.get("error"), dict):
        assert data["error"].items() >= wanted.items()
    assert last.startswith(b"event: error\n") == ("type" in event)
    assert sum(len(engine.seen) for engine in engines) == 1


async def test_a_failure_of_every_engine_is_an_error(start: Start) -> None:
    client = await start(Engine("a", cut_before_an_answer), Engine("b", cut_before_an_answer))
    answer = await client.post("/v1/messages", json={})
    assert answer.status == 502
    assert (await answer.json())["error"]["type"] == "api_error"


async def test_a_disconnected_client_cancels_the_engines_work(start: Start) -> None:
    cancelled = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = await stream_of(request)
        await response.write(EVENT)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return response

    client = await start(Engine("a", endless))
    answer = await client.post("/v1/messages", json={})
    assert await answer.content.readuntil(b"\n\n") == EVENT
    answer.close()
    await asyncio.wait_for(cancelled.wait(), HANG_S)
    metrics = ""
    while "sgl_ext_client_disconnects_total 1.0" not in metrics:
        metrics = await (await client.get("/metrics")).text()
    (worker,) = (await (await client.get("/health")).json())["workers"]
    assert worker["in_flight"] == 0


async def test_turns_of_a_conversation_stay_on_one_engine(start: Start) -> None:
    engines = [Engine(name) for name in "abc"]
    client = await start(*engines)
    for turn in range(6):
        messages = [{"role": "user", "content": "hi"}] * (turn + 1)
        header = f"x-anthropic-billing-header: cc_version={turn};"
        body = {"model": "m", "system": f"{header}\nYou are.", "messages": messages}
        await client.post("/v1/messages", json=body)
    assert sorted(len(engine.seen) for engine in engines) == [0, 0, 6]


async def test_a_prompt_is_prefilled_where_its_conversation_is(start: Start) -> None:
    engines = [Engine(name) for name in "abc"]
    client = await start(*engines)
    body = {"model": "m", "system": "You are.", "messages": [{"role": "user", "content": "hi"}]}
    await client.post("/v1/messages", json=body)
    for known in ("one result", "and another"):
        content = [{"type": "tool_result", "tool_use_id": "a", "content": known}]
        body["messages"] = [*body["messages"], {"role": "user", "content": content}]
        answer = await client.post("/v1/prefill?wait=false", json=body)
        assert answer.status == 200
    paths = [[path for path, _, _ in engine.seen] for engine in engines]
    assert sorted(paths) == [[], [], ["/v1/messages", *["/v1/prefill?wait=false"] * 2]]
    answer = await client.delete("/v1/prefill?session=one")
    assert len(await answer.json()) == 3


async def test_models_come_from_an_engine(start: Start) -> None:
    client = await start(Engine("a"))
    assert await (await client.get("/v1/models")).json() == {"engine": "a"}


async def test_a_flush_reaches_every_engine(start: Start) -> None:
    engines = [Engine("a"), Engine("b")]
    client = await start(*engines)
    answer = await client.post("/flush_cache?timeout=3")
    assert sorted(part["engine"] for part in (await answer.json()).values()) == ["a", "b"]
    assert [engine.seen[0][0] for engine in engines] == ["/flush_cache?timeout=3"] * 2


async def test_a_failed_fan_out_names_the_engine(start: Start) -> None:
    client = await start(Engine("a"), Engine("b", cut_before_an_answer))
    answer = await client.post("/start_profile")
    assert answer.status == 502
    assert "no answer" in str(await answer.json())


async def test_a_stored_response_is_found_where_it_is(start: Start) -> None:
    async def unknown(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "not here"}}, status=404)

    client = await start(Engine("a", unknown), Engine("b"))
    answer = await client.get("/v1/responses/resp_1")
    assert await answer.json() == {"engine": "b"}
