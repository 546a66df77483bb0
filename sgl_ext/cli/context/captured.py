"""The blocks of a captured request: what its cache marks cover, else its tools and instructions."""

import json
from typing import Any

from sgl_ext.balancer.conversations.contexts import Block, unpacked_blocks
from sgl_ext.balancer.conversations.made_contexts import Made, make_context
from sgl_ext.cli.context.source import Source, text_source, tools_source
from sgl_ext.cli.node import UsageError
from sgl_ext.protocols.registry import of_path
from sgl_ext.requests.protocol import INSTRUCTION_ROLES, Protocol
from sgl_ext.requests.strip import HeaderStrip

_WHOLE = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def read_captured(path: str, body: bytes, name: str) -> tuple[list[Source], dict[str, int]]:
    """The blocks of a request to this path, and how much of each field they cover.

    name: of its file. Raises UsageError.
    """
    protocol, document = of_path(path), json.loads(body)
    if protocol.add_texts is None:
        raise UsageError(f"{name}: a request to {path} cannot name a context")
    made = make_context(protocol, document, HeaderStrip())
    if made == "no_marks":
        made = make_context(protocol, _head(protocol, document), HeaderStrip())
    if not isinstance(made, Made):
        raise UsageError(f"{name}: makes no context: {made}")
    blocks = unpacked_blocks(made.registration.items)
    return [_source(block) for block in blocks], made.covers


def _head(protocol: Protocol, document: Any) -> Any:
    """A request's tools and instructions, marked as a whole."""
    field = protocol.turns_field
    turns = document.get(field) if isinstance(document, dict) else None
    if not isinstance(turns, list) or field is None:
        turns = []
    count = 0
    while count < len(turns) and _instructs(turns[count]):
        count += 1
    return {**document, field: turns[:count], "nvext": _WHOLE}


def _instructs(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") in INSTRUCTION_ROLES


def _source(block: Block) -> Source:
    if block.kind == "tools":
        return tools_source(block.id, block.layer, block.content, block.id)
    if block.kind != "messages":
        return text_source(block.id, block.kind, block.layer, block.content)
    lines = [json.dumps(message) for message in block.content["messages"]]
    return Source(block.id, block.kind, block.layer, block.content, block.id, lines, "message")
