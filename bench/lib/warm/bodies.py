"""One chat as the body of a request of each protocol, as agents send it.

The chat is in the words of `/v1/messages`. All three bodies have the same prompt, but for its last
tokens, so its prefix is computed once for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Json = dict[str, Any]
_MARK = {"cache_control": {"type": "ephemeral"}}
_COMMON = {"model": "bench", "temperature": 0, "stream": True}


def messages_body(
    system: str, tools: Sequence[Json], messages: Sequence[Json], answer_tokens: int
) -> Json:
    """For `/v1/messages`, as Claude Code marks it."""
    *earlier, last = messages
    content = last["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    last = {**last, "content": [*content[:-1], {**content[-1], **_MARK}]}
    return {
        **_COMMON,
        "max_tokens": answer_tokens,
        "thinking": {"type": "disabled"},
        "system": [{"type": "text", "text": system, **_MARK}],
        "tools": [*tools],
        "messages": [*earlier, last],
    }


def chat_body(
    system: str, tools: Sequence[Json], messages: Sequence[Json], answer_tokens: int
) -> Json:
    """For `/v1/chat/completions`, as OpenCode sends it."""
    turns = [{"role": "system", "content": system}, *_chat_messages(messages)]
    return {
        **_COMMON,
        "max_tokens": answer_tokens,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
        "tools": [{"type": "function", "function": _function(tool)} for tool in tools],
        "messages": turns,
    }


def responses_body(
    system: str, tools: Sequence[Json], messages: Sequence[Json], answer_tokens: int
) -> Json:
    """For `/v1/responses`, as Codex sends it: the whole history, and nothing is stored."""
    return {
        **_COMMON,
        "max_output_tokens": answer_tokens,
        "store": False,
        "prompt_cache_key": "warm",
        "instructions": system,
        "tools": [{"type": "function", **_function(tool)} for tool in tools],
        "input": [*_items(messages)],
    }


BODIES: dict[str, Callable[[str, Sequence[Json], Sequence[Json], int], Json]] = {
    "/v1/messages": messages_body,
    "/v1/chat/completions": chat_body,
    "/v1/responses": responses_body,
}
"""By path: what makes the body of a chat's system text, tools and messages, and of how many tokens
its answer may have."""


def _function(tool: Json) -> Json:
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    # On `/v1/messages` SGLang writes `strict` into the prompt.
    return {name: tool[field] for field, name in names.items()} | {"strict": False}


def _blocks(message: Json) -> list[Json]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _chat_messages(messages: Sequence[Json]) -> Iterator[Json]:
    for message in messages:
        said: Json = {"role": message["role"], "content": ""}
        for block in _blocks(message):
            if block["type"] == "tool_result":
                answer = {"tool_call_id": block["tool_use_id"], "content": block["content"]}
                yield {"role": "tool", **answer}
            elif block["type"] == "tool_use":
                function = {"name": block["name"], "arguments": json.dumps(block["input"])}
                call = {"id": block["id"], "type": "function", "function": function}
                said.setdefault("tool_calls", []).append(call)
            else:
                said["content"] += block["text"]
        if said["content"] or "tool_calls" in said:
            yield said


def _items(messages: Sequence[Json]) -> Iterator[Json]:
    for message in messages:
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        for block in _blocks(message):
            if block["type"] == "tool_result":
                answer = {"call_id": block["tool_use_id"], "output": block["content"]}
                yield {"type": "function_call_output", **answer}
            elif block["type"] == "tool_use":
                arguments = json.dumps(block["input"])
                call = {"call_id": block["id"], "name": block["name"], "arguments": arguments}
                yield {"type": "function_call", **call}
            else:
                text = {"type": kind, "text": block["text"]}
                yield {"type": "message", "role": message["role"], "content": [text]}
