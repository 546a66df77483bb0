"""Contexts: stable prefixes that are registered once as named blocks, so that requests name them.

    {"blocks": [{"id": "tools", "kind": "tools", "layer": "stable", "content": [...]},
                {"id": "rules", "layer": "stable", "content": "You are ..."},
                {"id": "README.md", "kind": "document", "layer": "project", "content": "# ..."},
                {"id": "now", "layer": "runtime"}]}

The id is a hash of the content, so equal blocks have an equal id. In a prompt the tools come
first, then the texts, then messages (`context_insertion.py`), in the order of the layers. Messages
are those of one protocol: {"path": "/v1/messages", "messages": [...], "is_open": false}; in an open
block, the last one goes on in the next block or in the request. A `runtime` block has no content of
its own: each request may bring a text for it in `context_blocks`, which is not stored.
"""

import hashlib
import re
from http import HTTPStatus
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import orjson

from sgl_ext.limits.bounds import MAX_TOOLS, is_deep
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.protocols.registry import of_path

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
