"""Where each protocol keeps its system texts, and the strip applied to all of them.

One function serves the engine, which strips before tokenization, and the
balancer, which must read the request as the engine will. A body is never
changed in place: where nothing is stripped the same object comes back.

    /v1/messages, .../count_tokens   `system` (string or text blocks); `messages` of role system
    /v1/chat/completions, /api/chat  `messages` of role system or developer (string or parts)
    /v1/responses                    `instructions`; `input` items of role system or developer
    /v1/completions, /api/generate   the beginning of `prompt`, and `system`
    /generate, /vertex_generate      the beginning of `text`

A text that the strip empties goes with its block, and a message or field left
without a block goes too, so the prompt is that of a request that never had it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sgl_ext.requests.headers import HeaderStrip

Body = dict[str, Any]
_GONE = object()
_INSTRUCTING_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Stripped:
    """A request body after the strip; `fields` are the header's own facts (later wins)."""

    body: Any
    headers: int = 0
    fields: dict[str, str] = field(default_factory=dict)


class _Pass:
    """One walk over one body: strips what it is shown and adds up what it found."""

    def __init__(self, strip: HeaderStrip) -> None:
        self._strip = strip
        self.headers = 0
        self.fields: dict[str, str] = {}

    def text(self, value: str) -> Any:
        """The stripped text, the same object if there was no header, _GONE if nothing is left."""
        text, headers, fields = self._strip.strip(value)
        if not headers:
            return value
        self.headers += headers
        self.fields.update(fields)
        return text or _GONE

    def content(self, value: Any) -> Any:
        """A string, or a list of strings and of blocks with a `text` (of any protocol)."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list) and value:
            return self.each(value, self._block)
        return value

    def _block(self, block: Any) -> Any:
        if isinstance(block, str):
            return self.text(block)
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            return self.member(block, "text", self.text)
        return block

    def message(self, message: Any) -> Any:
        """A message or input item: stripped if its role instructs."""
        if not isinstance(message, dict) or message.get("role") not in _INSTRUCTING_ROLES:
            return message
        return self.member(message, "content", self.content)

    def messages(self, value: Any) -> Any:
        return self.each(value, self.message) if isinstance(value, list) else value

    def prompts(self, value: Any) -> Any:
        """A raw prompt or a batch of them. A batch keeps its length: an emptied one stays as ""."""
        if isinstance(value, list):
            return self.each(value, self._prompt)
        return self._prompt(value)

    def _prompt(self, value: Any) -> Any:
        stripped = self.text(value) if isinstance(value, str) else value
        return "" if stripped is _GONE else stripped

    def instances(self, value: Any) -> Any:
        def instance(item: Any) -> Any:
            return self.member(item, "text", self.prompts) if isinstance(item, dict) else item

        return self.each(value, instance) if isinstance(value, list) else value

    @staticmethod
    def each(items: list[Any], visit: Callable[[Any], Any]) -> Any:
        """`items` with each visited; the same list if none changed, _GONE if none is left."""
        visited = [visit(item) for item in items]
        if all(new is old for new, old in zip(visited, items, strict=True)):
            return items
        return [item for item in visited if item is not _GONE] or _GONE

    @staticmethod
    def member(holder: Body, key: str, visit: Callable[[Any], Any]) -> Any:
        """`holder` with one member visited; the same object if unchanged, _GONE if it is gone."""
        if key not in holder:
            return holder
        new = visit(holder[key])
        if new is holder[key]:
            return holder
        return _GONE if new is _GONE else {**holder, key: new}


_Visit = Callable[[_Pass, Any], Any]
_CHAT: dict[str, _Visit] = {"messages": _Pass.messages}
_MESSAGES: dict[str, _Visit] = {"system": _Pass.content, "messages": _Pass.messages}
_TEXTS: dict[str, dict[str, _Visit]] = {
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": _MESSAGES,
    "/v1/chat/completions": _CHAT,
    "/invocations": _CHAT,
    "/api/chat": _CHAT,
    "/v1/responses": {"instructions": _Pass.content, "input": _Pass.messages},
    "/v1/completions": {"prompt": _Pass.prompts},
    "/api/generate": {"system": _Pass.content, "prompt": _Pass.prompts},
    "/generate": {"text": _Pass.prompts},
    "/vertex_generate": {"instances": _Pass.instances},
}


def strip_request(path: str, body: Any, strip: HeaderStrip) -> Stripped:
    """Strips the system texts of a parsed request body.

    `path` is the request's URL path; an unknown one, or a body that is not an
    object, passes unchanged. Never raises on a malformed body: what does not
    have the protocol's shape is left for the engine to refuse.
    """
    members = _TEXTS.get(path)
    if members is None or not isinstance(body, dict):
        return Stripped(body)
    walk = _Pass(strip)
    changed = body
    for key, visit in members.items():
        if key not in body:
            continue
        new = visit(walk, body[key])
        if new is body[key]:
            continue
        changed = dict(changed) if changed is body else changed
        if new is not _GONE:
            changed[key] = new
        elif key in ("messages", "input"):
            changed[key] = []
        else:
            del changed[key]
    return Stripped(changed, walk.headers, walk.fields)
