"""Requests of a coding agent, as bytes for `bench.lib.load`."""

from __future__ import annotations

from typing import Any

import orjson


def agent_request(session: int, size: int, *, stream: bool) -> bytes:
    """A chat completion of an agent's session, of about `size` bytes."""
    body: dict[str, Any] = {
        "model": "bench",
        "messages": [{"role": "system", "content": f"You are agent {session}. Be brief."}],
        "tools": [_tool(number) for number in range(20 if size > 10_000 else 2)],
        "max_tokens": 64,
        "stream": stream,
    }
    if size < 1000:
        del body["tools"]
    turn = 0
    while len(orjson.dumps(body)) < size:
        turn += 1
        text = f"Turn {turn} of session {session}. " + "The file says this and that. " * 60
        role = "user" if turn % 2 else "assistant"
        body["messages"].append({"role": role, "content": text[: max(20, min(1800, size // 4))]})
    data = orjson.dumps(body)
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: */*\r\n"
        b"user-agent: bench/1\r\nauthorization: Bearer none\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    return head % len(data) + data


def _tool(number: int) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"path": {"type": "string", "description": "Where to look."}},
        "required": ["path"],
    }
    function = {"name": f"tool_{number}", "description": "Reads.", "parameters": parameters}
    return {"type": "function", "function": function}
