"""Arguments of a call as an object, whatever the model wrote.

A model can write arguments that are empty, cut off, or no object. The client answers what is wrong
with them and sends them back, so a prompt must be able to show them. Templates and Anthropic's
clients take objects only:

    what was written      ""    [1]               {"a":            {"n": NaN}
    the object            {}    {"input": [1]}    {"input": text}  {"n": "NaN"}

An object of another client's stays as it is. Numbers that JSON does not have become texts, and half
of a surrogate pair becomes the replacement character.
"""

import json
import math
from typing import Any

import orjson

from sgl_ext.requests.protocol import Json

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
