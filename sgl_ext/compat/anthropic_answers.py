"""Completes SGLang's answers on /v1/messages: stop reasons, usage and signatures of thinking.

SGLang answers `end_turn` for each stop reason that it has no word for. Here a matched stop sequence
is named, and a filtered answer is a refusal. An aborted answer is an error, so that no client takes
half an answer for a whole one. SGLang's usage lacks what the request's marks wrote to the cache,
and at the end of a stream it lacks the prompt's counts, which some clients read only there.

Clients of Anthropic leave thinking without a signature out of the next request, which then does not
continue what is cached. So each block of thinking is signed. No signature is ever verified.

    fault     answers of /v1/messages lack stop sequences, refusals, usage and signatures
    hooks     group "answers of messages"
    test      tests/compat/test_anthropic_answers.py
    upstream  docs/upstream/answer-numbers-beyond-json.patch, for numbers; none for the rest
    ends with a version whose answers have these fields
"""

import base64
import hashlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

import orjson

from sgl_ext.compat.tool_calls import ObjectEnd, marks_ends, with_marks
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import RequestContext, current
from sgl_ext.engine.sglang_types import Original
from sgl_ext.protocols.anthropic import ANTHROPIC
from sgl_ext.reading.rewriting import is_object, text_of
from sgl_ext.reading.usage import with_cache_creation

ABORTED = "The answer was aborted before it was complete."
_EVENT, _DATA, _END = "event: ", "\ndata: ", "\n\n"
_FINISH_REASON = '"finish_reason":"'
_USAGE = '"usage":{'
_CALL_BLOCK = '"content_block":{"type":"tool_use"'
_THINKING_BLOCK = '"content_block":{"type":"thinking"'
_NO_STOP = {"stop_reason": None, "stop_sequence": None}
_THINKING_TOKENS = re.compile(r'"usage":\{[^{}]*(?:\{[^{}]*\}[^{}]*)*"reasoning_tokens":(\d+)')
_key = secrets.token_bytes(32)


def note_finish_reason(original: Original, serving: Any, response: Any) -> Any:
    """Around `AnthropicServing._convert_response`: notes why a whole answer ended, and has words
    and calls in the order in which the model wrote them.

    Arguments of a tool call that are no object, as in an answer that was cut off, are put into one:
    SGLang would fail on them, or leave them out.
    """
    context = current()
    choice = response.choices[0] if response.choices else None
    if context is not None and choice is not None:
        context.finish_reason, context.matched_stop = choice.finish_reason, choice.matched_stop
        usage = getattr(response, "usage", None)
        context.thinking_tokens = getattr(usage, "reasoning_tokens", None) or 0
        if choice.finish_reason == "abort":
            from fastapi import HTTPException

            raise HTTPException(HTTPStatus.INTERNAL_SERVER_ERROR, ABORTED)
        for call in choice.message.tool_calls or ():
            call.function.arguments = _as_object(call.function.arguments)
    made = original(serving, response)
    if context is not None and len(context.parts) > 1:
        made.content = _in_order(made.content, context.parts)
    return made


def _in_order(blocks: list[Any], parts: tuple[str | int, ...]) -> list[Any]:
    """The blocks of an answer with its words between the calls."""
    calls = [block for block in blocks if block.type == "tool_use"]
    text = next((block for block in blocks if block.type == "text"), None)
    if text is None or not calls:
        return blocks
    said = [
        calls[part] if isinstance(part, int) else text.model_copy(update={"text": part})
        for part in parts
    ]
    return [*(block for block in blocks if block.type == "thinking"), *said]


def watch_stream(original: Original, *args: Any, **kw: Any) -> Any:
    """Around `OpenAIServingChat._generate_chat_stream`, which Anthropic's stream is made of: notes
    why the answer ended. A chat completion's marks the ends of calls, if its client asks for it."""
    stream = original(*args, **kw)
    context = current()
    if context is not None and context.path in ANTHROPIC.paths:
        return _watched(stream, context)
    return with_marks(stream) if context is not None and marks_ends(context.body) else stream


async def _watched(stream: AsyncIterator[str], context: RequestContext) -> AsyncIterator[str]:
    async for line in _with_usage_at_the_end(stream):
        if found := _THINKING_TOKENS.search(line):
            context.thinking_tokens = int(found[1])
        is_end = _FINISH_REASON in line and line.startswith("data: {")
        for choice in orjson.loads(line[6:]).get("choices") or () if is_end else ():
            if reason := choice.get("finish_reason"):
                context.finish_reason, context.matched_stop = reason, choice.get("matched_stop")
                if reason == "abort":
                    error = {"message": ABORTED, "type": "server_error", "code": 500}
                    yield f"data: {orjson.dumps({'error': error}).decode()}\n\n"
                    return
        yield line


async def _with_usage_at_the_end(stream: AsyncIterator[str]) -> AsyncIterator[str]:
    """A stream whose end has the usage that follows it, if nothing before it had one.

    SGLang begins a message with the first chunk that has content or ends the answer. An answer of
    which nothing is shown, as one that is cut in its markup, would begin with a usage of zeros.
    """
    has_usage, held = False, ""
    async for line in stream:
        if held:
            if _USAGE in line:
                chunk = orjson.loads(held[6:]) | {"usage": orjson.loads(line[6:]).get("usage")}
                held = f"data: {orjson.dumps(chunk).decode()}{_END}"
            yield held
            held = ""
        has_usage = has_usage or _USAGE in line
        if not has_usage and _FINISH_REASON in line and line.startswith("data: {"):
            held = line
        else:
            yield line
    if held:
        yield held


def _as_object(arguments: Any) -> Any:
    if not is_object(arguments) and arguments:
        counter("translated_parts").labels(ANTHROPIC.paths[0], "tool_use_input").inc()
    return text_of(arguments)


def with_stop_reason(document: dict[str, Any]) -> dict[str, Any]:
    """A `message`, or the delta that ends its stream, with the stop reason in Anthropic's words."""
    context = current()
    if context is None:
        return document
    if context.finish_reason == "content_filter":
        return document | {"stop_reason": "refusal"}
    sequences = context.body.get("stop_sequences") if isinstance(context.body, dict) else None
    matched = context.matched_stop
    if context.finish_reason == "stop" and isinstance(sequences, list) and matched in sequences:
        return document | {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return document


async def complete_answer(original: Original, *args: Any, **kw: Any) -> Any:
    """Around `AnthropicServing._handle_non_streaming`."""
    answer = await original(*args, **kw)
    if answer.status_code != 200:
        return answer
    # Not orjson, which makes floats of large integers.
    document = _NO_STOP | with_stop_reason(json.loads(answer.body))
    document["usage"] = _completed_usage(document["usage"]) | _thinking_tokens()
    # SGLang has one of no text if the answer ends in its thinking.
    document["content"] = [each for each in document["content"] if not _is_empty(each)]
    for block in document["content"]:
        if block["type"] == "thinking":
            block["signature"] = _signature(_hash_of_thinking(block["thinking"]))
    return type(answer)(content=document)


async def complete_stream(original: Original, *args: Any, **kw: Any) -> AsyncIterator[str]:
    """Around `AnthropicServing._generate_anthropic_stream`, which yields event after event."""
    async for event in original(*args, **kw):
        name, _, data = event.removeprefix(_EVENT).partition(_DATA)
        if completed := complete_event(_written, data.removesuffix(_END), name):
            yield completed


def _written(data: str, event_type: str) -> str:
    return f"{_EVENT}{event_type}{_DATA}{data}{_END}"


def complete_event(original: Callable[[str, str], str], data: str, event_type: str) -> str:
    """An event of a stream, with what SGLang leaves out, and what follows it; "" if it was sent.
    original: writes an event."""
    context = current()
    if context is None:
        return original(data, event_type)
    if event_type == "message_start":
        document = orjson.loads(data)
        context.usage = _completed_usage(document["message"]["usage"]) | _thinking_tokens()
        document["message"] = _NO_STOP | document["message"] | {"usage": context.usage}
        data = orjson.dumps(document).decode()
    elif event_type == "message_delta":
        document = orjson.loads(data)
        document["delta"] = _NO_STOP | with_stop_reason(document["delta"])
        document["usage"] = (context.usage or {}) | document["usage"] | _thinking_tokens()
        data = orjson.dumps(document).decode()
    elif event_type == "content_block_start" and _THINKING_BLOCK in data:
        document, context.thinking = orjson.loads(data), _hash_of_thinking()
        document["content_block"]["signature"] = ""
        data = orjson.dumps(document).decode()
    elif event_type == "content_block_delta" and context.thinking is not None:
        context.thinking.update(orjson.loads(data)["delta"]["thinking"].encode())
    elif event_type == "content_block_start" and _CALL_BLOCK in data:
        context.call_end = ObjectEnd()
    elif context.call_end is not None and event_type.startswith("content_block"):
        return _with_end(original, data, event_type, context)
    elif event_type == "content_block_stop" and context.thinking is not None:
        delta = {"type": "signature_delta", "signature": _signature(context.thinking)}
        index, context.thinking = orjson.loads(data)["index"], None
        signed = {"type": "content_block_delta", "index": index, "delta": delta}
        return original(orjson.dumps(signed).decode(), signed["type"]) + original(data, event_type)
    return original(data, event_type)


def _with_end(
    original: Callable[[str, str], str], data: str, event_type: str, context: RequestContext
) -> str:
    """An event of a call, with the end of the call as soon as its arguments are complete."""
    end = context.call_end
    if event_type == "content_block_stop":
        context.call_end = None
    if end.is_complete:  # its end is sent
        return ""
    event = original(data, event_type)
    if event_type == "content_block_delta":
        document = orjson.loads(data)
        if end.completed_by(document["delta"].get("partial_json", "")):
            stop = {"type": "content_block_stop", "index": document["index"]}
            return event + original(orjson.dumps(stop).decode(), stop["type"])
    return event


def _is_empty(block: dict[str, Any]) -> bool:
    return block["type"] == "text" and block.get("text") == ""


def _thinking_tokens() -> dict[str, Any]:
    """What the usage says of the output tokens in detail."""
    context = current()
    tokens = 0 if context is None else context.thinking_tokens
    return {"output_tokens_details": {"thinking_tokens": tokens}}


def _hash_of_thinking(text: str = "") -> Any:
    """The keyed hash of thinking, to which more of it can be added."""
    return hashlib.blake2b(text.encode(), digest_size=32, key=_key)


def _signature(thinking: Any) -> str:
    return base64.b64encode(thinking.digest()).decode()


def _completed_usage(usage: dict[str, Any]) -> dict[str, Any]:
    context = current()
    prompt = (usage.get("input_tokens") or 0) + (usage.get("cache_read_input_tokens") or 0)
    pins = () if context is None else context.pins
    marked = [(prompt if tokens < 0 else tokens, ttl_s) for tokens, ttl_s in pins]
    completed = with_cache_creation(usage, marked)
    if context is not None and context.marks.clamped_s:
        completed["cache_creation"]["granted_ttl_s"] = context.marks.clamped_s
    return completed
