r"""Moves volatile lines from the system text to the beginning of the first user message.

    tools, system text with a date, first message        tools, system text, date, first message
    |-- stable --|-------- differs -------------|   ->   |-- stable ---------|---- differs ----|

Templates render tools before or after the system text, but always before the first message. So
sessions that differ only in such lines share tools and the whole system text.

Only instructions in front of the first message are searched. The lines come in the order in which
they stood, each once, inside a `<system-reminder>`, which agents' models know as a text of the
system. Everything else stays byte for byte and in order; a block that had nothing else is removed.
A second move finds nothing. Where the first message is not the user's, or begins with a tool's
result, there is no place for the lines: the body stays as it is, and they count as KEPT.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from sgl_ext.requests.protocol import INSTRUCTION_ROLES, Json, Part, Protocol
from sgl_ext.requests.rewriting import DROPPED, altered, edited, reminder
from sgl_ext.requests.volatile_lines.rules import find_lines

KEPT = "kept"
_MOST_CHARS = 1 << 20


class Moved(NamedTuple):
    """A body, the same object if nothing was moved, and how often lines of each kind were found."""

    body: Any
    kinds: Mapping[str, int]


def move_lines(protocol: Protocol, body: Any) -> Moved:
    """Moves the volatile lines of a parsed body. Never raises on a malformed body.

    Texts of over a MiB are not searched. Raw prompts have no messages and stay as they are, and so
    do bodies that continue a response which is not in them.
    """
    if not isinstance(body, dict) or body.get("previous_response_id") is not None:
        return Moved(body, {})
    turns = protocol.turns_field
    if turns is None or not isinstance(body.get(turns), str | list):
        return Moved(body, {})
    taker = _Taker()
    edits: Json = {
        name: taker.content(body[name]) for name in protocol.instruction_fields if name in body
    }
    is_items = (Part.ITEMS, turns) in protocol.prompt
    messages = _with_lines(body[turns], taker, "input_text" if is_items else "text")
    if messages is None:
        return Moved(body, {KEPT: taker.kinds.total()})
    if not taker.lines:
        return Moved(body, {})
    return Moved(edited(body, {**edits, turns: messages}), taker.kinds)


def _with_lines(messages: str | list[Any], taker: "_Taker", text_type: str) -> Any:
    """The messages without the lines of the instructions that they begin with, and with all taken
    lines before the first message; None if that takes none."""
    if isinstance(messages, str):
        return f"{taker.reminder()}\n{messages}" if taker.lines else messages
    count = 0
    while count < len(messages) and _role(messages[count]) in INSTRUCTION_ROLES:
        count += 1
    head = altered(messages[:count], taker.message)
    if not taker.lines:
        return messages
    if count == len(messages) or _role(messages[count]) != "user":
        return None
    first = messages[count]
    text, content = taker.reminder(), first.get("content")
    if isinstance(content, str):
        content = f"{text}\n{content}"
    elif isinstance(content, list) and content and not _is_result(content[0]):
        content = [{"type": text_type, "text": text}, *content]
    else:
        return None
    return [*head, {**first, "content": content}, *messages[count + 1 :]]


class _Taker:
    """Takes the volatile lines out of texts, and keeps them in order.

    Each method returns the same object if nothing was taken, and DROPPED if nothing is left.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.kinds: Counter[str] = Counter()

    def reminder(self) -> str:
        """All lines as one text."""
        return reminder("".join(self.lines)[:-1])

    def content(self, value: Any) -> Any:
        """A text, or a list of texts and of blocks with a `text`."""
        if not isinstance(value, list):
            return self._text(value)
        blocks = altered(value, self._block)
        return blocks if blocks is value or blocks else DROPPED

    def message(self, message: Json) -> Any:
        content = self.content(message.get("content"))
        return DROPPED if content is DROPPED else edited(message, {"content": content})

    def _block(self, block: Any) -> Any:
        if not isinstance(block, dict):
            return self._text(block)
        text = self._text(block.get("text"))
        return DROPPED if text is DROPPED else edited(block, {"text": text})

    def _text(self, text: Any) -> Any:
        if not isinstance(text, str) or len(text) > _MOST_CHARS:
            return text
        rest, end = [], 0
        for found in find_lines(text):
            lines = text[found.start : found.end]
            self.lines.append(lines if lines.endswith("\n") else f"{lines}\n")
            self.kinds[found.kind] += 1
            rest.append(text[end : found.start])
            end = found.end
        return ("".join([*rest, text[end:]]) or DROPPED) if rest else text


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _is_result(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result"
