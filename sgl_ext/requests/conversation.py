"""The beginning of a conversation as one number: requests that share it share a cached prefix.

Requests of one agent harness agree on their tools and on how their instructions
begin; further on these name a person's folders and the like, so only the first
kilobyte of the first of them counts. A request with neither is known by the
first kilobyte of its first message or raw prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, takewhile
from typing import Any

import xxhash

_BEGINNING_CHARS = 1024
_BEGINNING_TOKENS = 256
_INSTRUCTING_ROLES = ("system", "developer")


def conversation_key(body: Any) -> int | None:
    """A 64-bit hash of the model, the tools' names and the beginning of the instructions.

    `body` is a parsed and stripped request of any protocol. Returns None where
    there is nothing to tell one conversation from another. Never raises on a
    malformed body.
    """
    if not isinstance(body, dict):
        return None
    parts = [*_tool_names(body.get("tools"))]
    parts += [text[:_BEGINNING_CHARS] for text in islice(_instructions(body), 1)]
    if not parts:
        parts = [text[:_BEGINNING_CHARS] for text in _first_input(body)]
    if not parts:
        return None
    digest = xxhash.xxh3_64()
    for part in (str(body.get("model", "")), *parts):
        digest.update(part.encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return digest.intdigest()


def _tool_names(tools: Any) -> Iterator[str]:
    for tool in _items(tools):
        inner = tool.get("function")
        name = inner.get("name") if isinstance(inner, dict) else tool.get("name")
        yield str(name)


def _instructions(body: dict[str, Any]) -> Iterator[str]:
    yield from _texts(body.get("system"))
    yield from _texts(body.get("instructions"))
    leading = takewhile(
        lambda message: message.get("role") in _INSTRUCTING_ROLES,
        _items(body.get("messages") or body.get("input")),
    )
    for message in leading:
        yield from _texts(message.get("content"))


def _first_input(body: dict[str, Any]) -> list[str]:
    for key in ("messages", "input", "prompt", "text", "input_ids", "inputs"):
        value = body.get(key)
        if isinstance(value, list) and value:
            first = value[0]
            if isinstance(first, dict):
                return list(_texts(first.get("content")))[:1]
            if isinstance(first, str):
                return [first]
            ids = first if isinstance(first, list) else value
            return [repr([i for i in ids[:_BEGINNING_TOKENS] if isinstance(i, int)])]
        if isinstance(value, str) and value:
            return [value]
    return []


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    for block in content if isinstance(content, list) else ():
        text = block.get("text") if isinstance(block, dict) else block
        if isinstance(text, str):
            yield text


def _items(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
