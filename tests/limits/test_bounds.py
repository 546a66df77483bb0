"""Too many elements are found before a body is parsed; text that looks like them is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sgl_ext.limits.bounds import (
    LIMIT_LEVELS,
    MAX_BLOCKS,
    MAX_COMMAS,
    MAX_ELEMENTS,
    MAX_MESSAGES,
    MAX_TOOLS,
    UNCOUNTED_BYTES,
    deep_field,
    find_excess,
    find_many,
)
from sgl_ext.protocols.anthropic import ANTHROPIC
from sgl_ext.protocols.registry import of_path
from sgl_ext.protocols.responses import RESPONSES
from sgl_ext.reading.segments import read_chain

_LONG = b" " * UNCOUNTED_BYTES


@pytest.mark.parametrize(
    ("element", "each"),
    [(b"[]", 1), (b"{}", 1), (b'"x"', 1), (b'{"a":"b"}', 3), (b"[" * 9, 9), (b'["[",[]]', 3)],
)
def test_a_body_has_at_most_so_many_elements(element: bytes, each: int) -> None:
    count = (MAX_ELEMENTS - 1) // each
    assert find_many(b"[%b]" % b",".join([element] * count), _LONG) is None
    found = find_many(b"[%b]" % b",".join([element] * (count + 2)), _LONG)
    assert found is not None
    assert f"more than {MAX_ELEMENTS}" in found.message


def test_a_list_has_at_most_so_many_numbers() -> None:
    assert find_many(b"[%b]" % b",".join([b"1"] * MAX_COMMAS)) is None
    found = find_many(b"[%b]" % b",".join([b"1"] * (MAX_COMMAS + 2)))
    assert found is not None
    assert f"more than {MAX_COMMAS}" in found.message


@pytest.mark.parametrize("text", ["[{,", '"', '\\"', "\\", '\\\\"[,', "\u2028,"])
def test_signs_inside_a_text_are_no_elements(text: str) -> None:
    body = json.dumps([text * 600_000, "end"]).encode()
    assert find_many(body) is None
    assert find_many(b"[%b]" % b",".join([body, *[b"[]"] * MAX_ELEMENTS])) is not None


def test_several_texts_count_together() -> None:
    half = b"[%b]" % b",".join([b"[]      "] * (MAX_ELEMENTS // 2 + 99))
    assert find_many(half) is None
    assert find_many(half, half) is not None


def test_a_short_body_is_not_counted() -> None:
    assert find_many(b"[%b]" % b",".join([b"[]"] * (UNCOUNTED_BYTES // 3 - 1))) is None


def blocks(count: int) -> list[dict[str, str]]:
    return [{"type": "text", "text": "x"}] * count


@pytest.mark.parametrize(
    ("body", "field", "limit"),
    [
        ({"tools": [{}] * (MAX_TOOLS + 1)}, "tools", MAX_TOOLS),
        ({"messages": [{}] * (MAX_MESSAGES + 1)}, "messages", MAX_MESSAGES),
        ({"system": blocks(MAX_BLOCKS + 1)}, "system", MAX_BLOCKS),
        (
            {"messages": [{"role": "user", "content": blocks(MAX_BLOCKS // 2 + 1)}] * 2},
            "messages",
            MAX_BLOCKS,
        ),
        (
            {"messages": ["text", None, {"role": "user"}, {"content": blocks(MAX_BLOCKS + 1)}]},
            "messages",
            MAX_BLOCKS,
        ),
    ],
)
def test_a_field_that_has_too_much_is_named_with_its_limit(
    body: dict[str, Any], field: str, limit: int
) -> None:
    found = find_excess(body, "messages", ("system",))
    assert found is not None
    assert found.field == field
    assert found.message.startswith(f"{field}: more than {limit}")
    less = {name: value[:-1] for name, value in body.items()}
    assert find_excess(less, "messages", ("system",)) is None


def test_a_long_conversation_passes() -> None:
    turns = [{"role": "user", "content": blocks(3)}] * 400
    body = {"system": blocks(3), "tools": [{}] * 300, "messages": turns}
    assert find_excess(body, "messages", ("system",)) is None
    assert find_many(json.dumps(body).encode()) is None


def nested(levels: int, kind: type) -> Any:
    value: Any = kind()
    for _ in range(levels - 1):
        value = [value] if kind is list else {"a": value}
    return value


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("field", ["tools", "metadata", "model", "of no protocol"])
def test_a_field_is_named_from_one_level_beyond_the_limit(field: str, kind: type) -> None:
    body = {"model": "m", "input": "hi", field: nested(LIMIT_LEVELS, kind)}
    assert deep_field(body, RESPONSES.turns_field) is None
    body[field] = nested(LIMIT_LEVELS + 1, kind)
    assert deep_field(body, RESPONSES.turns_field) == field


def test_messages_are_left_to_the_engine() -> None:
    assert deep_field({"messages": nested(1000, list)}, ANTHROPIC.turns_field) is None
    assert deep_field(nested(1000, list), ANTHROPIC.turns_field) is None


def test_a_model_that_is_nested_too_deeply_has_no_segments() -> None:
    body = {"model": nested(1010, list), "messages": [{"role": "user", "content": "hi"}]}
    assert read_chain(of_path("/v1/chat/completions"), body).hashes == ()
