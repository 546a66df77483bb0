"""Rewrites bodies that harnesses send, and that SGLang rejects or misreads, into ones it accepts.

    body as sent --> translate --> body for SGLang's own validation and conversion
                         |
                         +--> counts of what was rewritten or left out, for a metric

Fields keep their documented meaning as far as an engine can provide it. Tools that run on a
vendor's servers are left out; tools that the client runs become plain tools; content that the
model cannot see is replaced by a text that names it. An invalid value stays, and SGLang rejects
it. A body that needs no change is returned as the same object, and the given body is never
modified. Translating twice gives the same result as once.

Each protocol's rewriting is in `sgl_ext/protocols/translation/`. The functions here make copies of
parts of a body with other content, and texts in place of content.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import orjson

from sgl_ext.requests.protocol import Json, Model, Protocol

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
