"""How an answer on /v1/messages ended, where SGLang says `end_turn` for all it has no word for.

A stop sequence that ended it is named, and what was filtered is a refusal. An answer that was
aborted did not end: it is an error, so that nobody takes half of it for the whole.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

import orjson

from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.hints import Reading, current

PATH = "/v1/messages"
ABORTED = "The answer was aborted before it was complete."
_MARK = '"finish_reason":"'


def note_ending(original: Callable[..., Any], serving: Any, response: Any) -> Any:
    """Around `AnthropicServing._convert_response`: keeps how a whole answer ended.

    A call whose input is no object, as in an answer that was cut in it, would fail there.
    """
    reading = current()
    choice = response.choices[0] if response.choices else None
    if reading is not None and choice is not None:
        reading.ending = (choice.finish_reason, choice.matched_stop)
        if choice.finish_reason == "abort":
            from fastapi import HTTPException

            raise HTTPException(HTTPStatus.INTERNAL_SERVER_ERROR, ABORTED)
        for call in choice.message.tool_calls or ():
            call.function.arguments = _as_object(call.function.arguments)
    return original(serving, response)


def watch_stream(original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Around `OpenAIServingChat._generate_chat_stream`: keeps how the answer ends, for Anthropic's
    protocol alone, which is made of this stream."""
    stream = original(*args, **kw)
    reading = current()
    return stream if reading is None or reading.path != PATH else _watched(stream, reading)


async def _watched(stream: AsyncIterator[str], reading: Reading) -> AsyncIterator[str]:
    async for line in stream:
        if _MARK in line and line.startswith("data: {"):
            for choice in orjson.loads(line[6:]).get("choices") or ():
                if choice.get("finish_reason"):
                    reading.ending = (choice["finish_reason"], choice.get("matched_stop"))
                    if choice["finish_reason"] == "abort":
                        error = {"message": ABORTED, "type": "server_error", "code": 500}
                        yield f"data: {orjson.dumps({'error': error}).decode()}\n\n"
                        return
        yield line


def _as_object(arguments: Any) -> Any:
    """A call's arguments, as an object if they are any JSON; SGLang takes no JSON for none."""
    try:
        given = orjson.loads(arguments or "{}")
    except (orjson.JSONDecodeError, TypeError):
        return arguments
    if isinstance(given, dict):
        return arguments
    counter("translated").labels(PATH, "tool_use_input").inc()
    return "{}" if given is None else orjson.dumps({"input": given}).decode()


def with_ending(told: dict[str, Any]) -> dict[str, Any]:
    """A `message`, or the delta that ends its stream, with how it ended in Anthropic's words."""
    reading = current()
    if reading is None or reading.ending is None:
        return told
    reason, matched = reading.ending
    if reason == "content_filter":
        return told | {"stop_reason": "refusal"}
    sequences = reading.body.get("stop_sequences") if isinstance(reading.body, dict) else None
    if reason == "stop" and isinstance(sequences, list) and matched in sequences:
        return told | {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return told
