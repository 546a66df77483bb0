"""What the protocols' translations share: what a model can do, and how a body is altered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import orjson

Counts = Counter[str]
"""How often each kind of thing was rewritten or left out."""
DROPPED = object()
"""In place of a changed item: it is left out."""
_MOST_DEPTH = 6
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


def altered(items: list[Any], change: Callable[[Any], Any]) -> list[Any]:
    """A list with each item changed, or left out if it is DROPPED; the same list if none was."""
    changed = [change(item) for item in items]
    if all(new is old for new, old in zip(changed, items, strict=True)):
        return items
    return [item for item in changed if item is not DROPPED]


def edited(holder: dict[str, Any], edits: dict[str, Any]) -> dict[str, Any]:
    """A copy with other values, without those that are DROPPED; the same object if none differs."""
    edits = {
        key: value
        for key, value in edits.items()
        if (key in holder if value is DROPPED else holder.get(key, DROPPED) is not value)
    }
    if not edits:
        return holder
    return {key: value for key, value in (holder | edits).items() if value is not DROPPED}


def without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    """A body without fields that are null, which say as much as no field, but not to SGLang."""
    if None not in body.values():
        return body
    return {key: value for key, value in body.items() if value is not None}


def kind_of(value: Any) -> str | None:
    """The type of a block, part, item or tool; None if it states none."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


def as_json(value: Any) -> str:
    """A value that came as JSON, as JSON; an empty object if it is too deep to be written."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return "{}"


def readable(value: Any, depth: int = 0) -> str:
    """The texts in a result, a line each; what is encrypted or binary is left out."""
    if isinstance(value, str):
        return value
    if depth >= _MOST_DEPTH:
        return ""
    if isinstance(value, list):
        told = [readable(each, depth + 1) for each in value]
    elif isinstance(value, dict):
        told = [readable(value[key], depth + 1) for key in _READABLE if key in value]
    else:
        return ""
    return "\n".join(text for text in told if text)


def not_shown(what: str, name: Any = None) -> str:
    """The words in place of what a model cannot be shown."""
    named = f" {name!r}" if isinstance(name, str) and name else ""
    return f"[{what}{named}: not shown, this model reads text only]"


def reminder(text: str) -> str:
    """Instructions in a user's turn, for a template that takes no others between turns."""
    return f"<system-reminder>\n{text}\n</system-reminder>"


def joined_text(content: Any) -> str | None:
    """The text of a message's content; None if there is something else in it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        return None
    return "\n".join(text for text in texts if text)
