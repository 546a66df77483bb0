"""Several models behind one address: scripted engines that state different ones."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from sgl_ext import keys
from sgl_ext.settings.schema import Alias, ServedModel
from tests.balancer.admin.test_state import repeated
from tests.balancer.conftest import Engine, Start
from tests.balancer.wire import until

MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"
ALIASES = (Alias("claude-haiku-*", "small"), Alias("fast", "small"), Alias("*", "large"))
TWO = (ServedModel("large"), ServedModel("small"))


async def engine_of(client: ClientSession, model: object, path: str = MESSAGES) -> Any:
    """The engine that answers, or the status and the error."""
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    if model is not None:
        body["model"] = model  # type: ignore[assignment]
    async with client.post(path, json=body) as answer:
        document = await answer.json()
        return document["engine"] if answer.status == 200 else (answer.status, document["error"])


async def test_requests_go_to_the_engines_of_the_model_that_they_name(start: Start) -> None:
    client = await start(Engine("a", model="large"), Engine("b", model="small"))
    for path in (MESSAGES, CHAT, "/v1/completions", "/v1/responses", "/v1/messages/count_tokens"):
        found = [await engine_of(client, name, path) for name in ("large", "small", "small")]
        assert found == ["a", "b", "b"], path
    assert await engine_of(client, "claude-opus-5") == "a"  # as with one model


async def test_limits_use_and_the_log_are_by_the_model_that_answers(
    start: Start, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        "[tenants.a.models.small]\nrequests-per-minute = 1\n[tenants.b]\nadmin = true\n"
    )
    key, operator = keys.add_key(file, "a")[0], keys.add_key(file, "b")[0]
    engines = Engine("a", model="large"), Engine("b", model="small")
    client = await start(*engines, aliases=ALIASES, keys=str(file))
    client.headers["authorization"] = f"Bearer {key}"
    names = "claude-haiku-4-5", "large", "small", "large"
    found = [await engine_of(client, name) for name in names]
    assert found[:2] == ["b", "a"]
    assert found[2][0] == 429
    assert "for the model small" in found[2][1]["message"]
    assert found[3] == "a"
    client.headers["authorization"] = f"Bearer {operator}"

    async def used() -> dict[tuple[str, str], int]:
        uses = (await (await client.get("/sgl_ext/usage")).json())["usage"]
        return {(use["tenant"], use["model"]): use["requests"] for use in uses}

    counted = {}
    while not {"large", "small"} <= {
        model for _, model in counted
    }:  # they are written every so often
        counted = await used()
    assert {name: times for name, times in counted.items() if name[0] == "a"} == {
        ("a", "large"): 2,
        ("a", "small"): 1,
    }
    assert {model for tenant, model in counted if tenant == "b"} <= {""}
    for model, statuses in (("small", [429, 200]), ("large", [200, 200])):
        log = await (await client.get(f"/sgl_ext/requests?model={model}")).json()
        assert [row["status"] for row in log["requests"]] == statuses
        assert {row["served_model"] for row in log["requests"]} == {model}
    state = await (await client.get("/sgl_ext/state")).json()
    limits = {row["name"]: row["limits"] for row in state["tenants"]}["a"]
    assert limits["models"] == {"small": {"requests_per_minute": 1, "tokens_per_minute": None}}


async def test_aliases_and_patterns_choose_the_model(start: Start) -> None:
    engines = Engine("a", model="large"), Engine("b", model="small")
    client = await start(*engines, aliases=ALIASES)
    names = "claude-haiku-4-5", "fast", "claude-opus-5", None, "small"
    assert [await engine_of(client, name) for name in names] == ["b", "b", "a", "a", "b"]


async def test_an_unknown_name_is_an_error_of_its_protocol(start: Start) -> None:
    client = await start(Engine("a", model="large"), Engine("b", model="small"), served=TWO)
    status, error = await engine_of(client, "gpt-5")
    assert (status, error["type"]) == (404, "not_found_error")
    assert error["message"] == "The model 'gpt-5' does not exist. There are: large, small"
    status, error = await engine_of(client, "gpt-5", CHAT)
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    status, error = await engine_of(client, None, CHAT)
    assert (status, error["param"]) == (400, "model")


async def test_all_models_are_listed_with_their_windows(start: Start) -> None:
    engines = Engine("a", model="large"), Engine("b", model="small")
    client = await start(*engines, aliases=ALIASES)
    listed = (await (await client.get("/v1/models")).json())["data"]
    assert [(one["id"], one["context_length"]) for one in listed] == [
        *(("large", 1000), ("small", 1000), ("fast", 1000))
    ]
    headers = {"anthropic-version": "2023-06-01"}
    async with client.get("/v1/models?limit=2", headers=headers) as answer:
        page = await answer.json()
    assert [one["id"] for one in page["data"]] == ["large", "small"]
    assert (page["has_more"], page["data"][0]["max_input_tokens"]) == (True, 1000)
    async with client.get("/v1/models/claude-haiku-4-5", headers=headers) as answer:
        one = await answer.json()
    assert (one["id"], one["type"], one["max_input_tokens"]) == ("claude-haiku-4-5", "model", 1000)
    tags = await (await client.get("/api/tags")).json()
    assert [one["model"] for one in tags["models"]] == ["large", "small", "fast"]


async def test_one_model_without_aliases_is_listed_by_its_engine(start: Start) -> None:
    client = await start(Engine("a", model="large"))
    assert await (await client.get("/v1/models")).json() == {"engine": "a"}


async def test_an_unknown_model_is_not_shown(start: Start) -> None:
    client = await start(Engine("a", model="large"), Engine("b", model="small"), served=TWO)
    async with client.get("/v1/models/gpt-5") as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["code"] == "model_not_found"


async def test_an_engine_of_another_model_that_is_added_makes_its_pool(start: Start) -> None:
    other = Engine("b", model="small")
    client = await start(Engine("a", model="large"))
    outer = await start(other)  # it serves, and is not known to the first balancer
    assert await engine_of(client, "small") == "a"
    await client.post("/sgl_ext/workers", json={"url": other.url})
    assert await engine_of(client, "small") == "b"
    state = await (await client.get("/sgl_ext/state")).json()
    assert [one["name"] for one in state["models"]] == ["large", "small"]
    assert {one["model"] for one in state["engines"]} == {"large", "small"}
    await outer.close()


async def test_a_full_queue_of_one_model_holds_up_no_other(start: Start) -> None:
    gate = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        await gate.wait()
        return web.json_response({"engine": "a"})

    engines = Engine("a", answer, "large"), Engine("b", model="small")
    client = await start(*engines, max_in_flight=1, queue_limit=1)
    first = asyncio.create_task(engine_of(client, "large"))
    await until(lambda: engines[0].seen)
    waiting = asyncio.create_task(engine_of(client, "large"))
    waits = 'sgl_ext_model_queued_requests{model="large"} 1.0'
    await repeated(lambda: metrics(client), lambda page: waits in page)
    status, _ = await engine_of(client, "large")
    assert status in (503, 529)
    assert await engine_of(client, "small") == "b"
    gate.set()
    assert (await first, await waiting) == ("a", "a")


async def metrics(client: ClientSession) -> str:
    return await (await client.get("/metrics")).text()


async def test_a_fallback_of_responses_gets_its_own_name(start: Start) -> None:
    small = Engine("b", model="small")
    client = await start(small, served=(ServedModel("large", "small"), ServedModel("small")))
    body = {"model": "large", "input": "Hello", "store": False}
    async with client.post("/v1/responses", json=body) as answer:
        assert (answer.status, answer.headers["x-sgl-ext-model"]) == (200, "small")
    assert json.loads(small.seen[-1][1])["model"] == "small"
    assert "sgl_ext_model_fallbacks_total{" in await metrics(client)


async def test_a_model_whose_engines_are_busy_has_no_fallback(start: Start) -> None:
    arrived, goes_on = asyncio.Event(), asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        arrived.set()
        await goes_on.wait()
        return web.json_response({"engine": "a"})

    served = (ServedModel("large", "small"), ServedModel("small"))
    engines = Engine("a", answer, model="large"), Engine("b", model="small")
    client = await start(*engines, served=served, max_in_flight=1, queue_limit=0)
    first = asyncio.create_task(engine_of(client, "large"))
    await arrived.wait()
    assert (await engine_of(client, "large"))[0] == 529
    assert not engines[1].seen
    goes_on.set()
    assert await first == "a"


@pytest.mark.parametrize("fallback", ["small", ""])
async def test_a_fallback_answers_for_a_model_without_an_engine(
    fallback: str, start: Start
) -> None:
    served = (ServedModel("large", fallback), ServedModel("small"))
    client = await start(Engine("b", model="small"), served=served)
    body = {"model": "large", "messages": [{"role": "user", "content": "Hello"}]}
    async with client.post(MESSAGES, json=body) as answer:
        if fallback:
            assert (answer.status, answer.headers["x-sgl-ext-model"]) == (200, "small")
        else:
            assert answer.status in (503, 529)
    count = 'sgl_ext_model_fallbacks_total{fallback="small",model="large"} 1.0'
    assert (count in await metrics(client)) == bool(fallback)
    assert (
        "x-sgl-ext-model"
        not in (await client.post(MESSAGES, json={**body, "model": "small"})).headers
    )


async def test_an_engine_gets_the_name_that_it_knows(start: Start) -> None:
    """SGLang takes adapters as MODEL:ADAPTER, and refuses unknown names of responses."""
    small = Engine("b", model="small", adapters=("sql",))
    aliases = (Alias("db", "sql"), *ALIASES)
    client = await start(Engine("a", model="large"), small, aliases=aliases)
    for path, name, known in (
        (CHAT, "sql", "small:sql"),
        (MESSAGES, "db", "small:sql"),
        (CHAT, "small:sql", "small:sql"),
        (CHAT, "fast", "fast"),
        ("/v1/responses", "fast", "small"),
        ("/v1/responses", "claude-haiku-9", "small"),
        ("/v1/responses", "small", "small"),
    ):
        assert await engine_of(client, name, path) == "b"
        assert json.loads(small.seen[-1][1])["model"] == known
    listed = (await (await client.get("/v1/models")).json())["data"]
    assert [one["id"] for one in listed] == ["large", "small", "sql", "db", "fast"]
    assert [one["parent"] for one in listed] == [None, None, "small", "small", "small"]
