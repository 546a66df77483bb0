"""A request's id and trace: kept if they are valid, made otherwise, and sent to its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import ClientSession, web
from multidict import CIMultiDict

from sgl_ext.protocols.request_ids import is_valid_id, read_trace
from sgl_ext.wire.headers import INTERNAL_HEADERS, TENANT_HEADER
from tests.balancer.conftest import Engine, Start

MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"
SAID = {"messages": [{"role": "user", "content": "hi"}]}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


async def post(client: ClientSession, path: str, *headers: tuple[str, str]) -> Any:
    return await client.post(path, json=SAID, headers=CIMultiDict(headers))


async def replaced(client: ClientSession) -> dict[str, float]:
    page = await (await client.get("/metrics")).text()
    lines = [line for line in page.splitlines() if line.startswith("sgl_ext_identities_replaced")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


async def test_a_clients_id_is_answered_in_both_headers_and_sent_on(start: Start) -> None:
    engine = Engine("a")
    client = await start(engine)
    answer = await post(client, MESSAGES, ("x-request-id", "mine"))
    assert answer.headers.getall("request-id") == ["mine"]
    assert answer.headers.getall("x-request-id") == ["mine"]
    answer = await post(client, CHAT, ("x-request-id", "mine"))
    assert answer.headers.getall("x-request-id") == ["mine"]
    assert "request-id" not in answer.headers
    assert [sent.getall("x-request-id") for _, _, sent in engine.seen] == [["mine"]] * 2


async def test_an_error_names_the_clients_id(start: Start) -> None:
    client = await start()
    answer = await post(client, MESSAGES, ("x-request-id", "mine"))
    assert answer.status == 529
    assert (await answer.json())["request_id"] == "mine"
    assert answer.headers["x-request-id"] == answer.headers["request-id"] == "mine"
    answer = await client.get("/v1/messages/none", headers={"x-request-id": "mine"})
    assert (answer.status, (await answer.json())["request_id"]) == (404, "mine")


async def test_a_made_id_is_answered_and_sent_on(start: Start) -> None:
    engine = Engine("a")
    client = await start(engine)
    answers = [await post(client, MESSAGES) for _ in range(2)]
    ids = [answer.headers["request-id"] for answer in answers]
    assert len(set(ids)) == 2
    assert all("x-request-id" not in answer.headers for answer in answers)
    assert [sent["x-request-id"] for _, _, sent in engine.seen] == ids


@pytest.mark.parametrize(
    "stated", [["a b"], ["x" * 129], ['"'], ["a", "b"], ["caf\u00e9"], [""]], ids=repr
)
async def test_an_invalid_id_is_replaced_and_counted(start: Start, stated: list[str]) -> None:
    engine = Engine("a")
    client = await start(engine)
    answer = await post(client, CHAT, *[("x-request-id", value) for value in stated])
    assert answer.status == 200
    made = answer.headers["x-request-id"]
    assert is_valid_id(made)
    assert made not in stated
    assert engine.seen[0][2].getall("x-request-id") == [made]
    assert await replaced(client) == {"x-request-id": 1.0}


async def test_a_clients_trace_is_handed_on(start: Start) -> None:
    engine = Engine("a")
    client = await start(engine)
    state = ("tracestate", "a=1"), ("tracestate", "b=2")
    await post(client, CHAT, ("traceparent", PARENT), *state)
    ((_, _, sent),) = engine.seen
    assert sent.getall("traceparent") == [PARENT]
    assert sent.getall("tracestate") == ["a=1,b=2"]
    assert await replaced(client) == {}


async def test_a_trace_is_made_where_there_is_no_valid_one(start: Start) -> None:
    engine = Engine("a")
    client = await start(engine)
    await post(client, CHAT)
    await post(client, CHAT, ("traceparent", "00-x"), ("tracestate", "a=1"))
    await post(client, CHAT, ("traceparent", PARENT), ("traceparent", PARENT))
    traces = [read_trace(sent["traceparent"], "") for _, _, sent in engine.seen]
    assert len({trace.trace_id for trace in traces if trace is not None} - {TRACE}) == 3
    assert all("tracestate" not in sent for _, _, sent in engine.seen)
    assert await replaced(client) == {"traceparent": 2.0}


# A balancer without keys has tenants as their proxy states them; the others it sets itself.
@pytest.mark.parametrize("name", [name for name in INTERNAL_HEADERS if name != TENANT_HEADER])
@pytest.mark.parametrize("stated", [str.lower, str.title])
async def test_a_client_cannot_send_what_engines_believe_from_a_balancer(
    start: Start, name: str, stated: Callable[[str], str]
) -> None:
    """Not even as the second of two, or as one that the connection names."""
    engine = Engine("a")
    client = await start(engine)
    forged = (stated(name), "7"), (stated(name), "8")
    for more in ((), (("connection", f"keep-alive, {name}"),)):
        answer = await post(client, CHAT, *forged, *more)
        assert answer.status == 200
    for _, _, sent in engine.seen:
        assert not {"7", "8"}.intersection(sent.getall(name, []))


async def test_a_retry_has_the_same_id_and_says_that_it_is_one(start: Start) -> None:
    async def cut_once(request: web.Request) -> web.StreamResponse:
        if len([sent for engine in engines for sent in engine.seen]) == 1:
            assert request.transport is not None
            request.transport.abort()
        return web.Response()

    engines = [Engine("a", cut_once), Engine("b", cut_once)]
    client = await start(*engines)
    answer = await post(client, CHAT)
    assert answer.status == 200
    seen = [sent for engine in engines for _, _, sent in engine.seen]
    assert {sent["x-request-id"] for sent in seen} == {answer.headers["x-request-id"]}
    assert {sent.get("x-sgl-ext-purpose") for sent in seen} == {None, "retry-1"}


async def test_two_clients_with_one_id_are_two_requests(start: Start) -> None:
    client = await start(Engine("a"))
    answers = await asyncio.gather(*[post(client, CHAT, ("x-request-id", "x")) for _ in range(4)])
    assert [answer.status for answer in answers] == [200] * 4
