"""What an answer cost, in every protocol's words."""

from __future__ import annotations

import orjson
import pytest

from sgl_ext.requests.spent import spent_tokens

CHAT = {
    "prompt_tokens": 100,
    "completion_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 90},
}
RESPONSE = {
    "input_tokens": 100,
    "input_tokens_details": {"cached_tokens": 90},
    "output_tokens": 7,
    "output_tokens_details": {"reasoning_tokens": 0},
}
MESSAGE = {
    "input_tokens": 4,
    "cache_creation_input_tokens": 6,
    "cache_read_input_tokens": 90,
    "output_tokens": 7,
}
META = {"id": "x", "prompt_tokens": 100, "completion_tokens": 7, "cached_tokens": 90}


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [], "usage": CHAT},
        {"output": [], "usage": RESPONSE, "tools": [{"properties": {"usage": {"type": "string"}}}]},
        {"content": [], "usage": MESSAGE},
        {"text": "a", "meta_info": META},
        {"content": [{"text": '"usage":{"prompt_tokens":1}'}], "usage": MESSAGE},
        {"usage": MESSAGE, "content": [{"text": '"usage":{"prompt_tokens":1}'}]},
        {"prompt_tokens": 100, "cached_tokens": 90, "prefilled_tokens": 17},
    ],
)
def test_a_whole_answer_tells(answer: object) -> None:
    data = orjson.dumps(answer)
    assert spent_tokens(data, data) == 17


def test_what_was_not_cached_counts_in_full() -> None:
    data = orjson.dumps({"usage": CHAT | {"prompt_tokens_details": None}})
    assert spent_tokens(data, data) == 107


def test_a_stream_of_messages_tells_at_both_ends() -> None:
    start = {"type": "message_start", "message": {"usage": MESSAGE | {"output_tokens": 0}}}
    delta = {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 7}}
    first = b"event: message_start\ndata: %b\n\n" % orjson.dumps(start)
    last = b"event: message_delta\ndata: %b\n\n" % orjson.dumps(delta)
    assert spent_tokens(first, last) == 17
    told_again = {**delta, "usage": {"input_tokens": 10, "output_tokens": 7}}
    assert spent_tokens(first, b"data: %b\n\n" % orjson.dumps(told_again)) == 17


def test_other_streams_tell_at_the_end_if_at_all() -> None:
    first = b'data: {"choices":[{"delta":{}}],"usage":null}\n\n'
    assert spent_tokens(first, b"data: %b\n\n" % orjson.dumps({"usage": CHAT})) == 17
    assert spent_tokens(first, first) is None
    assert spent_tokens(b"", b"") is None
    assert spent_tokens(first, b'data: {"usage":{"prompt_tokens": 1') is None
