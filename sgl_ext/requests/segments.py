"""A request as a chain of segments: one hash for each beginning that another request may share.

A prompt is read in the order in which templates render it, tools, instructions,
messages, and cut where requests of agents part: behind the tools, behind each
block of instructions, behind each message, and every CUT_BYTES inside a long one;
more finely at the beginning of what comes before or is the first user's message, where
short prompts have all that they share.

    tools ........ | system | user      | assistant | user ...
    |---|---|---|--|--|--|--|--|        |           |
    h1  h2  h3  h4 h5 ...      ^session h8          h9

A segment's hash is the 128-bit xxh3 of all canonical text up to its end, so two
requests share exactly the segments before they first differ. The canonical text
leaves out what does not reach the prompt or must not part two requests: the order
of JSON keys and white space, `cache_control`, ids of messages and tool calls, and
whether a text stands alone or in a list of text blocks. It is framed by the byte
0xFF, which no UTF-8 text holds, so that different requests have different texts.

The model, a LoRA adapter, `cache_salt`, `extra_key`, an earlier response that this one
continues, and the caller's salt (its cache group) stand at the front: nothing is shared
across them. A wrong guess of what a template
renders costs a cache miss and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import xxhash

from sgl_ext.requests.canonical import (
    INSTRUCTING_ROLES,
    SORTED,
    add_content,
    block_text,
    offered_tools,
    rendered,
    rest_of_message,
    role_text,
)

CUT_BYTES = 4096
FINE_CUT_BYTES = 1024
# What stands in front of everything: with another of these, nothing is shared.
_SALTS = ("model", "lora_path", "cache_salt", "extra_key", "previous_response_id")


@dataclass(frozen=True, slots=True)
class Chain:
    """A request's segments in prompt order.

    hashes: of everything up to each segment's end, 128 bits each.
    ends: the bytes of canonical text up to there, strictly ascending.
    session: the hash that ends the first message of a user, None if there is none;
        all later turns of a conversation have it too.
    tools: how many tools the request offers.
    tool_segments: how many segments they are.
    head_segments: how many segments come before the first message that does not instruct.
    """

    hashes: Sequence[int] = ()
    ends: Sequence[int] = ()
    session: int | None = None
    tools: int = 0
    tool_segments: int = 0
    head_segments: int = 0


def read_chain(path: str, body: Any, *, salt: bytes = b"") -> Chain:
    """The chain of a parsed and stripped request body; `path` is its URL path.

    No segment of one salt is one of another; a salt has no byte 0xFF.

    Empty for a path that generates nothing, a batch of prompts, or a body whose
    structure cannot be read. Never raises.
    """
    reader = _READERS.get(path)
    if reader is None or not isinstance(body, dict):
        return Chain()
    writer = _Writer(body, salt)
    try:
        tools = reader(writer, body)
    except (TypeError, ValueError, OverflowError, RecursionError, AttributeError):
        return Chain()
    writer.messages_begin()
    return Chain(
        tuple(writer.hashes),
        tuple(writer.ends),
        writer.session,
        tools,
        writer.tool_segments,
        writer.head_segments or 0,
    )


class _Writer:
    """Feeds canonical text to one running hash and notes it at every segment's end."""

    def __init__(self, body: dict[str, Any], salt: bytes) -> None:
        self.hashes: list[int] = []
        self.ends: list[int] = []
        self.session: int | None = None
        self.tool_segments = 0
        self.head_segments: int | None = None
        self._size = 0
        self._hash = xxhash.xxh3_128(salt)
        for key in _SALTS:
            value = body.get(key)
            self._hash.update(b"\xff" if value is None else b"\xff" + str(value).encode())

    def segment(self, text: bytes) -> None:
        """Adds a text that ends where a segment ends; a long one is cut on the way."""
        size = len(text)
        if self.session is None and size > FINE_CUT_BYTES:
            self._cut(text, [*range(FINE_CUT_BYTES, min(size, CUT_BYTES), FINE_CUT_BYTES)])
        elif size > CUT_BYTES:
            self._cut(text, [])
        elif size:
            self._hash.update(text)
            self._size += size
            self.hashes.append(self._hash.intdigest())
            self.ends.append(self._size)

    def _cut(self, text: bytes, cuts: list[int]) -> None:
        size, view, start = len(text), memoryview(text), 0
        for end in (*cuts, *range(CUT_BYTES, size, CUT_BYTES), size):
            self._hash.update(view[start:end])
            self.hashes.append(self._hash.intdigest())
            self.ends.append(self._size + end)
            start = end
        self._size += size

    def messages_begin(self) -> None:
        """What comes next is no instruction any more; to say so twice changes nothing."""
        if self.head_segments is None:
            self.head_segments = len(self.hashes)

    def user_spoke(self) -> None:
        """The segment just ended is a user's message; the first one names the session."""
        if self.session is None and self.hashes:
            self.session = self.hashes[-1]


def _read_tools(writer: _Writer, body: dict[str, Any]) -> int:
    tools = offered_tools(body)
    if not tools:
        return 0
    shown = [rendered(tool) if isinstance(tool, dict) else tool for tool in tools]
    writer.segment(b"\xfft" + orjson.dumps(shown, option=SORTED))
    writer.tool_segments = len(writer.hashes)
    return len(tools)


def with_sorted_tools(body: Any) -> Any:
    """A body whose tools stand in the order of their names; the same object if there are none.

    Clients that offer the same tools in different orders then share what stands behind them.
    It changes the prompt, so it is for those who ask for it.
    """
    tools = body.get("tools") if isinstance(body, dict) else None
    return {**body, "tools": sorted(tools, key=_tool_name)} if isinstance(tools, list) else body


def _tool_name(tool: Any) -> str:
    if not isinstance(tool, dict):
        return ""
    inner = tool.get("function")
    return str((inner if isinstance(inner, dict) else tool).get("name", ""))


def _read_instructions(writer: _Writer, value: Any) -> None:
    """A system prompt that stands outside the messages: each block is a segment."""
    blocks = value if isinstance(value, list) else [value]
    for block in blocks:
        if block:
            writer.segment(b"\xffs" + block_text(block))


def _read_messages(writer: _Writer, messages: Any) -> None:
    """Messages or input items of any protocol: each is a segment."""
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            writer.messages_begin()
            writer.segment(b"\xffm" + block_text(message))
            continue
        role, content = message.get("role"), message.get("content")
        if role in INSTRUCTING_ROLES:
            _read_instructions(writer, content)
            continue
        writer.messages_begin()
        parts = [role_text(role)]
        add_content(parts, content)
        if len(message) > 2:
            parts.append(rest_of_message(message))
        writer.segment(b"".join(parts))
        if role == "user":
            writer.user_spoke()


def _read_chat(writer: _Writer, body: dict[str, Any]) -> int:
    tools = _read_tools(writer, body)
    _read_instructions(writer, body.get("system"))
    _read_messages(writer, body.get("messages"))
    return tools


def _read_responses(writer: _Writer, body: dict[str, Any]) -> int:
    tools = _read_tools(writer, body)
    _read_instructions(writer, body.get("instructions"))
    entered = body.get("input")
    if isinstance(entered, str):
        entered = [{"role": "user", "content": entered}]
    _read_messages(writer, entered)
    return tools


def _read_prompt(writer: _Writer, value: Any) -> int:
    """A raw prompt: a text, token ids, or a list that holds a single one of them."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    writer.messages_begin()
    if isinstance(value, str):
        writer.segment(b"\xffp" + value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, list) and value and all(isinstance(token, int) for token in value):
        writer.segment(array("q", value).tobytes())
    return 0


def _read_ollama(writer: _Writer, body: dict[str, Any]) -> int:
    _read_instructions(writer, body.get("system"))
    return _read_prompt(writer, body.get("prompt"))


def _read_completion(writer: _Writer, body: dict[str, Any]) -> int:
    return _read_prompt(writer, body.get("prompt"))


def _read_generate(writer: _Writer, body: dict[str, Any]) -> int:
    text = body.get("text")
    return _read_prompt(writer, body.get("input_ids") if text is None else text)


_READERS: dict[str, Callable[[_Writer, dict[str, Any]], int]] = {
    "/v1/messages": _read_chat,
    "/v1/chat/completions": _read_chat,
    "/invocations": _read_chat,
    "/api/chat": _read_chat,
    "/v1/responses": _read_responses,
    "/v1/completions": _read_completion,
    "/api/generate": _read_ollama,
    "/generate": _read_generate,
}
PATHS = frozenset(_READERS)
"""Those that generate of a prompt."""
