"""A context: a stable prefix, registered once as named blocks, that requests then name.

    {"blocks": [{"id": "tools", "kind": "tools", "layer": "stable", "content": [...]},
                {"id": "rules", "layer": "stable", "content": "You are ..."},
                {"id": "README.md", "kind": "document", "layer": "project", "content": "# ..."},
                {"id": "now", "layer": "runtime"}]}

It has no name but its content: equal blocks make an equal id. In a prompt its tools come
first and then its texts (`in_context.py`), and the layers are in the order of how long they
last. A `runtime` block is a place, behind all others: each request that has something for it
says so in `context_blocks`, by id, and it is not kept.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any, NamedTuple

import orjson

MOST_BLOCKS = 64
MOST_BYTES = 16 << 20
MOST_ID_CHARS = 256
LAYERS = {"stable": 3600, "project": 300, "runtime": 0}
"""For how many seconds each is pinned, the most lasting first."""
KINDS = ("tools", "system", "document")
FIELDS = ("context_id", "context_blocks")

_Json = dict[str, Any]


class MalformedContext(ValueError):
    """A context that cannot be; its text names the field and is what a client may be told."""


class Block(NamedTuple):
    """A part of a context. `content` is a text, the definitions of tools, or None: runtime.

    hash: SHA-256 of the text, or of the tools as compact JSON in their own order; in hex.
    """

    id: str
    kind: str
    layer: str
    hash: str | None
    content: Any


def read_blocks(document: Any) -> tuple[Block, ...]:
    """The blocks of a registration, in the order of the prompt. Raises MalformedContext."""
    given = document.get("blocks") if isinstance(document, dict) else None
    if not isinstance(given, list) or not given:
        raise MalformedContext("blocks: must be a list of blocks")
    _require(len(given) <= MOST_BLOCKS, f"blocks: more than {MOST_BLOCKS}")
    blocks = [_read_block(f"blocks.{k}", block) for k, block in enumerate(given)]
    ids = [block.id for block in blocks]
    for k, id in enumerate(ids):
        _require(id not in ids[:k], f"blocks.{k}.id: {id!r} is another block's, too")
    order = list(LAYERS)
    behind = sorted(range(len(blocks)), key=lambda k: blocks[k].kind != "tools")
    for before, k in pairwise(behind):
        _require(
            order.index(blocks[before].layer) <= order.index(blocks[k].layer),
            f"blocks.{k}.layer: {blocks[k].layer!r} may not come behind the "
            f"{blocks[before].layer!r} of block {ids[before]!r}; tools come first in a prompt",
        )
    size = sum(len(packed(block.content)) for block in blocks)
    _require(size <= MOST_BYTES, f"blocks: larger than {MOST_BYTES} bytes")
    _require(any(block.content is not None for block in blocks), "blocks: none has content")
    return tuple(blocks[k] for k in behind)


def _read_block(at: str, block: Any) -> Block:
    _require(isinstance(block, dict), f"{at}: must be an object")
    id, layer, kind = block.get("id"), block.get("layer"), block.get("kind", "system")
    named = isinstance(id, str) and 0 < len(id) <= MOST_ID_CHARS
    _require(named, f"{at}.id: must be a string of 1 to {MOST_ID_CHARS} characters")
    _require(layer in LAYERS, f"{at}.layer: must be one of {', '.join(LAYERS)}")
    _require(kind in KINDS, f"{at}.kind: must be one of {', '.join(KINDS)}")
    content, stated = block.get("content"), block.get("hash")
    if layer == "runtime":
        _require(kind != "tools", f"{at}.layer: tools cannot be 'runtime', as they come first")
        _require(content is None, f"{at}.content: a 'runtime' block gets it with each request")
        _require(stated is None, f"{at}.hash: a 'runtime' block has none")
        return Block(id, kind, layer, None, None)
    if kind == "tools":
        listed = isinstance(content, list) and len(content) > 0
        told = listed and all(isinstance(tool, dict) for tool in content)
        _require(told, f"{at}.content: must be a list of tools")
    else:
        told = isinstance(content, str) and content.strip() != ""
        _require(told, f"{at}.content: must be a text")
    found = hashlib.sha256(packed(content)).hexdigest()
    _require(
        stated is None or (isinstance(stated, str) and stated.removeprefix("sha256:") == found),
        f"{at}.hash: is not that of the content of block {id!r}, which is {found}",
    )
    return Block(id, kind, layer, found, content)


def packed(content: Any) -> bytes:
    """The bytes of a content that its hash is taken of."""
    if content is None:
        return b""
    return content.encode() if isinstance(content, str) else orjson.dumps(content)


def context_id(blocks: tuple[Block, ...]) -> str:
    """The id of a context: the same for the same blocks, and for no others."""
    told = [(block.id, block.kind, block.layer, block.hash) for block in blocks]
    return "ctx_" + hashlib.sha256(orjson.dumps(told)).hexdigest()[:40]


def described(blocks: tuple[Block, ...]) -> list[_Json]:
    """Blocks as a client is told of them: without their content."""
    return [
        {
            "id": block.id,
            "kind": block.kind,
            "layer": block.layer,
            "hash": block.hash,
            "pinned_s": LAYERS[block.layer],
        }
        for block in blocks
    ]


def named(body: _Json) -> tuple[Any, Any] | None:
    """What a request says of contexts: `context_id` and `context_blocks`, None if nothing.

    Each may stand in `nvext` as well.
    """
    id, texts = body.get("context_id"), body.get("context_blocks")
    if isinstance(nvext := body.get("nvext"), dict):
        id = nvext.get("context_id") if id is None else id
        texts = nvext.get("context_blocks") if texts is None else texts
    return None if id is None and texts is None else (id, texts)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise MalformedContext(message)
