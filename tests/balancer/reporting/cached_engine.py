"""A scripted engine with a cache: it answers in three protocols, and tells what it holds."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import orjson
from aiohttp import web

from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.segments import read_chain
from tests.balancer.conftest import Engine
from tests.prompts.examples import CHAT, MESSAGES, RESPONSES

_numbers = count(1)
STREAM = {"content-type": "text/event-stream"}


class CachedEngine(Engine):
    """Holds all prompts that it was sent, until it is flushed. A token has 4 bytes.

    ids: of its answers. rendered_anew: how many tokens it reads less than it holds.
    """

    def __init__(self, name: str = "a") -> None:
        super().__init__(name, self._answer)
        lines: asyncio.Queue[bytes] = asyncio.Queue()
        self.events.append(lines)
        self._held: dict[int, int] = {}
        self._seq = 0
        self.ids: list[str] = []
        self.rendered_anew = 0
        self._write(snapshot=True, cleared=True, complete=True, publishes=["prefixes"])

    @property
    def held_segments(self) -> int:
        return len(self._held)

    def flush(self) -> None:
        self._held.clear()
        self._write(cleared=True)

    def _write(self, **event: Any) -> None:
        self._seq += 1
        line = orjson.dumps({"seq": self._seq, **event}, option=orjson.OPT_APPEND_NEWLINE)
        self.events[0].put_nowait(line)

    def _run(self, path: str, body: Any) -> tuple[int, int]:
        """The prompt's tokens, and how many of them were cached."""
        chain = read_chain(of_path(path), body)
        cached, before = 0, None
        for segment, end in zip(chain.hashes, chain.ends, strict=True):
            if segment in self._held:
                cached = end // 4
            else:
                self._held[segment] = end // 4
                parent = None if before is None else f"{before:032x}"
                self._write(stored=[(f"{segment:032x}", parent, end // 4)])
            before = segment
        return chain.ends[-1] // 4 + 5, max(cached - self.rendered_anew, 0)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        tokens, cached = self._run(request.path, body)
        self.ids.append(f"{_PREFIXES[request.path]}{next(_numbers)}")
        events = _EVENTS[request.path](self.ids[-1], body, tokens, cached)
        if not body.get("stream"):
            return web.json_response(_whole(request.path, events))
        sent = web.StreamResponse(headers=STREAM)
        await sent.prepare(request)
        for event in events:
            name = f"event: {event['type']}\n" if "type" in event else ""
            await sent.write(f"{name}data: {orjson.dumps(event).decode()}\n\n".encode())
        if request.path == CHAT:
            await sent.write(b"data: [DONE]\n\n")
        return sent


# Text that looks like an event, and that is none.
TEXT = '"id": "no", "finish_reason":"stop"\nevent: message_start\ndata: {"message":{"id":"no"}}'


def _messages(id: str, _: Any, tokens: int, cached: int) -> list[dict[str, Any]]:
    usage = {"input_tokens": tokens - cached, "cache_read_input_tokens": cached}
    message = {"id": id, "type": "message", "role": "assistant", "content": [], "usage": usage}
    delta = {"type": "text_delta", "text": TEXT}
    return [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage},
        {"type": "message_stop"},
    ]


def _responses(id: str, _: Any, tokens: int, cached: int) -> list[dict[str, Any]]:
    begun = {"id": id, "object": "response", "status": "in_progress", "output": []}
    usage = {"input_tokens": tokens, "input_tokens_details": {"cached_tokens": cached}}
    said = {"type": "message", "id": "msg_x", "content": [{"type": "output_text", "text": TEXT}]}
    done = begun | {"status": "completed", "output": [said], "usage": usage}
    return [
        {"type": "response.created", "response": begun},
        {"type": "response.output_text.delta", "delta": TEXT},
        {"type": "response.completed", "response": done},
    ]


def _chat(id: str, body: Any, tokens: int, cached: int) -> list[dict[str, Any]]:
    about = {"id": id, "object": "chat.completion.chunk"}
    usage = {"prompt_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}
    chunks = [
        {**about, "choices": [{"index": 0, "delta": {"content": TEXT}, "finish_reason": None}]},
        {**about, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ]
    if not body.get("stream") or (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**about, "choices": [], "usage": usage})
    return chunks


def _whole(path: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    if path == CHAT:
        return events[-1] | {"object": "chat.completion"}
    whole: dict[str, Any] = events[0]["message"] if path == MESSAGES else events[-1]["response"]
    return whole


_EVENTS = {MESSAGES: _messages, RESPONSES: _responses, CHAT: _chat}
_PREFIXES = {MESSAGES: "msg_", RESPONSES: "resp_", CHAT: "chatcmpl-"}
