"""What of a JSON schema a grammar holds an answer to: all of it, or the schema is refused.

xgrammar takes some schemas without a word and leaves a part of them out: of several `allOf` it
makes any value (`merged` makes one schema of them where it can), of `oneOf` it makes values that
several of its schemas take, and beside `$ref`, `enum` or `anyOf` it reads nothing else. A schema
that only refers to itself makes a grammar without an end. Such an answer is not what the client
asked for.

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
        what = _unread(each, schema) or _overlap(each, schema)
        if what is not None:
            return f"JSON Schema at {place} cannot be held: {what}"
    endless = _endless(schema, places)
    return None if endless is None else f"JSON Schema at {endless} refers to itself without an end"


_OF_OBJECTS = frozenset(("type", "properties", "required", "additionalProperties"))
_NOTES = frozenset(("title", "description", "default", "examples", "$comment", "deprecated"))
MAX_COMPARED = 64
"""Schemas in a `oneOf` that are compared with one another."""


def merged(schema: Any, root: Any = None) -> Any:
    """A schema whose `allOf` are one object schema each, where that says the same; others stay.

    {"allOf": [{"properties": {"a": A}}, {"properties": {"b": B}}]} takes what
    {"properties": {"a": A, "b": B}} takes.
    """
    root = schema if root is None else root
    if isinstance(schema, list):
        return [merged(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key in (*_ONE, *_LISTS):
        if key in made:
            made[key] = merged(made[key], root)
    for key in _MAPS:
        if isinstance(made.get(key), dict):
            made[key] = {name: merged(each, root) for name, each in made[key].items()}
    parts = made.get("allOf")
    if not isinstance(parts, list) or not parts:
        return made
    own = {key: made[key] for key in _OF_OBJECTS if key in made}
    if len(parts) == 1 and not own:
        return made
    known = [_referred(each, root) for each in parts]
    one = _one_object([own, *known] if own else known)
    if one is None:
        return made
    rest = {key: value for key, value in made.items() if key not in (*_OF_OBJECTS, "allOf")}
    return made if rest.keys() & _CHECKS else {**rest, **one}


def _referred(schema: Any, root: Any) -> Any:
    """The schema that a reference beside notes alone names, and that refers to no other itself."""
    if (
        not isinstance(schema, dict)
        or "$ref" not in schema
        or not schema.keys() - {"$ref"} <= _NOTES
    ):
        return schema
    target = _target(schema["$ref"], root)
    return target if isinstance(target, dict) and not target.keys() & {"$ref", "allOf"} else schema


def _one_object(parts: list[Any]) -> dict[str, Any] | None:
    """One object schema that takes what all of them take; None if this is not certain."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    closed: list[set[str]] = []
    for part in parts:
        if not isinstance(part, dict) or not part.keys() <= _OF_OBJECTS | _NOTES:
            return None
        named, needed = part.get("properties", {}), part.get("required", [])
        others = part.get("additionalProperties", True)
        if part.get("type", "object") != "object" or not isinstance(others, bool):
            return None
        if not isinstance(named, dict) or not isinstance(needed, list):
            return None
        if any(name in properties and properties[name] != each for name, each in named.items()):
            return None
        properties |= named
        required += [name for name in needed if name not in required]
        if not others:
            closed.append(set(named))
    if any(names != properties.keys() for names in closed):
        return None  # one takes no property of another
    if not any(part.get("type") == "object" for part in parts):
        return None  # it takes other values, too
    one: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        one["required"] = required
    return {**one, "additionalProperties": False} if closed else one


def _overlap(schema: dict[str, Any], root: Any) -> str | None:
    """Why a `oneOf` is refused: a value may fit two of its schemas, which no grammar can rule out.
    None if no value can."""
    ones = schema.get("oneOf")
    if not isinstance(ones, list):
        return None
    known = [_referred(each, root) for each in ones]
    if len(known) > MAX_COMPARED:
        return f"more than {MAX_COMPARED} schemas in oneOf are not compared; anyOf is read"
    for at, first in enumerate(known):
        for number, second in enumerate(known[:at]):
            if not _excludes(first, second):
                return f"{number} and {at} of oneOf may take one value; anyOf is read"
    return None


def _excludes(first: Any, second: Any) -> bool:
    """Whether no value that a grammar makes of one of two schemas is one of the other."""
    if first is False or second is False:
        return True
    if not isinstance(first, dict) or not isinstance(second, dict):
        return False
    values, others = _values_of(first), _values_of(second)
    if values is not None and others is not None:
        return not any(_same(one, two) for one in values for two in others)
    kinds, further = _kinds_of(first), _kinds_of(second)
    if kinds and further and not kinds & further:
        return True
    if kinds != {"object"} or further != {"object"}:
        return False
    named, more = first.get("properties") or {}, second.get("properties") or {}
    needed = {*(first.get("required") or ())}
    needed_too = {*(second.get("required") or ())}
    if any(_excludes(named[n], more[n]) for n in needed & needed_too if n in named and n in more):
        return True
    # A grammar makes the properties that are declared alone.
    lacks = not first.get("additionalProperties") and bool(needed_too - named.keys())
    lacks_too = not second.get("additionalProperties") and bool(needed - more.keys())
    return lacks and lacks_too


def _values_of(schema: dict[str, Any]) -> list[Any] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _same(one: Any, two: Any) -> bool:
    return bool(one == two) and isinstance(one, bool) is isinstance(two, bool)


def _kinds_of(schema: dict[str, Any]) -> set[str]:
    """The types of its values, a whole number as any; nothing if they are not stated."""
    values = _values_of(schema)
    if values is not None:
        return {kind for value in values for kind in _KINDS if _is_kind(value, kind)} - {"integer"}
    stated = schema.get("type")
    kinds = stated if isinstance(stated, list) else [stated] if isinstance(stated, str) else []
    return {"number" if kind == "integer" else str(kind) for kind in kinds}


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
    """How many other schemas must have a finite value, so that this one has one. Adds this schema
    to the `users` of each of them."""
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


def held(schema: Any, field: str) -> Any:
    """The schema for a grammar, which takes what this one takes.

    Raises ValueError, which names the client's field, for a schema that no grammar holds.
    """
    try:
        made = merged(schema) if b'"allOf"' in orjson.dumps(schema) else schema
        SCHEMAS.check(made, _judge)
    except (ValueError, TypeError, RecursionError) as error:
        text = str(error) if type(error) is ValueError else "is nested too deeply"
        raise ValueError(f"{field}: {text}") from None
    return made


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
    if (made := held_answer(document)) != document:
        request.sampling_params[SCHEMA_FIELD] = orjson.dumps(made).decode()


def held_answer(schema: Any) -> Any:
    """The schema for the grammar of an answer. Raises ValueError if no grammar holds it."""
    context = current()
    field = SCHEMA_FIELD
    if context is not None:
        field = names.name_of(SCHEMA_FIELD, context.path, context.body, of_sampling=True)
    try:
        return held(schema, field)
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
        made = held(function.parameters, "tools")
    except ValueError:
        if is_strict:
            _note_field("tools")
            raise
        loose = {"parameters": {"type": "object"}, "strict": False}
        return tool.model_copy(update={"function": function.model_copy(update=loose)})
    if made == function.parameters:
        return tool
    return tool.model_copy(update={"function": function.model_copy(update={"parameters": made})})
