"""The blocks of a request as its client wrote them: tools, system blocks and blocks of messages.

The blocks and their frames, joined, are the canonical text that `read_chain` hashes. So two
requests of the same model and salts have the same blocks exactly if they have the same chain.
"""

from collections.abc import Hashable, Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import orjson
from cachetools import LRUCache

from sgl_ext.reading.protocol import INSTRUCTION_ROLES, Json, Part, Protocol
from sgl_ext.reading.segments import (
    SORTED,
    block_text,
    items_in,
    offered_tools,
    rest_of_message,
    role_text,
)

TOOLS, SYSTEM, USER, ASSISTANT = "tools", "system", "user", "assistant"
_READ_ERRORS = (TypeError, ValueError, OverflowError, RecursionError, AttributeError)


class Block(NamedTuple):
    """A piece of a prompt.

    label: its place in the body, such as `tools[3]` or `messages[4].content[0]`.
    part: TOOLS; SYSTEM for instructions ahead of the first message; ASSISTANT for the model's
        output; USER for everything else.
    frame: the canonical bytes between the text of the block before and its own.
    text: its canonical text.
    end: the length of the canonical text up to its end, in bytes.
    """

    label: str
    part: str
    frame: bytes
    text: bytes
    end: int

    @property
    def in_head(self) -> bool:
        """Whether it belongs to the tools or to the instructions ahead of the first message."""
        return self.part in (TOOLS, SYSTEM)


def read_blocks(protocol: Protocol, body: Any) -> list[Block]:
    """The blocks of a parsed and stripped request body.

    Empty for a protocol whose prompt is not made of blocks, or a body that cannot be read.
    Never raises.
    """
    if protocol.turns_field is None or not isinstance(body, dict):
        return []
    blocks: list[Block] = []
    end = 0
    try:
        for label, part, frame, text in _pieces(protocol, body):
            if part != TOOLS and blocks and blocks[-1].part == TOOLS:
                frame = b"]" + frame
            end += len(frame) + len(text)
            blocks.append(Block(label, part, frame, text, end))
    except _READ_ERRORS:
        return []
    return blocks


_Piece = tuple[str, str, bytes, bytes]
"""The label, part, frame and text of a block."""


def _pieces(protocol: Protocol, body: Json) -> Iterator[_Piece]:
    in_head = True
    for part, field in protocol.prompt:
        if part is Part.TOOLS:
            yield from _tools(body)
        elif part is Part.INSTRUCTIONS:
            yield from _instructions(field, body.get(field), in_head)
        else:
            for label, message in _labelled(field, items_in(body.get(field))):
                if not isinstance(message, dict):
                    in_head = False
                    yield label, USER, b"\xffm", block_text(message)
                elif message.get("role") in INSTRUCTION_ROLES:
                    yield from _instructions(f"{label}.content", message.get("content"), in_head)
                else:
                    in_head = False
                    yield from _message(label, message)


def _labelled(label: str, value: Any) -> list[tuple[str, Any]]:
    """The items of a list, or a single value, each with its label."""
    if isinstance(value, list):
        return [(f"{label}[{number}]", item) for number, item in enumerate(value)]
    return [(label, value)] if value else []


def _tools(body: Json) -> Iterator[_Piece]:
    frame = b"\xfft["
    for label, tool in _labelled("tools", offered_tools(body.get("tools"))):
        yield label, TOOLS, frame, orjson.dumps(tool, option=SORTED)
        frame = b","


def _instructions(label: str, value: Any, in_head: bool) -> Iterator[_Piece]:
    for name, block in _labelled(label, value):
        if block:
            yield name, SYSTEM if in_head else USER, b"\xffs", block_text(block)


def _message(label: str, message: Json) -> Iterator[_Piece]:
    part = ASSISTANT if _is_model_output(message) else USER
    frame = role_text(message.get("role"))
    for name, block in _labelled(f"{label}.content", message.get("content")):
        yield name, part, frame + b"\xffb", block_text(block)
        frame = b""
    rest = rest_of_message(message) if len(message) > 2 else b""
    if rest or frame:
        name = f"{label}.tool_calls" if "tool_calls" in message else label
        yield name, part, frame + rest[:2], rest[2:]


def _is_model_output(message: Json) -> bool:
    """Whether a message or an input item is output of the model that the client sends back."""
    role, kind = message.get("role"), message.get("type")
    if role is not None:
        return bool(role == "assistant")
    return isinstance(kind, str) and (kind == "reasoning" or kind.endswith("_call"))


# Which block of its context a session changed, when it moves from one context to another.

CONTEXT_CHANGED = "context_changed"
MAX_SESSIONS = 4096
_MAX_ID_CHARS = 80


class NamedBlock(NamedTuple):
    """A block of a context without its content. hash: of the content."""

    id: str
    layer: str
    hash: str


class ContextMoves:
    """The last context of each session; of the sessions, the last used are remembered."""

    def __init__(self) -> None:
        # Numbers in place of names, which clients choose: so an entry is small.
        self._last: LRUCache[Hashable, tuple[int, ...]] = LRUCache(MAX_SESSIONS)

    def __len__(self) -> int:
        return len(self._last)

    def note(self, session: Hashable, context: tuple[NamedBlock, ...]) -> str | None:
        """The first block that differs from the session's last context; None if none does, or if it
        had none. Remembers this one."""
        now = tuple(map(hash, context))
        before = self._last.get(session)
        self._last[session] = now
        if before is None or before == now:
            return None
        pairs = enumerate(zip_longest(before, now))
        first = next(number for number, (old, new) in pairs if old != new)
        block = context[min(first, len(context) - 1)]
        return f"block {block.id[:_MAX_ID_CHARS]} of layer {block.layer}"
