"""The field that is nested too deeply is named, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_ext.limits.nesting import LIMIT_LEVELS, deep_field
from sgl_ext.protocols.anthropic import ANTHROPIC
from sgl_ext.protocols.registry import of_path
from sgl_ext.protocols.responses import RESPONSES
from sgl_ext.reading.segments import read_chain


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
