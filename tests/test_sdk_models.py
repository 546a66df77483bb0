"""The check that answers are what the SDKs read finds what is wrong with one."""

from __future__ import annotations

import json
from typing import Any

from tests.sdk_models import problems

_MESSAGES, _CHAT, _RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
_MESSAGE: dict[str, Any] = {
    "id": "m",
    "type": "message",
    "role": "assistant",
    "model": "tiny",
    "content": [{"type": "text", "text": "a", "citations": None}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 1, "output_tokens": 1},
}


def found(path: str, document: Any, status: int = 200) -> list[str]:
    return problems(path, status, "application/json", json.dumps(document).encode())


def stream(path: str, *events: Any) -> list[str]:
    body = "".join(f"event: e\ndata: {json.dumps(each)}\n\n" for each in events)
    return problems(path, 200, "text/event-stream; charset=utf-8", body.encode())


def test_whole_answers() -> None:
    assert not found(_MESSAGES, _MESSAGE)
    assert found(_MESSAGES, {**_MESSAGE, "mood": 1}) == ["/v1/messages: unknown field mood"]
    (told,) = found(_MESSAGES, {**_MESSAGE, "usage": {"input_tokens": "1", "output_tokens": 1}})
    assert "usage.input_tokens" in told
    block = {"type": "text", "text": "a", "tone": 1}
    (told,) = found(_MESSAGES, {**_MESSAGE, "content": [block]})
    assert told == "/v1/messages: unknown field content.tone"


def test_each_event_of_a_stream() -> None:
    stop, ping = {"type": "message_stop"}, {"type": "ping"}
    assert not stream(_MESSAGES, {"type": "message_start", "message": _MESSAGE}, ping, stop)
    assert stream(_MESSAGES, {"type": "content_block_stop"}, stop)
    delta = {"delta": "a", "item_id": "i", "output_index": 0, "content_index": 0, "logprobs": []}
    event = {"type": "response.output_text.delta", "sequence_number": 1, **delta}
    assert not stream(_RESPONSES, event)
    assert stream(_RESPONSES, {**event, "sequence_number": None})
    assert stream(_RESPONSES, {**event, "type": "response.output_word.delta"})


def test_errors() -> None:
    inner = {"message": "m", "type": "invalid_request_error"}
    claude = {"type": "error", "error": inner, "request_id": "r"}
    gpt = {"error": {**inner, "param": None, "code": None}}
    assert not found(_MESSAGES, claude, 400)
    assert not found(_CHAT, gpt, 400)
    assert found(_MESSAGES, gpt, 400)
    assert found(_CHAT, {"error": {**gpt["error"], "code": 400}}, 400)
    assert not stream(_MESSAGES, claude)
    assert not stream(_CHAT, gpt)
    assert found(_CHAT, {"detail": "Not Found"}, 404)
    assert not found("/generate", {"detail": "Not Found"}, 404)


def test_what_openai_sends_and_the_sdk_has_not() -> None:
    piece: dict[str, Any] = {"id": "c", "object": "text_completion", "created": 1, "model": "tiny"}
    choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": None}
    assert not stream("/v1/completions", {**piece, "choices": [choice]})
    assert found("/v1/completions", {**piece, "choices": [choice]})
