"""In the HTTP process: shorter ways to results that SGLang and its libraries compute per message
and per tool of each request. The results are equal in all cases.

    tools      a schema that was found valid is not checked again
    messages   a copy of a message of JSON values does not look for cycles and classes, and a copy
               of a cached one is the message itself
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import orjson
from cachetools import FIFOCache

from sgl_ext.engine.host_cache.worth import Worth, turned_off

MAX_SCHEMAS = 4096


class SchemaCache:
    """Digests of the latest schemas that were found valid. worth: its account, in schemas."""

    def __init__(self, max_schemas: int = MAX_SCHEMAS) -> None:
        self._valid: FIFOCache[bytes, None] = FIFOCache(max_schemas)
        self.worth = Worth("schemas")

    def __len__(self) -> int:
        return len(self._valid)

    def check(self, schema: Any, validate: Callable[[Any], None]) -> None:
        """Calls `validate`, which raises on an invalid schema, unless it passed before."""
        worth = self.worth
        if not worth.is_on():
            validate(schema)
            return
        begun_s = worth.now()
        try:
            digest = hashlib.blake2b(orjson.dumps(schema), digest_size=16).digest()
        except (TypeError, RecursionError):
            validate(schema)
            return
        if digest not in self._valid:
            new_s = worth.now()
            validate(schema)
            worth.learn(1, worth.now() - new_s)
            self._valid[digest] = None
        if worth.note(worth.now() - begun_s, 1):
            turned_off(worth)
            self._valid.clear()


SCHEMAS = SchemaCache()
"""The schemas that this process has found valid."""


class Message(dict[str, Any]):
    """A message as a dict that is quick to copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Message:
        return Message({key: _copied(value, memo) for key, value in self.items()})


class SharedMessage(Message):
    """A message as a dict that no code changes, so a copy of it is the dict itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedMessage:
        return self


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind is str or value is None:
        return value
    if kind is dict:
        return {key: _copied(inner, memo) for key, inner in value.items()}
    if kind is list:
        return [_copied(inner, memo) for inner in value]
    return copy.deepcopy(value, memo)
