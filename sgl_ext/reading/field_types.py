"""The types of fields that decide in the balancer as well as in an engine, and bounds of some.

SGLang's models take more than these types: "no" and 0 for false, "5" and 5.0 for 5. What the
balancer decides by such a value could differ from what the engine does, for example store a
response that the client wants forgotten. So a value of another type is an error. Only 5.0 is read
as 5 here, too: clients whose language, or whose JSON library, has no integers send it.

SGLang fails on `n: 0` with words of its own, and an empty stop sequence would end each answer at
its first token.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import NoneType
from typing import Any, NamedTuple

_FORMS = {bool: "true or false", int: "an integer", str: "a text"}
FIELDS: Mapping[str, type] = {
    "model": str,
    "stream": bool,
    "store": bool,
    "background": bool,
    "max_tokens": int,
    "max_completion_tokens": int,
    "max_output_tokens": int,
    "n": int,
}
_STOPS = frozenset({"stop", "stop_sequences"})
STREAM_OPTIONS: Mapping[str, type] = {"include_usage": bool}


# Beyond it, a float does not say which integer is meant.
_LIMIT_FLOAT = 2.0**53


def as_integer(value: Any) -> Any:
    """The integer that a float with a whole value stands for; any other value as it is."""
    if type(value) is float and value.is_integer() and abs(value) <= _LIMIT_FLOAT:
        return int(value)
    return value


class WrongField(NamedTuple):
    """A field with a value that it cannot have, and what it must be."""

    field: str
    message: str


def find_wrong_field(body: Any) -> WrongField | None:
    """The first field of a parsed body whose value is wrong. A field may be left out or null."""
    if not isinstance(body, dict):
        return None
    if not _are_right(tuple(map(type, map(body.get, FIELDS)))):
        wrong = _of_other_type(body, "", FIELDS)
        if wrong is not None:
            return wrong
    options = body.get("stream_options")
    if isinstance(options, dict):
        wrong = _of_other_type(options, "stream_options.", STREAM_OPTIONS)
        if wrong is not None:
            return wrong
    if (n := body.get("n")) is not None and n < 1:
        return WrongField("n", "n: must be at least 1")
    for name in () if _STOPS.isdisjoint(body) else sorted(_STOPS):
        stops = body.get(name)
        if stops == "" or (isinstance(stops, list) and "" in stops):
            return WrongField(name, f"{name}: must not be an empty text")
    return None


@lru_cache(maxsize=256)
def _are_right(types: tuple[type, ...]) -> bool:
    """Whether no value of these types in FIELDS can be wrong. Clients send few combinations."""
    return all(each in (NoneType, kind) for each, kind in zip(types, FIELDS.values(), strict=True))


def _of_other_type(
    holder: Mapping[str, Any], prefix: str, fields: Mapping[str, type]
) -> WrongField | None:
    for name, kind in fields.items():
        value = holder.get(name)
        if value is not None and type(value) is not kind and _is_wrong(value, kind):
            return WrongField(prefix + name, f"{prefix}{name}: must be {_FORMS[kind]}")
    return None


def _is_wrong(value: Any, kind: type) -> bool:
    return kind is not int or type(as_integer(value)) is not int
