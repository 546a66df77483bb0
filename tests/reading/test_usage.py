"""Token counts in answers of every protocol."""

from __future__ import annotations

from collections.abc import Callable

import orjson
import pytest

from sgl_ext.reading.usage import Usage, read_usage

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
def test_a_whole_answer_states_its_usage(answer: object) -> None:
    data = orjson.dumps(answer)
    assert read_usage(data, data) == Usage(100, 90, 17)


def test_prompt_tokens_that_were_not_cached_count_as_computed() -> None:
    data = orjson.dumps({"usage": CHAT | {"prompt_tokens_details": None}})
    assert read_usage(data, data) == Usage(100, None, 107)


def test_log_probabilities_may_stand_between_the_counts() -> None:
    meta = {"prompt_tokens": 100, "logprobs": [[-0.5, 1, None]] * 2000}
    data = orjson.dumps({"meta_info": meta | {"completion_tokens": 7, "cached_tokens": 90}})
    assert read_usage(data, data) == Usage(100, 90, 17)


def test_a_long_list_of_tools_may_follow_the_usage() -> None:
    tool = {
        "name": "report",
        "parameters": {"usage": {"type": "integer"}},
        "description": "x" * 5000,
    }
    data = orjson.dumps({"usage": RESPONSE, "tools": [tool, tool]})
    assert read_usage(data, data) == Usage(100, 90, 17)


def test_a_stream_of_messages_states_the_prompt_first_and_the_answer_last() -> None:
    start = {"type": "message_start", "message": {"usage": MESSAGE | {"output_tokens": 0}}}
    delta = {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 7}}
    first = b"event: message_start\ndata: %b\n\n" % orjson.dumps(start)
    last = b"event: message_delta\ndata: %b\n\n" % orjson.dumps(delta)
    assert read_usage(first, last) == Usage(100, 90, 17)
    repeated = {**delta, "usage": {"input_tokens": 10, "output_tokens": 7}}
    assert read_usage(first, b"data: %b\n\n" % orjson.dumps(repeated)) == Usage(100, 90, 17)


def test_other_streams_state_usage_in_the_last_event_or_not_at_all() -> None:
    first = b'data: {"choices":[{"delta":{}}],"usage":null}\n\n'
    last = b"data: %b\n\n" % orjson.dumps({"usage": CHAT})
    assert read_usage(first, last) == Usage(100, 90, 17)
    assert read_usage(first, first) is None
    assert read_usage(b"", b"") is None
    assert read_usage(first, b'data: {"usage":{"prompt_tokens": 1') is None


def item(prompt: int, cached: int, generated: int, text: str = "a") -> dict[str, object]:
    counts = {"prompt_tokens": prompt, "completion_tokens": generated, "cached_tokens": cached}
    return {"text": text, "meta_info": {"id": "x", **counts}}


@pytest.mark.parametrize("wrap", [lambda items: items, lambda items: {"predictions": items}])
def test_the_usage_of_a_list_is_that_of_all_its_items(wrap: Callable[[object], object]) -> None:
    false = '"meta_info":{"prompt_tokens":5'
    data = orjson.dumps(wrap([item(990_000, 0, 2, false), item(10, 10, 3), item(1, 0, 2)]))
    assert read_usage(data, data) == Usage(990_011, 10, 990_008)


def test_counts_of_an_item_may_stand_behind_its_log_probabilities() -> None:
    meta = {"prompt_tokens": 100, "logprobs": [[-0.5, 1, None]] * 2000}
    one = {"text": "", "meta_info": meta | {"completion_tokens": 7, "cached_tokens": 90}}
    data = orjson.dumps([one, one])
    assert read_usage(data, data) == Usage(200, 180, 34)


def test_embeddings_without_usage_state_none() -> None:
    data = orjson.dumps([{"embedding": [0.5]}])
    assert read_usage(data, data) is None
