"""What benches make of an engine's capacity, and how they compare tokens per second."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.lib.capacity import Capacity, measured, stream_rates
from bench.lib.clients import clients
from bench.lib.generate import Answer, Request
from bench.lib.spread import percentiles_ms
from bench.lib.texts import Texts
from bench.lib.throughput import compared, comparison, rates, stream_per_s, total_per_s

SLOW = Capacity(prefill_per_s=2_000, decode_per_s=400, streams=8, pool_tokens=8_192, slots=8)
FAST = Capacity(prefill_per_s=40_000, decode_per_s=4_000, streams=8, pool_tokens=8_192, slots=8)


def answer(first_s: float | None, ended_s: float | None, tokens: int = 100) -> Answer:
    return Answer(Request("text", tokens), 0.0, first_s, ended_s, tokens=tokens)


def test_a_load_takes_a_faster_engine_as_long() -> None:
    assert SLOW.seconds(1_000, 200) == 1.0
    bounds = {"least": 10, "most": 200}
    assert SLOW.requests_for(5.0, 1_000, 200, **bounds) == 10
    assert FAST.requests_for(5.0, 1_000, 200, **bounds) == 67
    assert FAST.requests_for(500.0, 1_000, 200, **bounds) == 200
    assert [one.prompt_for(0.5, least=4_000, most=16_000) for one in (SLOW, FAST)] == [
        4_000,
        16_000,
    ]
    assert [one.answer_for(0.6) for one in (SLOW, FAST)] == [30, 300]
    assert (SLOW.answer_for(0.0), FAST.answer_for(9.0)) == (16, 512)


def test_a_stream_is_timed_from_its_first_token_to_its_end() -> None:
    cut, single = answer(0.5, None), answer(1.0, 2.0, tokens=1)
    assert stream_rates([answer(1.0, 3.0), answer(0.5, 1.5), cut, single]) == [49.5, 99.0]


def test_a_rate_is_of_whole_answers_until_the_last_is_over() -> None:
    whole = [answer(1.0, 8.0)] * 4
    assert total_per_s([*whole, answer(1.0, None)]) == 50.0
    assert total_per_s([answer(1.0, None)]) == 0.0
    assert (
        stream_per_s([answer(1.0, 2.0), answer(1.0, 4.0), answer(1.0, 4.0), answer(1.0, None)])
        == 33
    )
    assert stream_per_s([answer(None, None)]) == 0.0


def test_ours_is_below_stock_only_if_each_round_is() -> None:
    stock = [[answer(1.0, 2.0)]] * 3
    slower = [[answer(1.0, ended_s)] for ended_s in (2.1, 2.2, 2.05)]
    found = comparison(slower, stock)
    assert found["below_stock"]
    assert found["tokens_per_s_ratio"]["max"] == 0.976
    assert not comparison([*slower[:2], [answer(1.0, 2.0)]], stock)["below_stock"]
    assert rates(stock) == {
        "tokens_per_s": {"median": 50.0, "min": 50.0, "max": 50.0, "rounds": 3},
        "stream_tokens_per_s_p50": {"median": 99.0, "min": 99.0, "max": 99.0, "rounds": 3},
    }


def test_one_value_has_percentiles() -> None:
    assert percentiles_ms("ttft", [3.0]) == {"ttft_p50_ms": 3.0, "ttft_p99_ms": 3.0}
    assert percentiles_ms("ttft", [1.0, 3.0]) == {"ttft_p50_ms": 2.0, "ttft_p99_ms": 3.0}


async def generate(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    answer = web.StreamResponse()
    await answer.prepare(request)
    for tokens in range(1, body["sampling_params"]["max_new_tokens"] + 1):
        seen = {"num_retractions": 0, "prompt_tokens": 40, "completion_tokens": tokens}
        event = {"output_ids": list(range(tokens)), "meta_info": seen}
        await answer.write(b"data: %b\n\n" % json.dumps(event, separators=(",", ":")).encode())
    return answer


async def loads(_: web.Request) -> web.Response:
    load = {"max_total_num_tokens": 9_000, "max_running_requests": 4}
    return web.json_response({"loads": [load]})


async def measured_and_compared() -> tuple[Capacity, dict[str, Any]]:
    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_get("/v1/loads", loads)
    async with TestServer(app) as server, clients() as http:
        url = str(server.make_url("")).rstrip("/")
        capacity = await measured(http, url, Texts(), streams=8)
        few = replace(capacity, decode_per_s=1.0)
        urls = {"ours": url, "stock": url, "balancer": url}
        return capacity, await compared(http, urls, Texts(), few, rounds=2)


def test_an_engine_is_measured_and_arms_are_compared() -> None:
    capacity, found = asyncio.run(measured_and_compared())
    assert (capacity.pool_tokens, capacity.slots, capacity.streams) == (9_000, 4, 4)
    assert capacity.prefill_per_s > 0 < capacity.decode_per_s
    decoding = found["decoding"]
    assert (decoding["streams"], decoding["answer_tokens"]) == (4, 16)
    for name in ("ours", "stock", "balancer"):
        assert decoding[name]["tokens_per_s"]["rounds"] == 2
    assert decoding["balancer"]["stream_tokens_per_s_ratio"]["rounds"] == 2
    assert found["tokens_per_s_ratio"]["rounds"] == 2
