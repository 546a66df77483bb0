"""What of a JSON schema a grammar holds an answer to: all of it, or the schema is refused.

xgrammar takes some schemas without a word and leaves a part of them out: of several `allOf` it
makes any value, and beside `$ref`, `enum` or `anyOf` it reads nothing else. A schema that only
refers to itself makes a grammar without an end. Such an answer is not what the client asked for.

    answers          `check_sent`, by `SCHEMA_FIELD` of the sampling parameters
    strict tools     `checked_tools`
    forced tools     the same; a tool that is not strict promises nothing, and takes any object
    other tools      are in no grammar, and not judged

    fault     xgrammar leaves parts of a schema out, or compiles without an end, and nothing says
              so
    hooks     group "held schemas"
    test      tests/compat/test_held_schemas.py
    upstream  no patch yet
    ends with a version of xgrammar that refuses what it does not read
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import orjson

from sgl_ext.engine import sglang_api
from sgl_ext.engine.arguments import in_effect
from sgl_ext.engine.core.request_context import current
from sgl_ext.engine.fields import names
from sgl_ext.engine.host_cache.message_cache import SCHEMAS

BACKEND = "xgrammar"
SCHEMA_FIELD = "json_schema"
MAX_JUDGED = 500
"""Objects in a schema that is judged by its draft. That takes 0.2 ms for each; of a larger one,
xgrammar says what is wrong."""
_ONE = (
    *("not", "if", "then", "else", "items", "contains", "additionalItems", "unevaluatedItems"),
    *("additionalProperties", "propertyNames", "unevaluatedProperties"),
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_FIRST = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords beside which xgrammar reads nothing else, in its order."""
_CHECKS = frozenset(
    {
        *_FIRST,
        *("type", "properties", "required", "additionalProperties", "patternProperties"),
        *("minProperties", "maxProperties", "propertyNames", "unevaluatedProperties"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "unevaluatedItems"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("minLength", "maxLength", "pattern", "format"),
    }
)
"""Keywords that a value can fail."""
_UNREAD = ("$dynamicRef", "$recursiveRef", "dependencies", "unevaluatedProperties")
_DRAFTS = {"draft-03": "Draft3", "draft-04": "Draft4", "draft-06": "Draft6", "draft-07": "Draft7"}
_DRAFTS |= {"2019-09": "Draft201909"}
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def unheld(schema: Any) -> str | None:
    """What a grammar would leave out of a schema, and where; None if it holds all of it."""
    try:
        sglang_api.validate_xgrammar_json_schema(schema)
    except ValueError as error:
        return str(error)
    places = list(_places(schema))
    for each, place in places:
        what = _unread(each, schema)
        if what is not None:
            return f"JSON Schema at {place} cannot be held: {what}"
    endless = _endless(schema, places)
    return None if endless is None else f"JSON Schema at {endless} refers to itself without an end"


def _places(schema: Any, place: str = "#") -> Iterator[tuple[dict[str, Any], str]]:
    """All schemas in a schema, with their places."""
    left = [(schema, place)]
    while left:
        each, place = left.pop()
        if not isinstance(each, dict):
            continue
        yield each, place
        left += [(each[key], f"{place}/{key}") for key in _ONE if key in each]
        for key in _LISTS:
            if isinstance(each.get(key), list):
                left += [(one, f"{place}/{key}/{n}") for n, one in enumerate(each[key])]
        for key in _MAPS:
            if isinstance(each.get(key), dict):
                left += [
                    (one, f"{place}/{key}/{_escaped(name)}") for name, one in each[key].items()
                ]


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _unread(schema: dict[str, Any], root: Any) -> str | None:
    """What a grammar does not read of one schema."""
    for key in _UNREAD:
        if key in schema and schema[key] is not False:
            return f"{key} is not read"
    if (first := next((key for key in _FIRST if key in schema), None)) is not None:
        found = _unread_beside(first, schema, root)
        if found is not None:
            return found
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        return "several schemas in allOf are not read"
    if "$ref" in schema and _target(schema["$ref"], root) is None:
        return f"$ref {schema['$ref']!r} is no place in the schema"
    named = schema.get("properties")
    named = named if isinstance(named, dict) else {}
    required = schema.get("required")
    for name in required if isinstance(required, list) else ():
        if isinstance(name, str) and name not in named:
            return f"{name!r} is required and not in properties"
    if isinstance(schema.get("items"), list):
        return "items is a list, as in older drafts; prefixItems is read"
    for key in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(schema.get(key), bool):
            return f"{key} is no number, as in draft 4"
    if named and "propertyNames" in schema:
        return "propertyNames is not read beside properties"
    patterns: list[str] = [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
    if isinstance(schema.get("patternProperties"), dict):
        patterns += schema["patternProperties"]
    return next(filter(None, map(unheld_pattern, patterns)), None)


def _unread_beside(first: str, schema: dict[str, Any], root: Any) -> str | None:
    """The keywords that a grammar does not read because of another one."""
    beside = (_CHECKS & schema.keys()) - {first}
    if "type" in beside and _has_type(first, schema, root):
        beside -= {"type"}
    if not beside:
        return None
    return f"{', '.join(sorted(beside))} beside {first} would be ignored"


def _has_type(first: str, schema: dict[str, Any], root: Any) -> bool:
    """Whether each value that a keyword takes has the type that stands beside it."""
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    inner = schema[first]
    if first == "$ref":
        inner = [_target(inner, root)]
    elif first in ("const", "enum"):
        inner = [{first: inner}]
    if not isinstance(inner, list):
        return False
    return all(_is_of(each, types) for each in inner)


def _is_of(schema: Any, types: list[Any]) -> bool:
    if not isinstance(schema, dict):
        return False
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return all(any(_is_kind(value, kind) for kind in types) for value in values)
    own = schema.get("type")
    own = own if isinstance(own, list) else [own]
    return all(each in types or (each == "integer" and "number" in types) for each in own)


def _is_kind(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return bool(kind == "boolean")
    if isinstance(value, float) and value.is_integer() and kind == "integer":
        return True
    return isinstance(value, _KINDS.get(str(kind), ()))


def _target(place: Any, root: Any) -> Any:
    """The schema that a reference names; None if there is none."""
    if place == "#":
        return root
    if not isinstance(place, str) or not place.startswith("#/"):
        return None
    found: Any = root
    for step in place[2:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _endless(root: Any, places: list[tuple[dict[str, Any], str]]) -> str | None:
    """Where a schema has no finite value; None if each one has one. Linear in the schema."""
    known = {id(each) for each, _ in places}
    missing: dict[int, int] = {}  # how many more with a finite value each one needs
    users: dict[int, list[int]] = {}
    ready = []
    for each, _ in places:
        missing[id(each)] = _count_needed(each, root, known, users)
        if not missing[id(each)]:
            ready.append(id(each))
    while ready:
        for user in users.get(ready.pop(), ()):
            missing[user] -= 1
            if missing[user] == 0:
                ready.append(user)
    return next((place for each, place in places if missing[id(each)] > 0), None)


def _count_needed(
    schema: dict[str, Any], root: Any, known: set[int], users: dict[int, list[int]]
) -> int:
    """How many other schemas must have a finite value for this one to have one. Notes for whom."""
    inner, is_any = _needed(schema, root)
    open_ones = [each for each in inner if isinstance(each, dict) and id(each) in known]
    if is_any and len(open_ones) < len(inner) - inner.count(False):
        return 0
    for each in open_ones:
        users.setdefault(id(each), []).append(id(schema))
    if is_any:
        return 1
    return len(open_ones) + inner.count(False)


def _needed(schema: dict[str, Any], root: Any) -> tuple[list[Any], bool]:
    """Schemas that must all have a finite value, or one of them."""
    if "$ref" in schema:
        return [_target(schema["$ref"], root)], False
    if "const" in schema or "enum" in schema:
        return [], False
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return schema[key], True
    if isinstance(schema.get("allOf"), list):
        return schema["allOf"], False
    kinds = schema.get("type")
    kind = kinds[0] if isinstance(kinds, list) and len(kinds) == 1 else kinds
    if kind in (None, "object"):
        named, required = schema.get("properties"), schema.get("required")
        if isinstance(named, dict) and isinstance(required, list):
            return [
                named[each] for each in required if isinstance(each, str) and each in named
            ], False
    if kind == "array" and isinstance(count := schema.get("minItems"), int) and count > 0:
        listed = schema.get("prefixItems")
        first = listed[:count] if isinstance(listed, list) else []
        return [*first, *([schema.get("items", True)] if count > len(first) else [])], False
    return [], False


def unheld_pattern(pattern: str) -> str | None:
    """What a grammar does not read of a pattern of ECMA-262; None if it reads all of it."""
    in_class = False
    at = 0
    while at < len(pattern):
        char, after = pattern[at], pattern[at + 1 : at + 2]
        if char == "\\":
            if after in ("p", "P"):
                return f"\\{after} in a pattern is not read"
            if not in_class and (after in ("b", "B", "k") or after in "123456789"):
                return f"\\{after} in a pattern is not read"
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            if pattern.startswith(("[]", "[^]"), at):
                return f"{pattern[at : pattern.index(']', at) + 1]} in a pattern is not read"
        elif char == "(" and after == "?":
            kind = pattern[at + 2 : at + 4]
            is_named = kind[:1] == "<" and kind[1:] not in ("=", "!")
            if kind[:1] != ":" and not is_named:
                return f"(?{kind} in a pattern is not read"
        elif char == "^" and at and pattern[at - 1] not in "(|:":
            return "^ inside of a pattern is not read"
        elif char == "$" and after and after not in ")|":
            return "$ inside of a pattern is not read"
        at += 1
    return None


def is_wrong(schema: Any) -> str | None:
    """What makes it no JSON schema of its draft; None if it is one. Patterns are not looked at."""
    # It has no types, and takes a while to import.
    from jsonschema import validators  # type: ignore[import-untyped]
    from jsonschema.exceptions import best_match  # type: ignore[import-untyped]

    if sum(1 for _ in islice(_places(schema), MAX_JUDGED + 1)) > MAX_JUDGED:
        return None
    stated = str(schema.get("$schema", "")) if isinstance(schema, dict) else ""
    draft = next((name for part, name in _DRAFTS.items() if part in stated), "Draft202012")
    kind: Any = getattr(validators, f"{draft}Validator")
    error = best_match(kind(kind.META_SCHEMA).iter_errors(schema))
    if error is None:
        return None
    place = "/".join(["#", *map(str, error.absolute_path)])
    return f"JSON Schema at {place} is wrong: {error.message[:200]}"


def _judge(schema: Any) -> None:
    """Raises ValueError."""
    found = is_wrong(schema) or unheld(schema)
    if found is not None:
        raise ValueError(found)


def refuse_unheld(schema: Any, field: str) -> None:
    """Raises ValueError, which names the client's field, for a schema that no grammar holds."""
    try:
        SCHEMAS.check(schema, _judge)
    except (ValueError, RecursionError) as error:
        text = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{field}: {text}") from None


def check_sent(manager: Any, request: Any, input_ids: Any) -> None:
    """Before `TokenizerManager._validate_one_request`: refuses a schema of the answer that no
    grammar holds, on every path."""
    schema = (request.sampling_params or {}).get(SCHEMA_FIELD)
    if not isinstance(schema, str) or in_effect().grammar_backend != BACKEND:
        return
    try:
        document = orjson.loads(schema)
    except orjson.JSONDecodeError:
        return  # SGLang says what is wrong with it
    refuse_answer(document)


def refuse_answer(schema: Any) -> None:
    """Raises ValueError for a schema of the answer that no grammar holds."""
    context = current()
    field = SCHEMA_FIELD
    if context is not None:
        field = names.name_of(SCHEMA_FIELD, context.path, context.body, of_sampling=True)
    try:
        refuse_unheld(schema, field)
    except ValueError:
        _note_field(field)
        raise


def _note_field(field: str) -> None:
    if (context := current()) is not None:
        context.wrong_field = field


def checked_tools(tools: list[Any], strict: list[Any]) -> list[Any]:
    """The tools for a grammar of calls. One that is not strict, and whose schema no grammar holds,
    takes any object there.

    strict: the same tools as SGLang constrains them. Raises ValueError for a strict one.
    """
    return [
        _checked(tool, is_strict=bool(constrained.function.strict))
        for tool, constrained in zip(tools, strict, strict=True)
    ]


def _checked(tool: Any, *, is_strict: bool) -> Any:
    function = tool.function
    if function.parameters is None:
        return tool
    try:
        refuse_unheld(function.parameters, "tools")
    except ValueError:
        if is_strict:
            _note_field("tools")
            raise
        loose = {"parameters": {"type": "object"}, "strict": False}
        return tool.model_copy(update={"function": function.model_copy(update=loose)})
    return tool
