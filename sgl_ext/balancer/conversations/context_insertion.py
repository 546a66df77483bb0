"""A request that names a context, with the context's content in its place.

All of it comes ahead of the request's own:

    /v1/messages (count_tokens)   `tools`; each text a block of `system`
    /v1/chat/completions          `tools`; each text a part of the first message, of role system,
                                  or of the request's own system or developer message there
    /v1/responses                 `tools`; `instructions`, joined by blank lines

A request that has these there by itself has the same prompt. What is `stable` is pinned for an
hour and `project` for five minutes, by a cache mark behind the last block of each, unless the
request marks what lies behind for as long; /v1/responses has marks of whole prompts only.
"""

from __future__ import annotations

import math
from typing import Any

from sgl_ext.balancer.conversations.contexts import FIELDS, LAYERS, Block, MalformedContext
from sgl_ext.requests.cache_marks import LIMIT_MARKS, TtlLimits, count_marks, read_marks
from sgl_ext.requests.protocol import Protocol, ToolForm

_ANY_TTL = TtlLimits(0.0, math.inf)
_Json = dict[str, Any]


def insert_context(
    protocol: Protocol, body: _Json, blocks: tuple[Block, ...], texts: Any
) -> tuple[_Json, int]:
    """A request with the content of the context that it names, and how many marks had no room.

    texts: of its runtime blocks, by id, as the request says it. Raises MalformedContext.
    What is unchanged is shared with `body`.
    """
    form, add_texts = protocol.tool_form, protocol.add_texts
    assert form is not None, "requests can name a context"
    assert add_texts is not None, "requests can name a context"
    given = _read_texts(blocks, {} if texts is None else texts)
    expanded = {key: value for key, value in body.items() if key not in FIELDS}
    if isinstance(nvext := body.get("nvext"), dict):
        expanded["nvext"] = {key: value for key, value in nvext.items() if key not in FIELDS}
        if not expanded["nvext"]:
            del expanded["nvext"]
    tools: list[_Json] = []
    parts: list[_Json] = []
    ends: dict[str, _Json] = {}
    for block in blocks:
        if block.kind == "tools":
            tools += (_tool_for(form, tool) for tool in block.content)
            ends[block.layer] = tools[-1]
        elif text := given.get(block.id) if block.layer == "runtime" else block.content:
            parts.append({"type": "text", "text": text})
            ends[block.layer] = parts[-1]
    own_tools = expanded.get("tools") or []
    if tools and isinstance(own_tools, list):  # anything else is left for the engine to reject
        expanded["tools"] = [*tools, *own_tools]
    add_texts(expanded, parts)
    if protocol.marks is None:
        return expanded, 0
    if protocol.marks.find is None:
        return _kept_whole(expanded, blocks), 0
    return expanded, _mark(protocol, body, ends)


def _read_texts(blocks: tuple[Block, ...], texts: Any) -> dict[str, str]:
    if not isinstance(texts, dict):
        raise MalformedContext("context_blocks: must be an object of texts by block id")
    places = [block.id for block in blocks if block.layer == "runtime"]
    for id, text in texts.items():
        if id not in places:
            raise MalformedContext(f"context_blocks.{id}: the context has no such 'runtime' block")
        if not isinstance(text, str):
            raise MalformedContext(f"context_blocks.{id}: must be a text")
    return dict(texts)


def _mark(protocol: Protocol, body: _Json, ends: dict[str, _Json]) -> int:
    """Marks the ends of the layers that are kept. Returns for how many there was no room.

    A mark of the request's own holds what comes before it, too, and where it is for as long,
    or longer, another is of no use, and against Anthropic's rules on their order.
    """
    routing = read_marks(protocol, body, _ANY_TTL)
    longest_s = max((mark.ttl_s for mark in routing.blocks), default=0.0)
    longest_s = max(longest_s, routing.whole_ttl_s)
    room = LIMIT_MARKS - count_marks(protocol, body)
    left_out = 0
    for layer, ttl_s in LAYERS.items():
        if layer not in ends or not ttl_s or longest_s >= ttl_s:
            continue
        if room > 0:
            ends[layer]["cache_control"] = {"type": "ephemeral", "ttl": _spelled(ttl_s)}
            room -= 1
        else:
            left_out += 1
    return left_out


def _kept_whole(body: _Json, blocks: tuple[Block, ...]) -> _Json:
    """A request of a protocol without marks inside: all of it, for as long as the first layer."""
    nvext = body.get("nvext") or {}
    if isinstance(nvext, dict) and "cache_control" not in nvext:
        control = {"type": "ephemeral", "ttl": _spelled(LAYERS[blocks[0].layer])}
        body["nvext"] = {**nvext, "cache_control": control}
    return body


def _spelled(ttl_s: int) -> str:
    return f"{ttl_s // 3600}h" if ttl_s % 3600 == 0 else f"{ttl_s // 60}m"


def _tool_for(form: ToolForm, tool: _Json) -> _Json:
    """A copy of a tool without a mark; a function is written as the request's protocol does."""
    tool = {key: value for key, value in tool.items() if key != "cache_control"}
    inner = tool.get("function")
    if form.matches(tool):
        return tool
    if isinstance(inner, dict):
        function, schema = inner, inner.get("parameters")
    elif "input_schema" in tool:
        function, schema = tool, tool["input_schema"]
    elif tool.get("type") == "function":
        function, schema = tool, tool.get("parameters")
    else:
        return tool
    fields = ("name", "description", "strict")
    return form.write({key: function[key] for key in fields if key in function}, schema)
