"""Which field of a body is nested deeper than engines can process.

SGLang checks the schemas of tools, and sends tools and metadata back in some answers. Both fail
inside the server for values that are nested as deep as a parser still accepts.
"""

from typing import Any

import orjson

LIMIT_LEVELS = 246
"""What orjson writes, less the levels of an answer around a field."""
_LEVELS_OF_ORJSON = 254
_AROUND = _LEVELS_OF_ORJSON - LIMIT_LEVELS


def deep_field(body: Any, turns_field: str | None) -> str | None:
    """The first field with more than LIMIT_LEVELS levels; None if there is none.

    turns_field: the messages, which are left out: they are most of a body, and SGLang rejects what
    it does not know in them.
    """
    if not isinstance(body, dict):
        return None
    for name, value in body.items():
        is_nested = isinstance(value, (dict, list)) and name != turns_field
        if is_nested and is_deep(value):
            return str(name)
    return None


def is_deep(value: Any) -> bool:
    """Whether a parsed value has more than LIMIT_LEVELS levels."""
    for _ in range(_AROUND):
        value = (value,)
    try:
        orjson.dumps(value)
    except TypeError:
        return True
    return False
