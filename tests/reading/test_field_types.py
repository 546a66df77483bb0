"""Fields that decide in the balancer have one type, as SGLang's models take more."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_ext.reading.field_types import FIELDS, find_wrong_field

_WRONG: dict[type, list[Any]] = {
    bool: [0, 1, 1.0, "true", "no", [], {}],
    int: [True, "5", 5.5, 1e30, float("inf"), [5], {}],
    str: [5, True, ["m"], [[[]]], {}],
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_another_type_is_named(field: str) -> None:
    for value in _WRONG[FIELDS[field]]:
        wrong = find_wrong_field({"messages": [], field: value})
        assert wrong is not None
        assert wrong.field == field
        assert wrong.message.startswith(f"{field}: must be ")


def test_an_inner_field_is_named_by_its_path() -> None:
    wrong = find_wrong_field({"stream_options": {"include_usage": "yes"}})
    assert wrong == (
        "stream_options.include_usage",
        "stream_options.include_usage: must be true or false",
    )


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": -1.0}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
def test_a_value_that_cannot_be_meant_is_named(body: Any, field: str) -> None:
    wrong = find_wrong_field({"messages": [], **body})
    assert wrong is not None
    assert wrong.field == field


@pytest.mark.parametrize(
    "body",
    [
        *(None, [], "x", {}, {"stream_options": 5}, {"messages": "left to the engine"}),
        {"model": "m", "stream": False, "max_tokens": 5, "stream_options": {"include_usage": True}},
        {"max_tokens": 5.0, "n": 1.0, "stop": "a", "stop_sequences": ["b", 7]},
        dict.fromkeys([*FIELDS, "stream_options"]),
    ],
)
def test_other_bodies_pass(body: Any) -> None:
    assert find_wrong_field(body) is None
