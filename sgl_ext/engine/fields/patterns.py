"""Clients' regular expressions and grammars: what they may cost an engine.

Regular expressions are searched with RE2, whose time is linear in the text. Python's `re` tries one
way after the other, so that a short pattern can take minutes with a short text. RE2 follows all
ways at once. It takes no pattern whose match depends on what it has matched before (backreferences,
lookaround), and none that repeats more than 1,000 times.

A grammar is compiled in a scheduler's process, after its client has left, too. The time grows with
each class of characters, each length that strings are limited to, each alternative, and the square
of an object's optional properties. One class that takes nearly every token costs 60 ms of CPU time
with a vocabulary of 128,000 tokens, and one length up to 8 s.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson
import re2

MAX_PATTERNS = 32
MAX_PATTERN_BYTES = 256
MAX_MATCH_TOKENS = 1_024
"""A match is looked for in this many last tokens of an answer."""
_REMEMBERED = 1_024
_MEMORY_BYTES = 1 << 20
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.max_mem = _MEMORY_BYTES


def wrong_pattern(pattern: str) -> str | None:
    """Why a pattern cannot be used; None if it can."""
    if len(pattern.encode("utf-8", "replace")) > MAX_PATTERN_BYTES:
        return f"a pattern must have at most {MAX_PATTERN_BYTES} bytes"
    try:
        _compiled(pattern)
    except re2.error as error:
        reason = error.args[0] if error.args else ""
        text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        return f"is no regular expression of RE2: {text}"
    return None


@lru_cache(maxsize=_REMEMBERED)
def _compiled(pattern: str) -> Any:
    return re2.compile(pattern, _OPTIONS)


class LinearRegex:
    """What SGLang's scheduler uses of Python's `re`, for the patterns of clients."""

    error = re2.error

    @staticmethod
    def search(pattern: str, text: str) -> Any:
        """A match of a pattern in a text, or None. Raises `error`."""
        return _compiled(pattern).search(text)


class Patterns:
    """The check of a pattern or a list of patterns: `sgl_ext.engine.fields.ranges`."""

    def wrong(self, value: Any, model: Any) -> str | None:
        """What the value must be; None if it is right."""
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
            return "must be a regular expression or a list of them"
        if len(values) > MAX_PATTERNS:
            return f"must have at most {MAX_PATTERNS} patterns, and has {len(values)}"
        return next((found for each in values if (found := wrong_pattern(each))), None)

    def __str__(self) -> str:
        return f"{MAX_PATTERNS} regular expressions of RE2, of {MAX_PATTERN_BYTES} bytes each"


MAX_ONE_CHARS = 2_048
MAX_ALL_CHARS = 8_192
"""Characters of one regular expression, and of all in a schema."""
MAX_EBNF = 16_384
MAX_CLASSES = 256
"""Classes of characters in regular expressions and grammars, `.` and repeats included."""
MAX_LENGTHS = 16
"""Different `minLength` and `maxLength` together."""
MAX_SCHEMA = 1 << 20
MAX_SCHEMAS = 20_000
"""Objects in a schema, or in the schemas of all tools."""
MAX_PROPERTIES = 500
"""Properties of one object."""
MAX_BRANCHES = 500
"""Alternatives in one `anyOf`, `oneOf` or `allOf`."""
MAX_VALUES = 2_000
"""Values of all `enum` together."""
_BRANCHES = ("anyOf", "oneOf", "allOf", "prefixItems")
_CLASSES = ".[*+{"
_LENGTHS = ("minLength", "maxLength")


@dataclass(frozen=True, slots=True)
class Grammar:
    """The check of a regular expression or of a grammar: `sgl_ext.engine.fields.ranges`."""

    limit: int

    def wrong(self, value: Any, model: Any) -> str | None:
        """What the value must be; None if it is right."""
        if not isinstance(value, str):
            return "must be a text"
        if len(value) > self.limit:
            return f"must have at most {self.limit} characters, and has {len(value)}"
        if (count := _classes(value)) > MAX_CLASSES:
            return f"must have at most {MAX_CLASSES} classes of characters, and has {count}"
        return None

    def __str__(self) -> str:
        return f"{self.limit:,} characters, {MAX_CLASSES} classes of characters"


class Schema:
    """The check of a JSON schema, or of the schemas in a structural tag, as text."""

    def wrong(self, value: Any, model: Any) -> str | None:
        """What the value must be; None if it is right."""
        if not isinstance(value, str):
            return "must be a text"
        if len(value) > MAX_SCHEMA:
            return f"must have at most {MAX_SCHEMA} characters as JSON, and has {len(value)}"
        if len(value) <= MAX_ONE_CHARS and _classes(value) <= MAX_CLASSES and "Length" not in value:
            return None  # too short for any list or object over its bound
        try:
            document = orjson.loads(value)
        except orjson.JSONDecodeError:
            return None  # SGLang says what is wrong with it
        return _too_large(document)

    def __str__(self) -> str:
        return (
            f"{MAX_SCHEMA:,} characters as JSON, {MAX_SCHEMAS:,} objects, {MAX_PROPERTIES} "
            f"properties of one object, {MAX_BRANCHES} alternatives in one list, {MAX_VALUES:,} "
            f"values of all enums, {MAX_LENGTHS} different lengths of strings, {MAX_ONE_CHARS:,} "
            f"characters of one pattern, {MAX_ALL_CHARS:,} characters and {MAX_CLASSES} classes of "
            "characters of all patterns"
        )


def _too_large(document: Any) -> str | None:
    values = patterns = classes = 0
    lengths: set[Any] = set()
    for number, schema in enumerate(_objects(document)):
        if number == MAX_SCHEMAS:
            return f"must have at most {MAX_SCHEMAS} objects"
        properties = schema.get("properties")
        if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
            count = len(properties)
            return f"an object must have at most {MAX_PROPERTIES} properties, and one has {count}"
        for keyword in _BRANCHES:
            branches = schema.get(keyword)
            if isinstance(branches, list) and len(branches) > MAX_BRANCHES:
                count = len(branches)
                return f"{keyword} must have at most {MAX_BRANCHES} schemas, and one has {count}"
        if isinstance(schema.get("enum"), list):
            values += len(schema["enum"])
            if values > MAX_VALUES:
                return f"must have at most {MAX_VALUES} values in all enums"
        lengths.update(each for key in _LENGTHS if type(each := schema.get(key)) is int and each)
        if len(lengths) > MAX_LENGTHS:
            return f"must have at most {MAX_LENGTHS} different minLength and maxLength"
        for pattern in _patterns(schema):
            patterns += len(pattern)
            classes += _classes(pattern)
            if len(pattern) > MAX_ONE_CHARS or patterns > MAX_ALL_CHARS or classes > MAX_CLASSES:
                return (
                    f"a pattern must have at most {MAX_ONE_CHARS} characters, and all patterns "
                    f"{MAX_ALL_CHARS} and {MAX_CLASSES} classes of characters"
                )
    return None


def _classes(text: str) -> int:
    return sum(map(text.count, _CLASSES))


def _patterns(schema: dict[str, Any]) -> Iterator[str]:
    if isinstance(pattern := schema.get("pattern"), str):
        yield pattern
    if isinstance(named := schema.get("patternProperties"), dict):
        yield from named


def _objects(document: Any) -> Iterator[dict[str, Any]]:
    """All objects of a document."""
    left = [document]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
