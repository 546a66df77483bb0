"""The blocks of a request as its client wrote them: tools, system blocks and blocks of messages.

The blocks and their frames, joined, are the canonical text that `read_chain` hashes. So two
requests of the same model and salts have the same blocks exactly if they have the same chain.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from sgl_ext.requests.canonical import (
    SORTED,
    block_text,
    items_in,
    offered_tools,
    rendered,
    rest_of_message,
    role_text,
)
from sgl_ext.requests.protocol import INSTRUCTION_ROLES, Part, Protocol

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
    walk = _Walk()
    try:
        for part, field in protocol.prompt:
            if part is Part.TOOLS:
                walk.tools(body)
            elif part is Part.INSTRUCTIONS:
                walk.instructions(field, body.get(field))
            else:
                walk.messages(field, body.get(field))
    except _READ_ERRORS:
        return []
    return walk.blocks


class _Walk:
    """Collects the blocks of one body in the order of its prompt."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._end = 0
        self._frame = b""
        self._in_head = True

    def _add(self, label: str, part: str, frame: bytes, text: bytes) -> None:
        frame, self._frame = self._frame + frame, b""
        self._end += len(frame) + len(text)
        self.blocks.append(Block(label, part, frame, text, self._end))

    def tools(self, body: dict[str, Any]) -> None:
        frame = b"\xfft["
        for number, tool in enumerate(offered_tools(body)):
            shown = rendered(tool) if isinstance(tool, dict) else tool
            self._add(f"tools[{number}]", TOOLS, frame, orjson.dumps(shown, option=SORTED))
            frame = b","
        if frame == b",":
            self._frame = b"]"

    def instructions(self, label: str, value: Any) -> None:
        part = SYSTEM if self._in_head else USER
        for number, block in enumerate(value if isinstance(value, list) else [value]):
            if block:
                name = f"{label}[{number}]" if isinstance(value, list) else label
                self._add(name, part, b"\xffs", block_text(block))

    def messages(self, label: str, messages: Any) -> None:
        for number, message in enumerate(items_in(messages)):
            name = f"{label}[{number}]"
            if not isinstance(message, dict):
                self._in_head = False
                self._add(name, USER, b"\xffm", block_text(message))
            elif message.get("role") in INSTRUCTION_ROLES:
                self.instructions(f"{name}.content", message.get("content"))
            else:
                self._in_head = False
                self._message(name, message)

    def _message(self, label: str, message: dict[str, Any]) -> None:
        part = ASSISTANT if _is_model_output(message) else USER
        content, frame = message.get("content"), role_text(message.get("role"))
        if isinstance(content, list):
            for number, block in enumerate(content):
                text = block_text(block)
                self._add(f"{label}.content[{number}]", part, frame + b"\xffb", text)
                frame = b""
        elif content:
            self._add(f"{label}.content", part, frame + b"\xffb", block_text(content))
            frame = b""
        rest = rest_of_message(message) if len(message) > 2 else b""
        if rest or frame:
            name = f"{label}.tool_calls" if "tool_calls" in message else label
            self._add(name, part, frame + rest[:2], rest[2:])


def _is_model_output(message: dict[str, Any]) -> bool:
    """Whether a message or an input item is output of the model that the client sends back."""
    role, kind = message.get("role"), message.get("type")
    if role is not None:
        return bool(role == "assistant")
    return isinstance(kind, str) and (kind == "reasoning" or kind.endswith("_call"))
