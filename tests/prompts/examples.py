"""Prompts of a made-up agent, as three protocols write them."""

from __future__ import annotations

from typing import Any

MESSAGES = "/v1/messages"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
RULE = "Work in small steps, and tell what you did.\n"
SYSTEM = "You are a coding agent.\n" + "".join(f"{n}. {RULE}" for n in range(60))
TOOLS = [
    {"name": name, "description": f"{name} something. " * 20, "input_schema": {"type": "object"}}
    for name in ("Bash", "Edit", "Glob", "Grep", "Read", "Write")
]


def turns(count: int, first: str = "Find the bug.", task: str = "it") -> list[dict[str, Any]]:
    """A user's words, and `count` turns of the model each followed by a tool's result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": first}]
    for number in range(count):
        call = {"type": "tool_use", "id": f"t{number}", "name": "Read", "input": {"n": number}}
        said = {"type": "text", "text": f"I look at part {number} of {task} now. " * 4}
        result = {
            "type": "tool_result",
            "tool_use_id": f"t{number}",
            "content": f"line {number} of what stands there\n" * 12,
        }
        messages.append({"role": "assistant", "content": [said, call]})
        messages.append({"role": "user", "content": [result]})
    return messages


def messages(count: int = 0, **changed: Any) -> dict[str, Any]:
    """A body of /v1/messages."""
    system = [{"type": "text", "text": "You are an agent."}, {"type": "text", "text": SYSTEM}]
    body = {"model": "m", "system": system, "tools": TOOLS, "messages": turns(count)}
    return {**body, **changed}


def system(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]
