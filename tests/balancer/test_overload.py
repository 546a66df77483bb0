"""Rejected requests are retried: the real Python SDKs do it by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import ClientSession, web

from tests.balancer.conftest import Engine, Start

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

USER = [{"role": "user", "content": "Say hello."}]
USAGE = {"input_tokens": 1, "output_tokens": 1}
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "Hello."}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": USAGE,
}
CHOICE = {
    "index": 0,
    "finish_reason": "stop",
    "message": {"role": "assistant", "content": "Hello."},
}
CHAT = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [CHOICE]}
RESPONSE = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "output": []}


def _claude(url: str) -> Any:
    return anthropic.AsyncAnthropic(base_url=url, api_key="any")


def _gpt(url: str) -> Any:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any")


async def _message(client: Any) -> Any:
    return await client.messages.create(model="m", max_tokens=8, messages=USER)


async def _chat(client: Any) -> Any:
    return await client.chat.completions.create(model="m", messages=USER)


async def _respond(client: Any) -> Any:
    return await client.responses.create(model="m", input="Say hello.")


@pytest.mark.parametrize(
    ("sdk", "ask", "answer", "error"),
    [
        (_claude, _message, MESSAGE, "OverloadedError"),
        (_gpt, _chat, CHAT, "InternalServerError"),
        (_gpt, _respond, RESPONSE, "InternalServerError"),
    ],
)
async def test_an_sdk_retries_by_itself_and_is_answered(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    sdk: Callable[[str], Any],
    ask: Callable[[Any], Any],
    answer: dict[str, Any],
    error: str,
) -> None:
    busy, free = asyncio.Event(), asyncio.Event()

    async def answer_at_last(request: web.Request) -> web.Response:
        if not free.is_set():
            busy.set()
            await free.wait()
        return web.json_response(answer)

    engine = Engine("a", answer_at_last)
    client = await start(engine, max_in_flight=1, queue_limit=0)
    first = asyncio.create_task(client.post("/generate", json={"text": "first"}))
    await busy.wait()

    waits: list[float] = []
    async with sdk(_url(client)) as harness:
        with pytest.raises(Exception, match="busy") as raised:
            await ask(harness.with_options(max_retries=0))
        assert type(raised.value).__name__ == error
        assert raised.value.request_id.startswith("req_")

        async def wait(*, options: Any, response: Any, **_: Any) -> None:
            waits.append(harness._calculate_retry_timeout(1, options, response.headers))
            free.set()
            await first

        monkeypatch.setattr(harness, "_sleep_for_retry", wait)
        got = await ask(harness)

    assert got._request_id.startswith("req_")
    assert waits == [5.0], "the time in Retry-After"
    assert len(engine.seen) == 2


def _url(client: ClientSession) -> str:
    return str(client._base_url).rstrip("/")
