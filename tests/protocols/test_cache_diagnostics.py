"""What a request asks about its cache, and what is said: shapes that the vendors' SDKs know."""

from __future__ import annotations

import orjson
import pytest
from anthropic.types import Diagnostics

from sgl_ext.protocols.cache_diagnostics import (
    NOT_FOUND,
    Found,
    Question,
    answer_id,
    find_event,
    read_question,
    with_diagnosis,
)

MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
SETTINGS = ("prompt_cache_key", "text_format", "reasoning_effort", "verbosity", "tool_choice")
REASONS = ("model", "tools", "system", "messages", "compacted", "evicted", *SETTINGS)
OPENAI_REASONS = {
    "model_changed",
    "prompt_cache_key_changed",
    "tools_changed",
    "text_format_changed",
    "reasoning_effort_changed",
    "verbosity_changed",
    "context_compacted",
    "input_changed",
}


def said(path: str, found: Found | None) -> object:
    answer = orjson.loads(with_diagnosis(path, b'{"id":"x"}', found, streams=False))
    return answer["diagnostics" if path == MESSAGES else "prompt_cache_diagnostics"]


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("place", [{}, {"block": "system[1]", "byte": 3, "cause": "clock"}])
def test_each_reason_has_a_shape_that_the_sdks_know(reason: str, place: dict[str, object]) -> None:
    found = Found(reason, 90, 100, place)
    told = Diagnostics.model_validate(said(MESSAGES, found), strict=True).cache_miss_reason
    assert told is not None
    told_openai = said(RESPONSES, found)
    assert isinstance(told_openai, dict)
    if told_openai["type"] == "cache_miss":
        assert told_openai["reason"] in OPENAI_REASONS
        assert told_openai["cache_missed_tokens"] == 90
        assert told_openai["comparison_reusable_tokens"] == 100
    else:
        assert told_openai["type"] == "unavailable"
        assert told_openai["cause"] == reason
    assert said(CHAT, found) == told_openai


def test_what_is_not_found_and_what_is_no_miss() -> None:
    assert said(MESSAGES, None) is None
    assert said(RESPONSES, None) == {"type": "cache_hit"}
    missing = {"cache_miss_reason": {"type": "previous_message_not_found"}}
    assert said(MESSAGES, NOT_FOUND) == missing
    assert said(RESPONSES, NOT_FOUND) == {"type": "comparison_response_not_found"}


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'{"error": 3}', b'"id"'])
def test_what_is_no_answer_stays_as_it_is(data: bytes) -> None:
    for path in (MESSAGES, RESPONSES, CHAT):
        for streams in (False, True):
            assert with_diagnosis(path, data, NOT_FOUND, streams=streams) == data


def test_only_those_who_ask_are_asked_about() -> None:
    options = {"prompt_cache_options": {"comparison_response_id": "resp_1"}}
    assert read_question(RESPONSES, options) == Question("resp_1", has_usage=True)
    assert read_question(CHAT, options) == Question("resp_1", has_usage=False)
    counted = options | {"stream_options": {"include_usage": True}}
    assert read_question(CHAT, counted) == Question("resp_1", has_usage=True)
    assert read_question(MESSAGES, {"diagnostics": {}}) == Question(None, has_usage=True)
    for path in (MESSAGES, RESPONSES, CHAT, "/v1/completions"):
        assert read_question(path, {}) is None
        assert read_question(path, {"prompt_cache_options": {"mode": "implicit"}}) is None
        assert read_question(path, []) is None


def test_the_id_is_that_of_the_answer() -> None:
    assert answer_id(b'{"id": "msg_1", "content": [{"id": "toolu_1"}]}') == "msg_1"
    begun = b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1"}}'
    assert answer_id(begun) == "resp_1"
    assert answer_id(b'{"id": "' + b"x" * 300 + b'"}') is None
    assert answer_id(b"no answer") is None


def test_events_are_found_among_others_and_with_any_line_ends() -> None:
    asked = Question("x", has_usage=True)
    for end in (b"\n", b"\r\n"):
        event = end.join((b"event: message_start", b'data: {"message":{"id":"m"}}', b"", b""))
        found = find_event(MESSAGES, asked, b": ping" + end * 2 + event)
        assert found is not None
        assert found[2] == b'{"message":{"id":"m"}}'
        assert find_event(RESPONSES, asked, event) is None
