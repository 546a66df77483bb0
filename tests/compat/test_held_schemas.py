"""The grammar of an answer holds a schema, or the schema is refused with the place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sgl_ext.compat.held_schemas import is_wrong, unheld, unheld_pattern

_A = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
_B = {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"]}
_TREE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#"}},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "children", "next"],
    "additionalProperties": False,
}


def inside(schema: Any) -> Any:
    return {"type": "object", "properties": {"x": schema}, "required": ["x"]}


def endless(**more: Any) -> Any:
    return {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"], **more}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        _A,
        _TREE,
        {"allOf": [_A]},
        {"$ref": "#/$defs/a", "description": "d", "default": {}, "$defs": {"a": _A}},
        {"$ref": "#/definitions/a", "definitions": {"a": _A}},
        {"type": "string", "enum": ["a", "b"]},
        {"type": ["string", "null"], "enum": ["a", None]},
        {"type": "integer", "const": 5},
        {"type": "object", "anyOf": [_A, _B]},
        {"type": "object", "properties": {"not": {"type": "string"}, "if": {"type": "null"}}},
        {"type": "string", "pattern": r"^(?<year>\d{4})-[a-z\-^]+$"},
        {"type": "integer", "minimum": -5, "exclusiveMaximum": 7},
        {"type": "array", "items": {"$ref": "#"}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, {"const": 1}]}}},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_a_schema_that_is_held(schema: Any) -> None:
    assert unheld(schema) is None
    if "#/" not in json.dumps(schema):
        assert unheld(inside(schema)) is None


@pytest.mark.parametrize(
    ("schema", "place", "what"),
    [
        ({"allOf": [_A, _B]}, "#", "allOf"),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, "#", "allOf"),
        ({"allOf": [_A], "properties": {"c": {}}}, "#", "properties beside allOf"),
        ({"$ref": "#/$defs/a", "required": ["c"], "$defs": {"a": _A}}, "#", "required beside $ref"),
        ({"type": "object", "properties": {}, "anyOf": [_A, _B]}, "#", "beside anyOf"),
        ({"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 2}]}, "#", "type beside anyOf"),
        ({"type": "string", "enum": ["a", 1]}, "#", "type beside enum"),
        ({"enum": ["a", "abc"], "minLength": 2}, "#", "minLength beside enum"),
        ({"not": {"type": "string"}}, "#", "not"),
        ({"if": _A, "then": _B}, "#", "if, then"),
        ({"type": "number", "multipleOf": 3}, "#", "multipleOf"),
        ({"type": "array", "uniqueItems": True}, "#", "uniqueItems"),
        ({"type": "array", "items": [{}]}, "#", "items is a list"),
        ({"minimum": 1, "exclusiveMinimum": True}, "#", "exclusiveMinimum is no number"),
        ({"$dynamicRef": "#n"}, "#", "$dynamicRef"),
        ({"$ref": "https://example.com/s"}, "#", "no place"),
        ({"$ref": "#/$defs/none"}, "#", "no place"),
        ({"type": "object", "required": ["q"]}, "#", "'q' is required"),
        ({"type": "string", "pattern": r"^[\p{L}]+$"}, "#", r"\p in a pattern"),
        ({"type": "object", "patternProperties": {"^(?!x)": {}}}, "#", "(?!x"),
        ({"$ref": "#"}, "#", "without an end"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, "#", "without an end"),
        (endless(), "#", "without an end"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#", "without an end"),
        ({"anyOf": [endless(), {"$ref": "#"}]}, "#", "without an end"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_schema_that_is_not_held(schema: Any, place: str, what: str) -> None:
    found = unheld(schema)
    assert found is not None
    assert f"at {place}" in found
    assert what in found


def test_the_place_is_named() -> None:
    deep = {
        "type": "object",
        "properties": {"a/b": {"type": "array", "items": {"allOf": [_A, _B]}}},
    }
    found = unheld({"anyOf": [{"type": "null"}, deep]})
    assert found is not None
    assert "#/anyOf/1/properties/a~1b/items " in found


@pytest.mark.parametrize(
    "pattern", ["^a$", "a|^b", "(?:^a$)", r"\^\$", "[$^]", r"[\b]", r"\u0041", "(a)|(b)", "a{2,}?"]
)
def test_a_pattern_that_is_held(pattern: str) -> None:
    assert unheld_pattern(pattern) is None


@pytest.mark.parametrize(
    "pattern",
    [
        r"\p{L}",
        r"[a\P{L}]",
        "a(?=b)",
        "(?<!a)b",
        r"(a)\1",
        r"(?<n>a)\k<n>",
        r"\bb",
        "[^]",
        "a$b",
        "(?i)a",
    ],
)
def test_a_pattern_that_is_not_held(pattern: str) -> None:
    assert unheld_pattern(pattern) is not None


@pytest.mark.parametrize(
    ("schema", "is_one"),
    [
        ({"type": "string", "pattern": r"^[\p{L}[^]]+(?<n>x)$"}, True),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "exclusiveMinimum": True,
                "minimum": 1,
            },
            True,
        ),
        ({"exclusiveMinimum": True, "minimum": 1}, False),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{}, {}]}, True),
        ({"$schema": "https://example.com/own", "type": "object"}, True),
        ({"type": "nothing"}, False),
        ({"properties": []}, False),
    ],
)
def test_a_schema_is_judged_by_its_draft(schema: Any, is_one: bool) -> None:
    assert (is_wrong(schema) is None) is is_one


def test_a_long_chain_of_references_has_an_end() -> None:
    length = 5_000
    for order in (range(length), range(length - 1, -1, -1)):
        links = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in order}
        chain = {"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {"type": "string"}}}
        assert unheld(chain) is None
        links[f"d{length}"] = {"$ref": "#/$defs/d0"}
        assert "without an end" in (unheld({"$ref": "#/$defs/d0", "$defs": links}) or "")
