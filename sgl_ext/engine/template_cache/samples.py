"""Conversations that tell apart two ways to render a chat template."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"To {name} a file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
    for name in ("read", "write")
]
_TOKENS = {"tools": None, "documents": None, "bos_token": "<s>", "eos_token": "</s>"}


def samples() -> Iterator[dict[str, Any]]:
    """What a template is rendered with: chats turn by turn, edited and branched ones, with and
    without tools and thinking, texts as strings and as lists of parts."""
    calls: tuple[Any, Any] = {"path": "a", "n": 1}, '{"path": "a"}'
    several: list[tuple[str | None, Any, dict[str, Any]]] = [
        ("system", calls[0], {}),
        ("system", calls[1], {"tools": _TOOLS, "enable_thinking": True}),
        ("developer", calls[0], {"tools": _TOOLS, "enable_thinking": False}),
        (None, calls[0], {"tools": _TOOLS}),
    ]
    for first, arguments, options in several:
        chat = list(_chat(first, arguments))
        edited = copy.deepcopy(chat)
        edited[1]["content"] = "Another task"
        as_parts = [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            for message in chat
            if isinstance(message["content"], str)
        ]
        for messages in (chat, edited, as_parts):
            for length in range(1, len(messages) + 1):
                yield {
                    **_TOKENS,
                    **options,
                    "messages": messages[:length],
                    "add_generation_prompt": messages[length - 1]["role"] != "assistant",
                }


def _chat(first: str | None, arguments: Any) -> Iterator[dict[str, Any]]:
    if first:
        yield {"role": first, "content": "You help."}
    yield {"role": "user", "content": "A task"}
    for step in range(3):
        calls = [_call(f"c{step}00000{n}", name, arguments) for n, name in enumerate(_names(step))]
        yield {
            "role": "assistant",
            "content": "Looking" if step else "",
            "reasoning_content": f"thought {step}",
            "tool_calls": calls,
        }
        for call in calls:
            result = {"role": "tool", "content": "done", "tool_call_id": call["id"]}
            yield {**result, "name": call["function"]["name"]}
    yield {"role": "assistant", "content": "<think>\nwell\n</think>\n\nIt is done"}
    yield {"role": "user", "content": "<tool_response>not one</tool_response>"}
    yield {"role": "user", "content": " A new task\n"}
    calls = [_call("d00000000", "read", arguments)]
    yield {"role": "assistant", "content": None, "tool_calls": calls}
    yield {"role": "tool", "content": "done", "tool_call_id": "d00000000", "name": "read"}
    yield {"role": "assistant", "content": "Once more"}
    yield {"role": "user", "content": "Thanks"}


def _names(step: int) -> list[str]:
    return ["read", "write"] if step == 1 else ["read"]


def _call(number: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
