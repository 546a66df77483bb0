"""Requests that share a cached prefix share a key, in every protocol; others do not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from sgl_ext.requests.conversation import conversation_key
from sgl_ext.requests.headers import HeaderStrip
from sgl_ext.requests.system_text import strip_request
from tests.requests.test_system_text import json_values

SYSTEM = "You are a coding agent."
TOOL = {"name": "read", "description": "Reads a file", "input_schema": {"type": "object"}}


def turn(*contents: str, **rest: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content} for content in contents]
    return {"model": "m", "messages": messages, **rest}


def test_later_turns_and_other_sessions_of_a_harness_agree() -> None:
    first = conversation_key(turn("hi", system=SYSTEM, tools=[TOOL]))
    assert first == conversation_key(turn("hi", "and then?", system=SYSTEM, tools=[TOOL]))
    assert first == conversation_key(turn("something else", system=SYSTEM, tools=[TOOL]))


def test_a_persons_folders_further_on_make_no_difference() -> None:
    def of(folder: str) -> int | None:
        blocks = [{"type": "text", "text": text} for text in (SYSTEM, f"Work in {folder}.")]
        return conversation_key(turn("hi", system=blocks, tools=[TOOL]))

    assert of("/home/a") == of("/home/b")


@pytest.mark.parametrize("body", [{"system": "s" * 2000}, {"instructions": "s" * 2000}])
def test_only_the_beginning_of_a_long_instruction_counts(body: dict[str, str]) -> None:
    longer = {key: value + "more" for key, value in body.items()}
    assert conversation_key(body) == conversation_key(longer)


@pytest.mark.parametrize(
    "other",
    [
        turn("hi", system=SYSTEM),
        turn("hi", system="You are another.", tools=[TOOL]),
        turn("hi", system=SYSTEM, tools=[TOOL], model="n"),
        turn("hi", tools=[{**TOOL, "name": "write"}], system=SYSTEM),
    ],
)
def test_another_beginning_is_another_key(other: dict[str, Any]) -> None:
    assert conversation_key(turn("hi", system=SYSTEM, tools=[TOOL])) != conversation_key(other)


def test_a_text_and_its_block_agree() -> None:
    blocks = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    assert conversation_key(turn("hi", system=SYSTEM)) == conversation_key(
        turn("hi", system=blocks)
    )


def test_without_instructions_the_first_input_tells() -> None:
    long = "shared " * 400
    assert conversation_key(turn(long + "a")) == conversation_key(turn(long + "b"))
    assert conversation_key(turn("a")) != conversation_key(turn("b"))
    for name in ("prompt", "text", "input"):
        assert conversation_key({name: "a"}) not in (None, conversation_key({name: "b"}))
    assert conversation_key({"input_ids": [1, 2]}) != conversation_key({"input_ids": [1, 3]})
    assert conversation_key({"input_ids": [[1, 2], [3]]}) == conversation_key({"input_ids": [1, 2]})


@pytest.mark.parametrize("body", [{}, [], None, 3, {"messages": []}, {"messages": [{}]}])
def test_nothing_to_tell_by_is_no_key(body: Any) -> None:
    assert conversation_key(body) is None


@given(json_values)
def test_no_shape_of_body_breaks_it(body: Any) -> None:
    conversation_key(body)


def test_a_body_nested_as_deep_as_json_goes_breaks_nothing() -> None:
    deep: Any = "x"
    for _ in range(1000):
        deep = [deep]
    names = ("messages", "input", "prompt", "text", "input_ids", "system", "tools")
    for name in names:
        conversation_key({name: deep})
        for path in ("/v1/messages", "/v1/completions", "/generate", "/v1/responses"):
            assert strip_request(path, {name: deep}, HeaderStrip()).headers == 0
