"""Makes a context of what a request's cache marks cover, so that the next request can name it.

    system   [ A ][ B, mark 1h ][ C ]         stable   A, B
    messages [ u1 ][ u2: [doc, mark 5m][q] ]  project  C, u1, [doc] of u2     the rest: [q] of u2

What a mark of an hour or more covers is `stable`, what only shorter ones cover is `project`. The
answer says how much of each field the context has. The client leaves out exactly that and sends
the rest: also the rest of a message, which continues the one in the context. The prompt is then
that of the whole request. Session headers are stripped before, so they do not change the id.
"""

import math
from typing import Any, NamedTuple

import orjson

from sgl_ext.balancer.conversations.contexts import (
    LAYERS,
    MAX_BLOCKS,
    Block,
    Registration,
    read_blocks,
    registration_of,
)
from sgl_ext.protocols.errors import BalancerError, bad_field
from sgl_ext.protocols.prompt_cache import read_kv_hints
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.cache_marks import TtlLimits, read_marks
from sgl_ext.reading.protocol import Json, Place, Protocol
from sgl_ext.reading.segments import MARKS
from sgl_ext.reading.strip import HeaderStrip, strip_request

HEADER = "x-sgl-ext-context"
COVERS, SKIPPED = f"{HEADER}-covers", f"{HEADER}-skipped"
_WANTED = b"create"
_ANY_TTL = TtlLimits(0.0, math.inf)


class Made(NamedTuple):
    """A context of a request. covers: for each field of the request how many of its entries the
    context has; `content` are parts of the message after those."""

    registration: Registration
    covers: dict[str, int]


class _End(NamedTuple):
    """How much of a body precedes a place: whole entries of each field, and parts of the next
    message. A larger end covers all that a smaller one does."""

    tools: int = 0
    texts: int = 0
    turns: int = 0
    parts: int = 0


def is_wanted(value: bytes | None) -> bool:
    """Whether the header of a request asks for a context. Raises BalancerError 400."""
    if value is None:
        return False
    if value != _WANTED:
        raise bad_field(HEADER, f"must be 'create', not {value[:40].decode('latin-1')!r}")
    return True


def make_context(protocol: Protocol, body: Any, strip: HeaderStrip) -> Made | str:
    """The context of a parsed body, or a word that says why it has none. Never raises."""
    if not isinstance(body, dict) or protocol.add_texts is None:
        return "no_marks"
    texts = protocol.instruction_fields[0] if protocol.instruction_fields else None
    fields = ("tools", texts, protocol.turns_field)
    values = [_entries(None if field is None else body.get(field)) for field in fields]
    whole = _End(*map(len, values))
    marks = read_marks(protocol, body, _ANY_TTL, read_kv_hints(body).lease_s)
    held = [(whole, marks.whole_ttl_s)] if marks.whole_ttl_s else []
    held += [(_end(fields, values, whole, mark.place), mark.ttl_s) for mark in marks.blocks]
    if not held:
        return "no_marks"
    limit = _last_plain(values, whole)
    stable_s = LAYERS["stable"]
    stable = min(limit, max((end for end, ttl_s in held if ttl_s >= stable_s), default=_End()))
    last = min(limit, max(end for end, _ in held))
    if last == _End():
        return "nothing_covered"
    if last.texts > MAX_BLOCKS:
        return "not_a_context"
    documents: list[Json] = []
    for layer, start, end in (("stable", _End(), stable), ("project", stable, last)):
        documents += _blocks(protocol, fields, values, layer, start, end, strip)
    if not documents:
        return "nothing_covered"
    try:
        blocks: tuple[Block, ...] = read_blocks({"blocks": documents})
    except BalancerError:
        return "not_a_context"
    covers = {name: n for name, n in zip(fields, last, strict=False) if name is not None and n}
    if last.parts:
        covers["content"] = last.parts
    return Made(registration_of(blocks, None), covers)


def read_made(body: bytes | bytearray, path: str, strip: HeaderStrip) -> tuple[Any, bytes | None]:
    """As `make_context`, of the bytes of a body that was read before: what the context is and what
    it covers, and its items; or why there is none."""
    made = make_context(of_path(path), orjson.loads(body), strip.headers_only)
    if isinstance(made, str):
        return made, None
    return (made.registration.about, made.covers), made.registration.items


def _entries(value: Any) -> list[Any]:
    """The entries of a field; a text is one."""
    if isinstance(value, list):
        return value
    return [value] if isinstance(value, str) and value else []


def _end(
    fields: tuple[str | None, ...], values: list[list[Any]], whole: _End, place: Place
) -> _End:
    field, *at = place
    if field == "tools":
        return _End(int(at[0]) + 1)
    if field == fields[1]:
        return _End(whole.tools, int(at[0]) + 1 if at else whole.texts)
    if len(at) == 1:
        return _End(whole.tools, whole.texts, int(at[0]) + 1)
    turn, *key, part = int(at[0]), *at[1:-1], int(at[-1])
    holder = key[0] if key else "content"
    if part + 1 == len(values[2][turn][holder]):
        return _End(whole.tools, whole.texts, turn + 1)
    # Other holders, as the output of a tool, cannot go on in another request.
    return _End(whole.tools, whole.texts, turn, part + 1 if holder == "content" else 0)


def _last_plain(values: list[list[Any]], whole: _End) -> _End:
    """The end up to which a context can have the body as it is."""
    tools, texts, turns = values
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict):
            return _End(number)
    for number, block in enumerate(texts):
        if not _is_plain(block):
            return _End(whole.tools, number)
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict | str):
            return _End(whole.tools, whole.texts, number)
    return whole


def _is_plain(block: Any) -> bool:
    """Whether a block of instructions is a text and nothing else."""
    if isinstance(block, dict):
        extra = {key for key, value in block.items() if value is not None}
        if block.get("type") != "text" or extra - {"type", "text", "cache_control"}:
            return False
        block = block.get("text")
    return isinstance(block, str) and block != "" and not block.isspace()


def _blocks(
    protocol: Protocol,
    fields: tuple[str | None, ...],
    values: list[list[Any]],
    layer: str,
    start: _End,
    end: _End,
    strip: HeaderStrip,
) -> list[Json]:
    """The blocks of a layer, in the order of the prompt."""
    tools = [_unmarked_tool(tool) for tool in values[0][start.tools : end.tools]]
    turns = _turns(protocol, values[2], start, end)
    sliced = {fields[1]: values[1][start.texts : end.texts], fields[2]: turns}
    stripped = strip_request(protocol, {k: v for k, v in sliced.items() if k and v}, strip).body
    texts = stripped.get(fields[1]) or [] if fields[1] is not None else []
    turns = stripped.get(fields[2]) or []
    made: list[Json] = []
    if tools:
        made.append({"id": f"{layer}.tools", "kind": "tools", "layer": layer, "content": tools})
    for number, text in enumerate(texts):
        content = text["text"] if isinstance(text, dict) else text
        made.append({"id": f"{layer}.{fields[1]}.{number}", "layer": layer, "content": content})
    if turns:
        content = {"path": protocol.paths[0], "messages": turns, "is_open": end.parts > 0}
        id = f"{layer}.{fields[2]}"
        made.append({"id": id, "kind": "messages", "layer": layer, "content": content})
    return made


def _turns(protocol: Protocol, turns: list[Any], start: _End, end: _End) -> list[Json]:
    """The messages between two ends; the first and the last may be parts of one."""
    found: list[Json] = []
    for number in range(start.turns, min(end.turns + (end.parts > 0), len(turns))):
        turn = turns[number]
        turn = {"role": "user", "content": turn} if isinstance(turn, str) else turn
        first = start.parts if number == start.turns else 0
        last = end.parts if number == end.turns else None
        if first or last is not None:
            turn = {**turn, "content": turn["content"][first:last]}
        found.append(_unmarked(turn))
    return found


def _unmarked_tool(tool: Json) -> Json:
    tool = _unmarked(tool)
    inner = tool.get("function")
    return {**tool, "function": _unmarked(inner)} if isinstance(inner, dict) else tool


def _unmarked(holder: Any, depth: int = 2) -> Any:
    """A copy of a message, block or tool without marks; also of its parts, and of their parts: a
    tool's result has some."""
    if not isinstance(holder, dict):
        return holder
    copy = {key: value for key, value in holder.items() if key not in MARKS}
    if depth and isinstance(content := copy.get("content"), list):
        copy["content"] = [_unmarked(part, depth - 1) for part in content]
    return copy
