"""The shortcuts in the HTTP process have the results of the originals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.engine.host_cache.message_cache import Message, SchemaCache

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
BROKEN = {"type": "object", "properties": {"path": {"type": 7}}}


class Validation:
    """Validates schemas, and counts them."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, schema: Any) -> None:
        from jsonschema import Draft202012Validator

        self.times += 1
        Draft202012Validator.check_schema(schema)


def test_a_valid_schema_is_checked_once() -> None:
    schemas, validate = SchemaCache(), Validation()
    for _ in range(3):
        schemas.check(copy.deepcopy(SCHEMA), validate)
    assert validate.times == 1
    schemas.check({**SCHEMA, "required": ["path"]}, validate)
    assert validate.times == 2


def test_an_invalid_schema_is_rejected_each_time() -> None:
    from jsonschema import SchemaError

    schemas, validate = SchemaCache(), Validation()
    for _ in range(2):
        with pytest.raises(SchemaError):
            schemas.check(BROKEN, validate)
    assert validate.times == 2


def test_the_number_of_schemas_is_bounded() -> None:
    schemas, validate = SchemaCache(max_schemas=2), Validation()
    for n in range(5):
        schemas.check({"maxLength": n}, validate)
    assert len(schemas) == 2


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


def emptied(value: Any) -> None:
    """Empties every list and dict in it."""
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            emptied(inner)
    value.clear()


@given(st.dictionaries(st.text(max_size=3), json, max_size=4))
def test_a_copy_of_a_message_is_deep(value: dict[str, Any]) -> None:
    message, original = Message(copy.deepcopy(value)), copy.deepcopy(value)
    copied = copy.deepcopy([message])[0]
    assert copied == original
    emptied(copied)
    assert message == original
