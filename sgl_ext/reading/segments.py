"""A request as a chain of segments: one hash for each prefix that another request may share.

The prompt is read in the order in which templates render it (tools, instructions, messages) and
cut where requests of agents diverge: after the tools, after each block of instructions, after
each message, and every CUT_BYTES inside a long one. Up to the end of the first user message the
first cuts are finer, because short prompts share nothing else.

    tools ........ | system | user      | assistant | user ...
    |---|---|---|--|--|--|--|--|        |           |
    h1  h2  h3  h4 h5 ...      ^session h8          h9

A segment's hash is the 128-bit xxh3 of all canonical text up to its end, so two requests share
exactly the segments before their first difference. `canonical.py` says what the canonical text
leaves out.

The model, a LoRA adapter, `cache_salt`, `extra_key`, an earlier response that this one
continues, and the caller's salt (its cache group) come first: nothing is shared across them. A
wrong guess of what a template renders costs a cache miss and nothing else.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from operator import sub
from typing import Any

import msgspec
import orjson
import xxhash

from sgl_ext.reading.protocol import INSTRUCTION_ROLES, Json, Part, Protocol
from sgl_ext.wire.headers import GROUP_HEADER

# The canonical text of the parts of a request, in bytes: what reaches the prompt.
#
# It leaves out the order of JSON keys and white space, marks for the cache, ids of messages and
# tool calls, and whether a text stands alone or in a list of text blocks. Parts are framed
# by the byte 0xFF, which no UTF-8 text contains.
#
# A client defers a tool (`defer_loading`) so that it can offer it later without changing the head
# of the prompt: a message that refers to the tool shows it. If a vendor's server should search the
# deferred tools, all are at the head, because no server here does.

MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""The keys with which clients mark the end of a prefix."""
_IDS = {"id", "tool_use_id", "tool_call_id", "call_id"}
# Some SDKs send the last one with the tools of streamed requests only.
_NOT_RENDERED = MARKS | _IDS | {"status", "signature", "eager_input_streaming"}
_TEXT_ALONE = _NOT_RENDERED | {"role", "content"}
_TEXT_TYPES = frozenset({None, "text", "input_text", "output_text"})
_RESULT_KEYS = frozenset({"type", "tool_use_id", "content", "cache_control"})
ROLES: dict[Any, bytes] = {role: b"\xffm" + role.encode() for role in ("user", "assistant", "tool")}
"""How a message of each usual role begins."""
_DEFERRED = "defer_loading"
_SEARCHES = "tool_search"
SORTED = orjson.OPT_SORT_KEYS


def offered_tools(tools: Any) -> list[Any]:
    """The tools that reach the prompt, as they are rendered: all, whichever may be called."""
    return [rendered(tool) for tool in tools_at_head(tools)] if isinstance(tools, list) else []


def tools_at_head(tools: list[Any]) -> list[Any]:
    """The tools that the prompt shows at its head; the same list if none is deferred."""
    marked = [  # each request comes here, and few have such a tool
        tool
        for tool in tools
        if type(tool) is dict
        and (_DEFERRED in tool or (type(f := tool.get("function")) is dict and _DEFERRED in f))
    ]
    if not any(map(is_deferred, marked)) or are_searched(tools):
        return tools
    return [tool for tool in tools if not is_deferred(tool)]


def is_deferred(tool: Any) -> bool:
    """Whether a tool, of any protocol, says that it is shown later."""
    if not isinstance(tool, dict):
        return False
    function = tool.get("function")
    return tool.get(_DEFERRED) is True or (
        isinstance(function, dict) and function.get(_DEFERRED) is True
    )


def are_searched(tools: list[Any]) -> bool:
    """Whether a vendor's server should search these tools for those that the model needs."""
    kinds = (tool.get("type") for tool in tools if isinstance(tool, dict))
    return any(isinstance(kind, str) and kind.startswith(_SEARCHES) for kind in kinds)


def items_in(value: Any) -> list[Any]:
    """A list of messages or items; a text is one user's message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return value if isinstance(value, list) else []


def role_text(role: Any) -> bytes:
    """The beginning of a message of this role."""
    return ROLES.get(role) or b"\xffm" + str(role).encode()


def text_of(value: str) -> bytes:
    """A text in bytes."""
    return value.encode("utf-8", "surrogatepass")


def content_text(content: Any, *, in_result: bool = False) -> bytes:
    """A text or blocks; a text alone counts as a list of one text block."""
    if type(content) is str:
        return b"\xffb" + content.encode("utf-8", "surrogatepass") if content else b""
    if not isinstance(content, list):
        content = (content,) if content else ()
    return b"".join([b"\xffb" + block_text(block, in_result=in_result) for block in content])


def block_text(block: Any, *, in_result: bool = False) -> bytes:
    """One block of content; a text block is its text.

    in_result: the block is inside a tool's result. A result inside it is read as any other block:
        how deep calls can go differs between the balancer and an engine.
    """
    if isinstance(block, str):
        return text_of(block)
    if not isinstance(block, dict):
        return orjson.dumps(block, option=SORTED)
    kind = block.get("type")
    if kind in _TEXT_TYPES and isinstance(text := block.get("text"), str):
        return text_of(text)
    if kind == "tool_use":
        return b"\xffu" + orjson.dumps((block.get("name"), block.get("input")), option=SORTED)
    if kind != "tool_result" or in_result:
        return orjson.dumps(rendered(block), option=SORTED)
    text = b"\xffr" + content_text(block.get("content"), in_result=True)
    if not block.keys() <= _RESULT_KEYS:
        others = {k: v for k, v in block.items() if k != "content"}
        text += orjson.dumps(rendered(others), option=SORTED)
    return text


def rest_of_message(message: dict[str, Any]) -> bytes:
    """The rest of a message, without role and content: tool calls, reasoning, a call's output."""
    if message.keys() <= _TEXT_ALONE:  # as each result of a tool in a chat
        return b""
    rest = {
        key: value
        for key, value in message.items()
        if value is not None and key not in ("role", "content")
    }
    calls = rest.get("tool_calls")
    if isinstance(calls, list):
        rest["tool_calls"] = [rendered(call) for call in calls]
    if isinstance(rest.get("output"), list):
        rest["output"] = [rendered(part) for part in rest["output"]]
    if rest.get("type") == "message":
        del rest["type"]
    rest = rendered(rest)
    return b"\xffo" + orjson.dumps(rest, option=SORTED) if rest else b""


def rendered(block: Any) -> Any:
    """A block, tool or message without what does not reach the prompt."""
    if not isinstance(block, dict) or _NOT_RENDERED.isdisjoint(block):
        return block
    return {key: value for key, value in block.items() if key not in _NOT_RENDERED}


CUT_BYTES = 4096
FINE_CUT_BYTES = 1024
_SCHEMAS = frozenset({"parameters", "input_schema"})
# How a message that is one text begins.
_TEXT_BEGINS = {role: begin + b"\xffb" for role, begin in ROLES.items()}
_TEXT_BEGINS |= dict.fromkeys(INSTRUCTION_ROLES, b"\xffs")
# Requests that differ in one of these share nothing.
_SALTS = ("model", "lora_path", "cache_salt", "extra_key", "previous_response_id")


class Chain(msgspec.Struct, frozen=True, gc=False):
    """A request's segments in prompt order.

    hashes: for each segment, the 128-bit hash of everything up to its end.
    ends: the bytes of canonical text up to there, strictly ascending.
    session: the hash at the end of the first user message, None if there is none; all later
        turns of a conversation have it too.
    opening: the hash of the first user message alone, whatever precedes it; 0 if there is none.
    tools: how many tools the request offers.
    tool_segments: how many segments the tools have.
    head_segments: how many segments come before the first message that is no instruction.
    """

    hashes: Sequence[int] = ()
    ends: Sequence[int] = ()
    session: int | None = None
    tools: int = 0
    tool_segments: int = 0
    head_segments: int = 0
    opening: int = 0


def salt_of(headers: Mapping[str, str]) -> bytes:
    """A salt that keeps the segments and conversations of different cache groups distinct."""
    group = headers.get(GROUP_HEADER)
    return b"" if group is None else b"g" + group.encode("utf-8", "surrogatepass")


def read_chain(protocol: Protocol, body: Any, *, salt: bytes = b"") -> Chain:
    """The chain of a parsed and stripped request body.

    Two chains of different salts share no segment; a salt must not contain the byte 0xFF.
    Empty for a protocol that generates nothing, a batch of prompts, or a body whose structure
    cannot be read. Never raises.
    """
    if not protocol.generates or not isinstance(body, dict):
        return Chain()
    try:
        writer = _Writer(body, salt)
        for write, field in _steps(protocol):
            if (value := body.get(field)) is not None:
                write(writer, value)
    except (TypeError, ValueError, OverflowError, RecursionError, AttributeError):
        return Chain()
    writer.messages_begin()
    return Chain(
        tuple(writer.hashes),
        tuple(writer.ends),
        writer.session,
        writer.tools,
        writer.tool_segments,
        writer.head_segments or 0,
        writer.opening,
    )


def read_batch(protocol: Protocol, body: Any, *, salt: bytes = b"") -> tuple[Chain, ...]:
    """The chains of the prompts of a batch, in its order: each that of a request with this prompt
    alone. () for a request with one prompt. Never raises."""
    if not protocol.generates or not isinstance(body, dict):
        return ()
    for part, field in protocol.prompt:
        prompts: Any = body.get(field)
        if part is Part.TEXT and _is_batch(prompts):
            return tuple(
                read_chain(protocol, {**body, field: [each]}, salt=salt) for each in prompts
            )
    return ()


def longest_of(chains: Sequence[Chain]) -> Chain:
    """The chain of the longest prompt of a batch, which begins with what all of them share."""
    return max(chains, key=lambda each: (*each.ends[-1:], *each.hashes[-1:]), default=Chain())


def distinct_bytes(chains: Iterable[Chain]) -> int:
    """The bytes of the prompts of a batch; those of segments that several of them begin with count
    once, as an engine computes them once."""
    sizes: dict[int, int] = {}
    for chain in chains:
        sizes.update(zip(chain.hashes, map(sub, chain.ends, (0, *chain.ends)), strict=False))
    return sum(sizes.values())


def _is_batch(prompts: Any) -> bool:
    return isinstance(prompts, list) and len(prompts) > 1 and isinstance(prompts[0], str | list)


class _Writer:
    """Feeds canonical text to one running hash and records the hash at every segment's end."""

    def __init__(self, body: Json, salt: bytes) -> None:
        self.hashes: list[int] = []
        self.ends: list[int] = []
        self.session: int | None = None
        self.opening = 0
        self.tools = 0
        self.tool_segments = 0
        self.head_segments: int | None = None
        self.size = 0
        salts = [b"" if value is None else _salt(value) for value in map(body.get, _SALTS)]
        self.running = xxhash.xxh3_128(b"\xff".join((salt, *salts)))

    def segment(self, text: bytes) -> None:
        """Adds a text that ends where a segment ends; a long one is cut into several segments."""
        size = len(text)
        if size > FINE_CUT_BYTES and (self.session is None or size > CUT_BYTES):
            fine_bytes = min(size, CUT_BYTES) if self.session is None else 0
            self._cut(text, [*range(FINE_CUT_BYTES, fine_bytes, FINE_CUT_BYTES)])
        elif size:
            self.running.update(text)
            self.size += size
            self.hashes.append(self.running.intdigest())
            self.ends.append(self.size)

    def _cut(self, text: bytes, cuts: list[int]) -> None:
        size, view, start = len(text), memoryview(text), 0
        for end in (*cuts, *range(CUT_BYTES, size, CUT_BYTES), size):
            self.running.update(view[start:end])
            self.hashes.append(self.running.intdigest())
            self.ends.append(self.size + end)
            start = end
        self.size += size

    def messages_begin(self) -> None:
        """The instructions have ended; a second call changes nothing."""
        if self.head_segments is None:
            self.head_segments = len(self.hashes)


def _salt(value: Any) -> bytes:
    return text_of(value) if isinstance(value, str) else b"\xff" + orjson.dumps(value)


def with_sorted_tools(body: Any) -> Any:
    """A body with its tools sorted by name; the same object if there are none.

    Clients that offer the same tools in different orders then share the prefix after the tools.
    It changes the prompt, so it is off by default.
    """
    tools = body.get("tools") if isinstance(body, dict) else None
    return {**body, "tools": sorted(tools, key=_tool_name)} if isinstance(tools, list) else body


def with_sorted_schemas(body: Any) -> Any:
    """A body with the keys of its tools' schemas sorted; the same object if there are none.

    Clients whose language keeps no order of keys then share the prefix after the tools. The model
    sees the same schema, and fills in its properties in another order, so it is off by default.
    """
    tools = body.get("tools") if isinstance(body, dict) else None
    return {**body, "tools": [*map(_with_sorted, tools)]} if isinstance(tools, list) else body


def _with_sorted(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    if isinstance(function := tool.get("function"), dict):
        return {**tool, "function": _with_sorted(function)}
    if isinstance(tool.get("tools"), list):  # a namespace
        return with_sorted_schemas(tool)
    with suppress(TypeError):  # nested too deeply, which is an error later
        for field in _SCHEMAS & tool.keys():
            tool = {**tool, field: orjson.loads(orjson.dumps(tool[field], option=SORTED))}
    return tool


def _tool_name(tool: Any) -> str:
    if not isinstance(tool, dict):
        return ""
    inner = tool.get("function")
    return str((inner if isinstance(inner, dict) else tool).get("name", ""))


@cache
def _steps(protocol: Protocol) -> tuple[tuple[Callable[[_Writer, Any], None], str], ...]:
    """What to do with each field of the prompt, in order."""
    return tuple((_WRITE[part], field) for part, field in protocol.prompt)


def _write_tools(writer: _Writer, value: Any) -> None:
    if tools := offered_tools(value):
        writer.segment(b"\xfft" + orjson.dumps(tools, option=SORTED))
        writer.tools = len(tools)
        writer.tool_segments = len(writer.hashes)


def _write_instructions(writer: _Writer, value: Any) -> None:
    """Instructions: each block is a segment."""
    for block in value if isinstance(value, list) else (value,):
        if block:
            writer.segment(b"\xffs" + block_text(block))


def _write_items(writer: _Writer, value: Any) -> None:
    """Messages or other items: each is a segment."""
    update, digest = writer.running.update, writer.running.intdigest
    hashes, ends, begin_of = writer.hashes, writer.ends, _TEXT_BEGINS.get
    uncut_bytes = FINE_CUT_BYTES if writer.session is None else CUT_BYTES
    for message in value if type(value) is list else items_in(value):
        if not isinstance(message, dict):
            writer.messages_begin()
            writer.segment(b"\xffm" + block_text(message))
            continue
        role, content = message.get("role"), message.get("content")
        if type(content) is str and len(message) == 2 and (begin := begin_of(role)) and content:
            # Most of a long history: the same segment as below, without copies.
            text = content.encode("utf-8", "surrogatepass")
            if (size := len(begin) + len(text)) <= uncut_bytes:
                update(begin)
                update(text)
                hashes.append(digest())
                writer.size = end = writer.size + size
                ends.append(end)
                if writer.session is None and role not in INSTRUCTION_ROLES:
                    if writer.head_segments is None:
                        writer.head_segments = len(hashes) - 1
                    if role == "user":
                        writer.session, uncut_bytes = hashes[-1], CUT_BYTES
                        writer.opening = xxhash.xxh3_64_intdigest(begin + text)
                continue
        if role in INSTRUCTION_ROLES:
            _write_instructions(writer, content)
            continue
        if writer.head_segments is None:
            writer.messages_begin()
        text = role_text(role) + content_text(content)
        if len(message) > 2:
            text += rest_of_message(message)
        writer.segment(text)
        if writer.session is None and role == "user" and hashes:
            writer.session, uncut_bytes = hashes[-1], CUT_BYTES
            writer.opening = xxhash.xxh3_64_intdigest(text)


def _write_text(writer: _Writer, value: Any) -> None:
    """A raw prompt: a text, token ids, or a list of one of them; a batch has no chain."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    writer.messages_begin()
    if isinstance(value, str):
        writer.segment(b"\xffp" + text_of(value))
    elif isinstance(value, list) and value and isinstance(value[0], int):
        writer.segment(array("q", value).tobytes())


_WRITE: dict[Part, Callable[[_Writer, Any], None]] = {
    Part.TOOLS: _write_tools,
    Part.INSTRUCTIONS: _write_instructions,
    Part.MESSAGES: _write_items,
    Part.ITEMS: _write_items,
    Part.TEXT: _write_text,
    Part.INSTANCES: lambda writer, value: None,
}
