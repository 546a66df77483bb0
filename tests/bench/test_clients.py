"""The benches' client: what it sends, and what it makes of a stream."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.lib.clients import CHAT, MESSAGES, Answer, ask, clients
from bench.lib.texts import Texts
from bench.lib.voice import Voice
from bench.speculative_prefill import Load, Round, Stage

USAGE = {
    "prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}
}  # fmt: skip
CALL = {"index": 0, "id": "a", "function": {"name": "next", "arguments": "{}"}}
MARKED = {"input_tokens": 5, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 1}


async def stream(request: web.Request, events: list[Any]) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for event in events:
        text = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"))
        await response.write(f"data: {text}\n\n".encode())
    return response


async def chat(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if body["model"] == "refused":
        return web.json_response({"error": {"message": "no"}}, status=503)
    assert (body["temperature"], body["stream"]) == (0, True)
    is_call = "tools" in body and body["messages"][-1]["role"] == "user"
    said = {"tool_calls": [CALL]} if is_call else {"content": "so"}
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm "}, said]
    chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
    return await stream(request, [*chunks, {"choices": [], "usage": USAGE}, "[DONE]"])


async def messages(request: web.Request) -> web.StreamResponse:
    delta = {"type": "content_block_delta", "delta": {"text": "so"}}
    ends = [{"type": "message_stop"}] if (await request.json())["model"] == "whole" else []
    return await stream(
        request, [{"type": "message_start", "message": {"usage": MARKED}}, delta, *ends]
    )


async def generate(request: web.Request) -> web.StreamResponse:
    count = (await request.json())["sampling_params"]["max_new_tokens"]
    meta = {"num_retractions": 0, "prompt_tokens": 40, "completion_tokens": count}
    return await stream(request, [{"output_ids": [1] * count, "meta_info": meta}])


def with_server(asked: Any) -> Any:
    async def run() -> Any:
        app = web.Application()
        app.router.add_post(CHAT, chat)
        app.router.add_post(MESSAGES, messages)
        app.router.add_post("/generate", generate)
        async with TestServer(app) as server, clients() as http:
            return await asked(http, str(server.make_url("")).rstrip("/"))

    return asyncio.run(run())


def asked_for(path: str, model: str) -> Answer:
    return cast(Answer, with_server(lambda http, url: ask(http, url, path, body(model))))


def body(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "look"}]}


def test_an_answer_of_each_protocol_is_read_to_its_end() -> None:
    seen = asked_for(CHAT, "whole")
    assert (seen.prompt_tokens, seen.cached_tokens, seen.answer_tokens) == (9, 4, 3)
    assert (seen.is_whole, seen.text) == (True, "hm so")
    assert 0 < seen.ttft_ms <= seen.seconds * 1000
    seen = asked_for(MESSAGES, "whole")
    assert (seen.prompt_tokens, seen.cached_tokens, seen.marked_tokens) == (9, 3, 4)
    assert (seen.is_whole, seen.text) == (True, "so")


def test_an_answer_that_is_refused_or_cut_is_not_whole() -> None:
    assert not asked_for(CHAT, "refused").is_whole
    assert not asked_for(MESSAGES, "cut").is_whole


def test_a_round_of_people_is_played_to_its_end() -> None:
    letters = SimpleNamespace(
        encode=lambda text: SimpleNamespace(ids=[*text.encode()], tokens=[*text])
    )
    load = Load(people=2, turns=2, pause_s=(0, 0), tool_s=(0, 0), start_s=0, others_pause_s=0.01)

    async def play(http: Any, url: str) -> Round:
        return await Stage(http, url, Texts(), Voice(letters)).play(load, "naive", "Round 0")

    seen = cast(Round, with_server(play))
    assert (len(seen.turns), len(seen.results), len(seen.warm_ups)) == (4, 4, 4)
    assert all(turn.seen.is_whole and turn.seen.calls for turn in seen.turns)
    assert all(answer.is_whole for answer in [*seen.results, *seen.warm_ups])
    assert seen.others_ms
