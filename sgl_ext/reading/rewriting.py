"""Rewrites bodies that harnesses send, and that SGLang rejects or misreads, into ones it accepts.

    body as sent --> translate --> body for SGLang's own validation and conversion
                         |
                         +--> counts of what was rewritten or left out, for a metric

Fields keep their documented meaning as far as an engine can provide it. Tools that run on a
vendor's servers are left out; tools that the client runs become plain tools; content that the
model cannot see is replaced by a text that names it. An invalid value stays, and SGLang rejects
it. A body that needs no change is returned as the same object, and the given body is never
modified. Translating twice gives the same result as once.

Each protocol's rewriting is in its file in `sgl_ext/protocols/`. The functions here make copies of
parts of a body with other content, and texts in place of content.
"""

import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import orjson

from sgl_ext.reading.protocol import Json, Model, Protocol

Counts = Counter[str]
"""How often each kind of thing was rewritten or left out."""
DROPPED = object()
"""Returned in place of an item or a value that is to be left out."""
_LIMIT_DEPTH = 6
_READABLE = (
    "title",
    "url",
    "name",
    "query",
    "text",
    "output",
    "data",
    "stdout",
    "stderr",
    "error_code",
    "error",
    "content",
)


class Translated(NamedTuple):
    """A body for SGLang, and how often each kind of thing was rewritten or left out."""

    body: Any
    counts: Mapping[str, int]


def translate(protocol: Protocol, body: Any, model: Model) -> Translated:
    """The body that SGLang gets for one that a client posted. Never raises."""
    if protocol.translate is None or not isinstance(body, dict):
        return Translated(body, {})
    counts = Counts()
    return Translated(protocol.translate(body, model, counts), counts)


def altered(items: list[Any], change: Callable[[Any], Any]) -> list[Any]:
    """A list with each item changed, without those that are DROPPED; the same list if unchanged."""
    changed = [change(item) for item in items]
    if all(map(operator.is_, changed, items)):
        return items
    return [item for item in changed if item is not DROPPED]


def edited(holder: Json, edits: Json) -> Json:
    """A copy with other values, without those that are DROPPED; the same object if none changed."""
    edits = {
        key: value
        for key, value in edits.items()
        if (key in holder if value is DROPPED else holder.get(key, DROPPED) is not value)
    }
    if not edits:
        return holder
    return {key: value for key, value in (holder | edits).items() if value is not DROPPED}


def with_items(holder: Json, key: str, change: Callable[[Any], Any]) -> Json:
    """A copy with each item of the list at `key` changed; the same object if nothing changed."""
    items = holder.get(key)
    return edited(holder, {key: altered(items, change)}) if isinstance(items, list) else holder


def without_nulls(body: Json) -> Json:
    """A body without null fields, which mean the same as no field, except to SGLang."""
    if None not in body.values():
        return body
    return {key: value for key, value in body.items() if value is not None}


def kind_of(value: Any) -> str | None:
    """The type of a block, part, item or tool; None if it states none."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


def family_of(kind: str, families: Iterable[str]) -> str:
    """The name in `families` that a type begins with, "unknown" if there is none."""
    return next((name for name in families if kind.startswith(name)), "unknown")


def text_part(text: str, kind: str = "text") -> Json:
    """A part of a message with this text."""
    return {"type": kind, "text": text}


def as_json(value: Any) -> str:
    """A parsed JSON value as JSON; an empty object if it is nested too deeply to be written."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return "{}"


def readable(value: Any, depth: int = 0) -> str:
    """The texts in a result, one per line, without encrypted and binary parts."""
    if isinstance(value, str):
        return value
    if depth >= _LIMIT_DEPTH:
        return ""
    if isinstance(value, list):
        texts = [readable(each, depth + 1) for each in value]
    elif isinstance(value, dict):
        texts = [readable(value[key], depth + 1) for key in _READABLE if key in value]
    else:
        return ""
    return "\n".join(text for text in texts if text)


def not_shown(what: str, name: Any = None) -> str:
    """The text in place of content that the model cannot see."""
    named = f" {name!r}" if isinstance(name, str) and name else ""
    return f"[{what}{named}: not shown, this model reads text only]"


def reminder(text: str) -> str:
    """Instructions as part of a user's turn, for a template that takes no system messages there."""
    return f"<system-reminder>\n{text}\n</system-reminder>"


# Arguments of a call as an object, whatever the model wrote.
#
# A model can write arguments that are empty, cut off, or no object. The client answers what is
# wrong with them and sends them back, so a prompt must be able to show them. Templates and
# Anthropic's clients take objects only:
#
#     what was written      ""    [1]               {"a":            {"n": NaN}
#     the object            {}    {"input": [1]}    {"input": text}  {"n": "NaN"}
#
# An object of another client's stays as it is. Numbers that JSON does not have become texts, and
# half of a surrogate pair becomes the replacement character.

NO_OBJECT = "input"
"""The key of what is no object."""
_COMPACT = (",", ":")


def object_of(given: Any) -> Json:
    """The object for arguments: a JSON text, as in chat completions, or a value."""
    if isinstance(given, dict):
        return given
    value = given
    if isinstance(given, str):
        if not given.strip():
            return {}
        try:
            value = _read(given)
        except (ValueError, RecursionError):
            return {NO_OBJECT: sendable_text(given)}
    if isinstance(value, dict):
        return value
    return {} if value is None else {NO_OBJECT: value}


def is_object(text: Any) -> bool:
    """Whether a text is a JSON object as each parser of JSON reads it."""
    if not isinstance(text, str) or not text.lstrip().startswith("{"):
        return False
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def text_of(given: Any) -> str:
    """The same as a JSON text; the same text if it is an object's."""
    if is_object(given):
        return str(given)
    try:
        return json.dumps(object_of(given), ensure_ascii=False, separators=_COMPACT)
    except RecursionError:
        text = {NO_OBJECT: sendable_text(str(given))}
        return json.dumps(text, ensure_ascii=False, separators=_COMPACT)


def sendable_text(text: str) -> str:
    """A text that can be sent: without halves of surrogate pairs."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read(text: str) -> Any:
    """A JSON value that every parser of JSON reads. Raises ValueError."""
    value = json.loads(text, parse_constant=str, parse_float=_number)
    if "\\u" not in text and text.isascii():
        return value
    return _sendable(value)


def _number(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else text


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return sendable_text(value)
    if isinstance(value, list):
        return [_sendable(each) for each in value]
    if isinstance(value, dict):
        return {sendable_text(key): _sendable(each) for key, each in value.items()}
    return value
