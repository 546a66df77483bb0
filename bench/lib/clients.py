"""A client of `/v1/messages` and `/v1/chat/completions`, which reads each stream to its end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
from sgl_ext_cpu.node import Node

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
_BEFORE_ANSWER = ("message_start", "ping")


@dataclass
class Answer:
    """One request as its client saw it.

    marked_tokens: through `/v1/messages`, the prompt's tokens up to its last mark.
    ttft_ms: to the first event of the answer itself. seconds: to its end.
    is_whole: it ended as an answer does; false if it was refused, cut or aborted.
    answer_tokens, calls: through `/v1/chat/completions`.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    marked_tokens: int = 0
    ttft_ms: float = 0.0
    is_whole: bool = False
    answer_tokens: int = 0
    seconds: float = field(default=0.0, compare=False)
    content: str = field(default="", compare=False)
    thought: str = field(default="", compare=False)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict, compare=False)

    @property
    def text(self) -> str:
        """All that the model said."""
        return self.thought + self.content

    @property
    def message(self) -> dict[str, Any]:
        """What a client of chat completions sends back for it."""
        said = {"content": self.content, "reasoning_content": self.thought}
        calls = {"tool_calls": list(self.calls.values())} if self.calls else {}
        return {"role": "assistant", **said, **calls}


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    path: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Sends one request, greedy and streamed, and reads its answer to the end."""
    seen, started = Answer(), time.perf_counter()
    sent = {**body, "temperature": 0, "stream": True}
    if path == CHAT:
        sent["stream_options"] = {"include_usage": True}
    try:
        async with http.post(url + path, json=sent, headers=headers) as response:
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    seen.is_whole = response.status == HTTPStatus.OK and seen.prompt_tokens > 0
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if not seen.ttft_ms and event.get("type") not in _BEFORE_ANSWER:
                        seen.ttft_ms = (time.perf_counter() - started) * 1000
                    take(seen, event)
    except aiohttp.ClientError:
        seen.is_whole = False
    seen.seconds = time.perf_counter() - started
    return seen


def ask_once(node: Node, path: str, body: Mapping[str, Any]) -> Answer:
    """One request over a connection of its own. Raises RuntimeError if it is not answered whole."""

    async def asked() -> Answer:
        async with clients() as http:
            return await ask(http, node.url, path, body)

    seen = asyncio.run(asked())
    if not seen.is_whole:
        raise RuntimeError(f"{path}: a request is not answered whole")
    return seen


def take(seen: Answer, event: Mapping[str, Any]) -> None:
    """Takes one event of either protocol."""
    kind = event.get("type")
    if kind == "message_start":
        usage = event["message"]["usage"]
        seen.cached_tokens = usage.get("cache_read_input_tokens") or 0
        seen.marked_tokens = seen.cached_tokens + (usage.get("cache_creation_input_tokens") or 0)
        seen.prompt_tokens = seen.marked_tokens + usage["input_tokens"]
    elif kind == "message_stop":
        seen.is_whole = True
    elif usage := event.get("usage") if kind is None else None:
        details = usage.get("prompt_tokens_details") or {}
        seen.prompt_tokens = usage["prompt_tokens"]
        seen.answer_tokens = usage.get("completion_tokens") or 0
        seen.cached_tokens = details.get("cached_tokens") or 0
    delta = event["choices"][0]["delta"] if event.get("choices") else event.get("delta") or {}
    seen.content += delta.get("content") or delta.get("text") or ""
    seen.thought += delta.get("reasoning_content") or delta.get("thinking") or ""
    for part in delta.get("tool_calls") or ():
        call = seen.calls.setdefault(part["index"], {"id": part.get("id"), "type": "function"})
        function = call.setdefault("function", {"name": "", "arguments": ""})
        for name in function:
            function[name] += part["function"].get(name) or ""


def clients() -> aiohttp.ClientSession:
    """Connections for as many requests at once as a load has. An engine closes what is idle for
    5 s."""
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
    return aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 22)
