"""The strip, applied to all system texts and raw prompts of a request.

The engine strips before tokenization, and the balancer must read a request as the engine will:
both call this function. A body is never changed in place; if nothing is stripped, the same
object is returned.

A block whose text becomes empty is removed, and so is a message or field without any block left:
the prompt is then that of a request which never had the header.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sgl_ext.requests.headers import HeaderStrip
from sgl_ext.requests.protocol import INSTRUCTION_ROLES, Json, Part, Protocol
from sgl_ext.requests.rewriting import DROPPED, altered, edited


@dataclass(frozen=True, slots=True)
class Stripped:
    """A request body after the strip, the number of headers, and their fields (later wins)."""

    body: Any
    headers: int = 0
    fields: dict[str, str] = field(default_factory=dict)


def strip_request(protocol: Protocol, body: Any, strip: HeaderStrip) -> Stripped:
    """Strips the system texts of a parsed request body.

    A body that is not an object passes unchanged. Never raises on a malformed body: a field
    without the protocol's structure is left for the engine to reject.
    """
    if not isinstance(body, dict):
        return Stripped(body)
    visitor = _Visitor(strip)
    edits: Json = {}
    for part, name in protocol.prompt:
        if part is not Part.TOOLS and name in body:
            new = visitor.visit(part, body[name])
            edits[name] = [] if new is DROPPED and part is not Part.INSTRUCTIONS else new
    return Stripped(edited(body, edits), visitor.headers, visitor.fields)


class _Visitor:
    """Strips the texts of one body and adds up what it found.

    Each method returns the same object if nothing changed, and DROPPED if nothing is left.
    """

    def __init__(self, strip: HeaderStrip) -> None:
        self._strip = strip
        self.headers = 0
        self.fields: dict[str, str] = {}

    def visit(self, part: Part, value: Any) -> Any:
        if part is Part.INSTRUCTIONS:
            return self._content(value)
        if part is Part.TEXT:
            return self._prompts(value)
        if not isinstance(value, list):
            return value
        return _each(value, self._instance if part is Part.INSTANCES else self._message)

    def _content(self, value: Any) -> Any:
        """A text, or a list of texts and of blocks with a `text`."""
        return _each(value, self._block) if isinstance(value, list) else self._text(value)

    def _block(self, value: Any) -> Any:
        return self._text(value) if isinstance(value, str) else _member(value, "text", self._text)

    def _text(self, value: Any) -> Any:
        text, headers, fields = (
            self._strip.strip(value) if isinstance(value, str) else (value, 0, {})
        )
        self.headers += headers
        self.fields.update(fields)
        return text if text or not headers else DROPPED

    def _message(self, message: Any) -> Any:
        """A message or input item: stripped if it has instructions."""
        if not isinstance(message, dict) or message.get("role") not in INSTRUCTION_ROLES:
            return message
        return _member(message, "content", self._content)

    def _prompts(self, value: Any) -> Any:
        """A raw prompt, or a batch of them, which keeps its length: an empty prompt stays as ""."""
        if isinstance(value, list):
            is_tokens = bool(value) and isinstance(value[0], int)
            return value if is_tokens else _each(value, self._prompt)
        return self._prompt(value)

    def _prompt(self, value: Any) -> Any:
        stripped = self._text(value)
        return "" if stripped is DROPPED else stripped

    def _instance(self, instance: Any) -> Any:
        return _member(instance, "text", self._prompts)


def _each(items: list[Any], visit: Callable[[Any], Any]) -> Any:
    visited = altered(items, visit)
    return visited if visited is items or visited else DROPPED


def _member(holder: Any, key: str, visit: Callable[[Any], Any]) -> Any:
    """`holder` with one member visited."""
    if not isinstance(holder, dict) or key not in holder:
        return holder
    new = visit(holder[key])
    return new if new is DROPPED else edited(holder, {key: new})
