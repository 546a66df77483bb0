"""The bodies of bench/warm_turn: all protocols send the same chat."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.lib.warm.bodies import BODIES

TOOLS = [{"name": "Read", "description": "Reads", "input_schema": {"type": "object"}}]
USE = {"type": "tool_use", "id": "t1", "name": "Read", "input": {"path": "a.py"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "Found."}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Begin."},
    {"role": "assistant", "content": [{"type": "text", "text": "Next."}, USE]},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Found."}],
    },
    {"role": "user", "content": "Go on."},
]


@pytest.mark.parametrize("path", BODIES)
def test_every_text_and_call_is_in_the_body_once_and_in_order(path: str) -> None:
    body = BODIES[path]("System.", TOOLS, TURNS, 2)
    text = json.dumps(body[{"/v1/responses": "input"}.get(path, "messages")])
    places = [text.index(part) for part in ("Begin.", "Next.", "a.py", "Found.", "Go on.")]
    assert places == sorted(places)
    assert all(text.count(part) == 1 for part in ("Begin.", "Next.", "Found.", "Go on."))
    assert json.dumps(body).count("System.") == 1
    assert "Reads" in json.dumps(body["tools"])
    assert body["stream"]


def test_only_messages_are_marked() -> None:
    for path, make in BODIES.items():
        marks = json.dumps(make("System.", TOOLS, TURNS, 2)).count("cache_control")
        assert marks == (2 if path == "/v1/messages" else 0)
