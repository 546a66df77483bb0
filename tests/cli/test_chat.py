"""`chat` and `models`."""

from __future__ import annotations

import json
from typing import Any

from tests.cli.conftest import Run
from tests.cli.fake_node import FakeNode, Refused

MODELS = {"data": [{"id": "tiny", "context_length": 32768}, {"id": "other"}]}
CHAT = "POST /v1/chat/completions"


def stream(*events: Any) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)


def delta(**fields: str) -> Any:
    return {"choices": [{"delta": fields}]}


def test_a_prompt_is_answered_with_its_cached_tokens(node: FakeNode, run: Run) -> None:
    details = {"cached_tokens": 1200}
    usage = {"prompt_tokens": 1500, "completion_tokens": 2, "prompt_tokens_details": details}
    events = (delta(role="assistant"), delta(content="Hel"), delta(content="lo\nyou\x1b[2J"))
    node.answers["GET /v1/models"] = MODELS
    node.answers[CHAT] = stream(*events, {"choices": [], "usage": usage}) + b"data: [DONE]\n\n"
    code, out, err = run("chat", "hello")
    assert (code, out) == (0, "Hello\nyou?[2J\n")
    assert err == "sgl-ext: 1,200 of 1,500 prompt tokens were cached; 2 in the answer\n"
    body = node.asked[-1][1]
    assert (body["model"], body["stream"]) == ("tiny", True)
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert run("chat", "hello", "--model", "other")[0] == 0
    assert node.asked[-1][1]["model"] == "other"


def test_an_answer_that_fails_is_an_error(node: FakeNode, run: Run) -> None:
    node.answers["GET /v1/models"] = MODELS
    node.answers[CHAT] = stream(delta(content="Hel"), {"error": {"message": "engine died"}})
    code, out, err = run("chat", "hello")
    assert (code, out) == (1, "Hel\n")
    assert err == f"sgl-ext: {node.url}: engine died\n"
    node.answers[CHAT] = stream(delta(content="Hel"))
    assert "ended without its usage" in run("chat", "hello")[2]
    node.answers[CHAT] = Refused(529, "The node is busy.")
    assert run("chat", "hello")[::2] == (1, f"sgl-ext: {node.url}: The node is busy.\n")


def test_models_are_listed_with_their_windows(node: FakeNode, run: Run) -> None:
    node.answers["GET /v1/models"] = MODELS
    code, out, _ = run("models")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert rows[1:] == [["tiny", "32,768"], ["other", "-"]]
    assert json.loads(run("models", "--json")[1]) == MODELS
