"""The grammar of an answer holds a schema, or the schema is refused with the place."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.compat import held_schemas
from sgl_ext.compat.held_schemas import (
    BACKEND,
    SCHEMA_FIELD,
    check_sent,
    checked_tools,
    is_wrong,
    merged,
    unheld,
    unheld_pattern,
)

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


_AB = {
    "type": "object",
    "properties": {"a": {"const": 1}, "b": {"const": 2}},
    "required": ["a", "b"],
}
_DEFS = {"$defs": {"a": _A, "b": _B}}
_CLOSED = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        ({"allOf": [_A, _B]}, _AB),
        ({"allOf": [_A, _B, _A]}, _AB),
        ({"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], **_DEFS}, {**_DEFS, **_AB}),
        ({**_A, "allOf": [_B]}, _AB),
        ({"allOf": [_A, {"required": ["a"], "description": "d"}]}, _A),
        ({"title": "t", "allOf": [{**_AB, **_CLOSED}, _A]}, {"title": "t", **_AB, **_CLOSED}),
        (inside({"allOf": [_A, _B]}), inside(_AB)),
        ({"anyOf": [{"allOf": [_A, _B]}, {"type": "null"}]}, {"anyOf": [_AB, {"type": "null"}]}),
        ({"allOf": [{"allOf": [_A]}, _B]}, None),
        ({"allOf": [_A, {"type": "object", "properties": {"a": {"const": 3}}}]}, None),
        ({"allOf": [{**_A, **_CLOSED}, _B]}, None),
        ({"allOf": [_A, {"minProperties": 2}]}, None),
        ({"allOf": [_A, {"type": "string"}]}, None),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, None),
        ({"allOf": [_A, {"$ref": "#"}]}, None),
        ({"anyOf": [_A], "allOf": [_A, _B]}, None),
        ({"properties": {"allOf": {"type": "string"}}}, None),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_several_schemas_of_one_object_are_merged(schema: Any, made: Any) -> None:
    """made: None if it cannot be."""
    before = json.dumps(schema)
    assert merged(schema) == (schema if made is None else made)
    assert json.dumps(schema) == before
    if made is not None:
        assert unheld(merged(schema)) is None


def test_the_grammar_gets_the_merged_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = SimpleNamespace(grammar_backend=BACKEND)
    monkeypatch.setattr(held_schemas, "in_effect", lambda: usual)
    schema = inside({"allOf": [_A, _B]})
    request = SimpleNamespace(sampling_params={SCHEMA_FIELD: json.dumps(schema)})
    check_sent(None, request, None)
    assert json.loads(request.sampling_params[SCHEMA_FIELD]) == inside(_AB)
    from sglang.srt.entrypoints.openai.protocol import Tool

    function = {"name": "f", "strict": True, "parameters": schema}
    tool = Tool(type="function", function=function)
    (checked,) = checked_tools([tool], [tool])
    assert checked.function.parameters == inside(_AB)
    assert tool.function.parameters == schema, "the prompt has what the client sent"


_CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "n": {}}, "required": ["kind"]}
_DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "n": {}}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("ones", "may_overlap"),
    [
        ([_CAT, _DOG], False),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], False),
        ([{"type": "string"}, {"type": "integer"}, {"type": "null"}], False),
        ([{"const": 1}, {"enum": [2, "1"]}, {"const": True}], False),
        ([{"const": "a"}, {"type": "number"}], False),
        ([_A, _B], False),
        ([{"type": "integer"}, {"type": "number"}], True),
        ([{"type": "string"}, {"type": "string", "maxLength": 3}], True),
        ([{"const": 1}, {"enum": [1, 2]}], True),
        ([_A, {**_A, "title": "again"}], True),
        ([_AB, _A], True),
        ([_A, {**_B, "additionalProperties": True}], True),
        ([{}, {"type": "string"}], True),
        ([{"const": n} for n in range(65)], True),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_several_schemas_of_a_one_of_may_take_is_refused(
    ones: list[Any], may_overlap: bool
) -> None:
    found = unheld({"type": "object", "properties": {"x": {"oneOf": ones}}, **_DEFS})
    assert (found is not None) is may_overlap
    if found is not None:
        assert "at #/properties/x " in found
        assert "oneOf" in found


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
