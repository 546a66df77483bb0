"""In the HTTP process: shorter ways to results that SGLang and its libraries compute per message
and per tool of each request. The results are equal in all cases.

    tools      a schema that was found valid is not checked again
    messages   a copy of a message of JSON values does not look for cycles and classes
    templates  an attribute of a dict, a text, a loop or a namespace is looked up without the
               sandbox's checks where their answers are known
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import orjson
from cachetools import FIFOCache

MAX_SCHEMAS = 4096


class SchemaCache:
    """Digests of the latest schemas that were found valid."""

    def __init__(self, max_schemas: int = MAX_SCHEMAS) -> None:
        self._valid: FIFOCache[bytes, None] = FIFOCache(max_schemas)

    def __len__(self) -> int:
        return len(self._valid)

    def check(self, schema: Any, validate: Callable[[Any], None]) -> None:
        """Calls `validate`, which raises on an invalid schema, unless it passed before."""
        try:
            digest = hashlib.blake2b(orjson.dumps(schema), digest_size=16).digest()
        except (TypeError, RecursionError):
            validate(schema)
            return
        if digest not in self._valid:
            validate(schema)
            self._valid[digest] = None


class Message(dict[str, Any]):
    """A message as a dict that is quick to copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Message:
        return Message({key: _copied(value, memo) for key, value in self.items()})


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind is str or value is None:
        return value
    if kind is dict:
        return {key: _copied(inner, memo) for key, inner in value.items()}
    if kind is list:
        return [_copied(inner, memo) for inner in value]
    return copy.deepcopy(value, memo)


def compile_template(original: Callable[..., Any], source: str) -> Any:
    """Around the compilation of chat templates, which caches what it compiled."""
    template = original(source)
    environment = template.environment
    if "getattr" not in vars(environment):
        environment.getattr = _quick_getattr(environment)
    return template


def _quick_getattr(environment: Any) -> Callable[[Any, str], Any]:
    """`environment.getattr` of jinja2's sandbox, with a short way for the most common classes."""
    from jinja2.runtime import LoopContext
    from jinja2.utils import Namespace

    sandboxed = environment.getattr
    of_dicts, of_texts = frozenset(dir(dict)), _public(str) - {"format", "format_map"}
    of_loops = _public(LoopContext)
    plain = (str, bool, int, type(None))

    def quick(value: Any, name: str) -> Any:
        kind = type(value)
        if kind is dict or kind is Message:
            if name not in of_dicts:
                return value[name] if name in value else environment.undefined(obj=value, name=name)
        elif kind is str:
            if name in of_texts:
                return getattr(value, name)
        elif kind is LoopContext:
            if name in of_loops:
                return getattr(value, name)
        elif kind is Namespace and not name.startswith("_"):
            found = getattr(value, name, None)
            if found is not None and type(found) in plain:
                return found
        return sandboxed(value, name)

    return quick


def _public(kind: type) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if not name.startswith("_"))
