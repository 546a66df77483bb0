"""Simulated engines over HTTP: SGLang's API, and the plugin's events."""

from collections.abc import AsyncIterator

import orjson
import pytest
from aiohttp.test_utils import TestClient, TestServer

from bench.sim.engine import EngineConfig
from bench.sim.live_engine import Live
from bench.sim.server import make_app
from bench.trace.calls import CHAT
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.segments import read_chain

FAST = EngineConfig(
    capacity_tokens=64_000, prefill_tokens_per_s=1e9, prefill_base_s=0, decode_base_s=0
)
HEADER = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=sdk-cli;\n"


def chat(header: str = "", **more: object) -> dict[str, object]:
    system = HEADER.format(header) * bool(header) + "You are an agent. " * 100
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "hello"}]
    return {"model": "sim", "max_tokens": 40, "messages": messages, **more}


async def client(*, plugin: bool) -> AsyncIterator[TestClient]:
    server = TestServer(make_app(Live(FAST, plugin=plugin)))
    async with TestClient(server) as found:
        yield found


@pytest.fixture
async def stock() -> AsyncIterator[TestClient]:
    async for found in client(plugin=False):
        yield found


@pytest.fixture
async def ours() -> AsyncIterator[TestClient]:
    async for found in client(plugin=True):
        yield found


async def cached(to: TestClient, body: dict[str, object]) -> int:
    answer = await (await to.post(CHAT, json=body)).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_repeated_prompt_is_cached_until_the_flush(stock: TestClient) -> None:
    assert await cached(stock, chat()) == 0
    assert await cached(stock, chat()) > 400
    await stock.post("/flush_cache")
    assert await cached(stock, chat()) == 0


async def test_streams_carry_the_whole_answer(stock: TestClient) -> None:
    whole = await (await stock.post(CHAT, json=chat())).json()
    text = await (await stock.post(CHAT, json=chat(stream=True))).text()
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    events = [orjson.loads(line) for line in lines]
    said = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert said == whole["choices"][0]["message"]["content"]
    assert len(said) == 160
    assert events[-1]["usage"]["completion_tokens"] == 40


async def test_generate(stock: TestClient) -> None:
    body = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 3}}
    answer = await (await stock.post("/generate", json=body)).json()
    assert answer["meta_info"]["completion_tokens"] == 3
    assert len(answer["text"]) == 12


async def test_a_header_hurts_a_stock_engine_only(stock: TestClient, ours: TestClient) -> None:
    for engine in (stock, ours):
        await cached(engine, chat("3af"))
    assert await cached(stock, chat("bee")) == 0
    assert await cached(ours, chat("bee")) > 400


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/model_info", "/server_info"])
async def test_what_routers_ask(stock: TestClient, path: str) -> None:
    assert (await stock.get(path)).status == 200


async def test_bad_requests_are_refused(stock: TestClient) -> None:
    assert (await stock.post("/v1/unknown", json={})).status == 404
    assert (await stock.get("/sgl_ext/events")).status == 404
    for body in (b"{", b"[]", b'{"messages": []}', b'{"messages": 3}'):
        assert (await stock.post(CHAT, data=body)).status == 400
    assert (await stock.post(CHAT, json=chat(max_tokens=100_000))).status == 400


async def test_events_begin_with_a_snapshot_and_go_on(ours: TestClient) -> None:
    await cached(ours, chat())
    hashes = [f"{segment:032x}" for segment in read_chain(of_path(CHAT), chat()).hashes]
    async with ours.get("/sgl_ext/events") as stream:
        first = orjson.loads(await stream.content.readline())
        assert (first["seq"], first["snapshot"], first["cleared"]) == (0, True, True)
        stored = {segment: parent for segment, parent, _ in first["stored"]}
        assert stored[hashes[0]] is None
        await ours.post("/flush_cache")
        number, removed = 0, list[str]()
        while hashes[0] not in removed:
            line = orjson.loads(await stream.content.readline())
            number += 1
            assert line["seq"] == number
            removed += line.get("removed", ())
