"""Contexts: stable prefixes that are registered once as named blocks, so that requests name them.

    {"blocks": [{"id": "tools", "kind": "tools", "layer": "stable", "content": [...]},
                {"id": "rules", "layer": "stable", "content": "You are ..."},
                {"id": "README.md", "kind": "document", "layer": "project", "content": "# ..."},
                {"id": "now", "layer": "runtime"}]}

The id is a hash of the content, so equal blocks have an equal id. In a prompt the tools come
first, then the texts, then messages (`expansion.py`), in the order of the layers. Messages
are those of one protocol: {"path": "/v1/messages", "messages": [...], "is_open": false}; in an open
block, the last one goes on in the next block or in the request. A `runtime` block has no content of
its own: each request may bring a text for it in `context_blocks`, which is not stored.

`make_context` makes a context of what a request's cache marks cover:

    system   [ A ][ B, mark 1h ][ C ]         stable   A, B
    messages [ u1 ][ u2: [doc, mark 5m][q] ]  project  C, u1, [doc] of u2     the rest: [q] of u2

What a mark of an hour or more covers is `stable`, what only shorter ones cover is `project`. The
answer says how much of each field the context has. The client leaves out exactly that and sends
the rest: also the rest of a message, which continues the one in the context. The prompt is then
that of the whole request. Session headers are stripped before, so they do not change the id.
"""

import hashlib
import math
import re
from http import HTTPStatus
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import orjson

from sgl_ext.limits.bounds import MAX_TOOLS, is_deep
from sgl_ext.protocols.errors import BalancerError, bad_field
from sgl_ext.protocols.prompt_cache import read_kv_hints
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.cache_marks import TtlLimits, read_marks
from sgl_ext.reading.protocol import Json, Place, Protocol
from sgl_ext.reading.segments import MARKS
from sgl_ext.reading.strip import HeaderStrip, strip_request

MAX_BLOCKS = 64
MAX_BYTES = 16 << 20
MAX_ID_CHARS = 256
MAX_NAME_CHARS = 128
LAYERS = {"stable": 3600, "project": 300, "runtime": 0}
"""The seconds that each layer is pinned at least, in the order of the prompt."""
KINDS = ("tools", "system", "document", "messages")
_RANKS = {"tools": 0, "messages": 2}  # others: 1
FIELDS = ("context_id", "context_blocks")
ID = re.compile(r"ctx_[0-9a-f]{40}\Z")

_Json = dict[str, Any]


class Block(NamedTuple):
    """A part of a context.

    content: a text, a list of tools, a `Messages` as JSON, or None for the layer `runtime`.
    hash: the SHA-256 of the text, or of other content as compact JSON, in hexadecimal digits.
    """

    id: str
    kind: str
    layer: str
    hash: str | None
    content: Any


class Messages(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a block of messages.

    path: that of the requests which can have them.
    is_open: whether the last message goes on: its content is a list.
    """

    path: str
    messages: list[_Json]
    is_open: bool = False


def read_blocks(document: Any) -> tuple[Block, ...]:
    """The blocks of a registration, in the order of the prompt. Raises BalancerError 400."""
    given = document.get("blocks") if isinstance(document, dict) else None
    if not isinstance(given, list) or not given:
        raise malformed("blocks: must be a list of blocks")
    _require(len(given) <= MAX_BLOCKS, f"blocks: more than {MAX_BLOCKS}")
    blocks = [_read_block(f"blocks.{k}", block) for k, block in enumerate(given)]
    ids = [block.id for block in blocks]
    for k, id in enumerate(ids):
        _require(id not in ids[:k], f"blocks.{k}.id: {id!r} is also the id of another block")
    order = list(LAYERS)
    in_prompt = sorted(range(len(blocks)), key=lambda k: _RANKS.get(blocks[k].kind, 1))
    for before, k in pairwise(in_prompt):
        _require(
            order.index(blocks[before].layer) <= order.index(blocks[k].layer),
            f"blocks.{k}.layer: {blocks[k].layer!r} may not follow the {blocks[before].layer!r} "
            f"of block {ids[before]!r}; tools come first in a prompt, and messages last",
        )
    tools = sum(len(block.content) for block in blocks if block.kind == "tools")
    _require(tools <= MAX_TOOLS, f"blocks: more than {MAX_TOOLS} tools")
    size = sum(len(packed(block.content)) for block in blocks)
    _require(size <= MAX_BYTES, f"blocks: larger than {MAX_BYTES} bytes")
    _require(any(block.content is not None for block in blocks), "blocks: none of them has content")
    return tuple(blocks[k] for k in in_prompt)


def _read_block(at: str, block: Any) -> Block:
    _require(isinstance(block, dict), f"{at}: must be an object")
    id, layer, kind = block.get("id"), block.get("layer"), block.get("kind", "system")
    is_id = isinstance(id, str) and 0 < len(id) <= MAX_ID_CHARS
    _require(is_id, f"{at}.id: must be a string of 1 to {MAX_ID_CHARS} characters")
    is_layer = isinstance(layer, str) and layer in LAYERS
    _require(is_layer, f"{at}.layer: must be one of {', '.join(LAYERS)}")
    _require(kind in KINDS, f"{at}.kind: must be one of {', '.join(KINDS)}")
    content, stated = block.get("content"), block.get("hash")
    if layer == "runtime":
        _require(kind != "tools", f"{at}.layer: tools cannot be 'runtime', as they come first")
        _require(content is None, f"{at}.content: each request brings that of a 'runtime' block")
        _require(stated is None, f"{at}.hash: a 'runtime' block has none")
        return Block(id, kind, layer, None, None)
    if kind == "tools":
        listed = isinstance(content, list) and len(content) > 0
        valid = listed and all(isinstance(tool, dict) for tool in content)
        _require(valid, f"{at}.content: must be a list of tools")
        _require(not is_deep(content), f"{at}.content: is nested too deeply")
    elif kind == "messages":
        _require(not is_deep(content), f"{at}.content: is nested too deeply")
        _check_messages(f"{at}.content", content)
    else:
        valid = isinstance(content, str) and not content.isspace() and content != ""
        _require(valid, f"{at}.content: must be a text")
    found = hashlib.sha256(packed(content)).hexdigest()
    _require(
        stated is None or (isinstance(stated, str) and stated.removeprefix("sha256:") == found),
        f"{at}.hash: differs from that of the content of block {id!r}, which is {found}",
    )
    return Block(id, kind, layer, found, content)


def _check_messages(at: str, content: Any) -> None:
    try:
        found = msgspec.convert(content, Messages)
    except msgspec.ValidationError as error:
        raise malformed(f"{at}: {error}") from None
    protocol = of_path(found.path)
    can_name = protocol.add_texts is not None and protocol.paths[0] == found.path
    _require(can_name, f"{at}.path: requests to {found.path[:80]!r} cannot name a context")
    _require(bool(found.messages), f"{at}.messages: must not be empty")
    is_list = isinstance(found.messages[-1].get("content"), list)
    _require(not found.is_open or is_list, f"{at}.messages: the last one has no parts to go on")


def packed(content: Any) -> bytes:
    """The bytes of a content that are hashed."""
    if content is None:
        return b""
    return content.encode() if isinstance(content, str) else orjson.dumps(content)


def unpacked_blocks(stored: bytes) -> tuple[Block, ...]:
    """The blocks of a stored context."""
    return tuple(Block(*block) for block in orjson.loads(stored))


def context_id(blocks: tuple[Block, ...]) -> str:
    """The id of a context: a hash of its blocks."""
    identity = [(block.id, block.kind, block.layer, block.hash) for block in blocks]
    return "ctx_" + hashlib.sha256(orjson.dumps(identity)).hexdigest()[:40]


class Registration(NamedTuple):
    """about: the context without content, as clients see it. items: all of it, as it is stored."""

    about: _Json
    items: bytes


def read_registration(document: Any) -> Registration:
    """A context that a client registers. Raises BalancerError 400."""
    blocks = read_blocks(document)
    name = document.get("name")
    is_name = name is None or (isinstance(name, str) and len(name) <= MAX_NAME_CHARS)
    _require(is_name, f"name: must be a text of at most {MAX_NAME_CHARS} characters")
    return registration_of(blocks, name)


def registration_of(blocks: tuple[Block, ...], name: str | None) -> Registration:
    """A context of these blocks. The name is for people: the id does not depend on it."""
    about = describe(context_id(blocks), blocks, name, with_content=False)
    return Registration(about, orjson.dumps([*map(list, blocks)]))


def describe(id: str, blocks: tuple[Block, ...], name: str | None, *, with_content: bool) -> _Json:
    """A context as clients see it. Its bytes are those of its content, by layer."""
    layers: dict[str, int] = {}
    described = []
    for block in blocks:
        size = len(packed(block.content))
        layers[block.layer] = layers.get(block.layer, 0) + size
        described.append({**block._asdict(), "bytes": size, "pinned_s": LAYERS[block.layer]})
    if not with_content:
        for each in described:
            del each["content"]
    sizes = {"bytes": sum(layers.values()), "layers": layers}
    return {"context_id": id, "object": "context", "name": name, **sizes, "blocks": described}


def summary(about: _Json) -> bytes:
    """What a list shows of a context, as it is stored."""
    return orjson.dumps({key: about[key] for key in ("name", "bytes", "layers")})


def read_summary(stored: bytes) -> _Json:
    """What a list shows of a stored context. Earlier versions stored nothing."""
    found = orjson.loads(stored) if stored else {}
    return {key: found.get(key) for key in ("name", "bytes", "layers")}


def named(body: _Json) -> tuple[Any, Any] | None:
    """A request's `context_id` and `context_blocks`, from the body or `nvext`; None without any."""
    id, texts = body.get("context_id"), body.get("context_blocks")
    if isinstance(nvext := body.get("nvext"), dict):
        id = nvext.get("context_id") if id is None else id
        texts = nvext.get("context_blocks") if texts is None else texts
    return None if id is None and texts is None else (id, texts)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise malformed(message)


def malformed(message: str) -> BalancerError:
    """A context, or a request with one, that is invalid; `message` names the field."""
    return BalancerError(HTTPStatus.BAD_REQUEST, message)


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
