"""Clients' regular expressions, in an engine whose time is linear in the text.

Python's `re` tries one way after the other, so that a short pattern can take minutes with a short
text. RE2 follows all ways at once. It takes no pattern whose match depends on what it has matched
before (backreferences, lookaround), and none that repeats more than 1,000 times.
"""

from functools import lru_cache
from typing import Any

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
    """The check of a pattern or a list of patterns: `sgl_ext.engine.fields.checks`."""

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
