"""Inserts the content of a context into the requests that name it.

`stable` and `project` blocks come ahead of the request's own tools and instructions:

    /v1/messages (count_tokens)   `tools`; each text a block of `system`
    /v1/chat/completions          `tools`; each text a part of the first message, of role system,
                                  or of the request's own system or developer message there
    /v1/responses                 `tools`; `instructions`, joined by blank lines

Messages of a context come ahead of the request's own, only in the protocol that they are from. If
the last one is open, the request's first message of the same role goes on with it.

Texts of `runtime` blocks come first in the first user message. Many chat templates write the
tools after the system text, but all write messages after both. So a changed runtime text costs
neither the tools nor the instructions.

A request that has the same content in these places by itself has the same prompt. The end of
each layer gets a cache mark, unless the request's own marks hold it as long; /v1/responses
has one text for all layers, so its whole prompt is pinned.
"""

import math
from typing import Any, NamedTuple

from sgl_ext.balancer.conversations.contexts import FIELDS, LAYERS, Block, malformed
from sgl_ext.reading.cache_marks import (
    LIMIT_MARKS,
    UNMARKABLE,
    TtlLimits,
    count_marks,
    read_marks,
)
from sgl_ext.reading.protocol import INSTRUCTION_ROLES, Part, Protocol, ToolForm

_ANY_TTL = TtlLimits(0.0, math.inf)
_Json = dict[str, Any]


class _End(NamedTuple):
    """What ends a layer and may get a mark; rank: 0 for a tool, 1 for a text, 2 for a message."""

    rank: int
    holder: _Json


def insert_context(
    protocol: Protocol, body: _Json, blocks: tuple[Block, ...], texts: Any
) -> tuple[_Json, int]:
    """A request with the content of its context, and how many cache marks were left out.

    texts: the request's texts for runtime blocks, by id. Unchanged values are shared with
    `body`. Raises BalancerError 400.
    """
    form, add_texts = protocol.tool_form, protocol.add_texts
    assert form is not None, "requests can name a context"
    assert add_texts is not None, "requests can name a context"
    runtime = _read_texts(blocks, {} if texts is None else texts)
    expanded = {key: value for key, value in body.items() if key not in FIELDS}
    if isinstance(nvext := body.get("nvext"), dict):
        expanded["nvext"] = {key: value for key, value in nvext.items() if key not in FIELDS}
        if not expanded["nvext"]:
            del expanded["nvext"]
    tools: list[_Json] = []
    parts: list[_Json] = []
    turns: list[_Json] = []
    is_open = False
    ends: dict[str, _End] = {}
    for block in blocks:
        if block.kind == "tools":
            tools += (_tool_for(form, tool) for tool in block.content)
            ends[block.layer] = _End(0, tools[-1])
        elif block.kind == "messages":
            path = block.content["path"]
            if protocol.paths[0] != path and not protocol.paths[0].startswith(f"{path}/"):
                raise malformed(f"context_id: its messages are those of requests to {path}")
            turns = _joined(turns, block.content["messages"], is_open)
            is_open = block.content["is_open"]
            if (end := _markable_end(protocol, turns)) is not None:
                ends[block.layer] = _End(2, end)
        elif block.layer != "runtime":
            parts.append({"type": "text", "text": block.content})
            ends[block.layer] = _End(1, parts[-1])
    own_tools = expanded.get("tools") or []
    if tools and isinstance(own_tools, list):  # anything else is left for the engine to reject
        expanded["tools"] = [*tools, *own_tools]
    _add_runtime(protocol, expanded, runtime)
    _add_turns(protocol, expanded, turns, is_open)
    add_texts(expanded, parts)
    if protocol.marks is None:
        return expanded, 0
    if protocol.marks.find is None:
        return _pinned_whole(expanded, blocks), 0
    return expanded, _mark(protocol, body, blocks, ends, tools)


def _read_texts(blocks: tuple[Block, ...], texts: Any) -> list[str]:
    """The request's texts for the runtime blocks of a context, in the order of the blocks."""
    if not isinstance(texts, dict):
        raise malformed("context_blocks: must be an object of texts by block id")
    ids = [block.id for block in blocks if block.layer == "runtime"]
    for id, text in texts.items():
        if id not in ids:
            raise malformed(f"context_blocks.{id}: the context has no such 'runtime' block")
        if not isinstance(text, str):
            raise malformed(f"context_blocks.{id}: must be a text")
    return [texts[id] for id in ids if texts.get(id)]


def _add_runtime(protocol: Protocol, body: _Json, texts: list[str]) -> None:
    """Puts texts ahead of the content of the first message that does not instruct.

    If that is not a user message, they become one of their own.
    """
    field = protocol.turns_field
    assert field is not None, "requests can name a context"
    kind = "input_text" if (Part.ITEMS, field) in protocol.prompt else "text"
    messages = body.get(field)
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not texts or not isinstance(messages, list):
        return
    parts = [{"type": kind, "text": text} for text in texts]
    roles = (m.get("role") if isinstance(m, dict) else None for m in messages)
    at = next((k for k, role in enumerate(roles) if role not in INSTRUCTION_ROLES), len(messages))
    first = messages[at] if at < len(messages) else None
    if not isinstance(first, dict) or first.get("role") != "user":
        body[field] = [*messages[:at], {"role": "user", "content": parts}, *messages[at:]]
        return
    own = first.get("content")
    if isinstance(own, str):
        own = [{"type": kind, "text": own}] if own else []
    if isinstance(own, list):  # anything else is left for the engine to reject
        body[field] = [*messages[:at], {**first, "content": [*parts, *own]}, *messages[at + 1 :]]


def _add_turns(protocol: Protocol, body: _Json, turns: list[_Json], is_open: bool) -> None:
    """Puts messages ahead of the request's own."""
    field = protocol.turns_field
    assert field is not None, "requests can name a context"
    own = body.get(field)
    if isinstance(own, str):
        own = [{"role": "user", "content": own}]
    if turns and isinstance(own, list | None):  # anything else is left for the engine to reject
        body[field] = _joined(turns, own or [], is_open)


def _joined(turns: list[_Json], more: list[Any], is_open: bool) -> list[Any]:
    """Two lists of messages as one. If `is_open`, the first message of `more` may continue the
    last one of `turns`."""
    first = more[0] if more else None
    if not is_open or not isinstance(first, dict) or first.get("role") != turns[-1].get("role"):
        return [*turns, *more]
    content = first.get("content")
    if isinstance(content, str):
        kind = turns[-1]["content"][-1].get("type", "text")
        content = [{"type": kind if kind in ("text", "input_text") else "text", "text": content}]
    if not isinstance(content, list):
        return [*turns, *more]
    return [*turns[:-1], {**turns[-1], "content": [*turns[-1]["content"], *content]}, *more[1:]]


def _markable_end(protocol: Protocol, turns: list[_Json]) -> _Json | None:
    """A copy of the end of the last message, in its place, which can have a mark; None without."""
    if protocol.marks is None or protocol.marks.find is None:
        return None
    last = turns[-1] = dict(turns[-1])
    content = last.get("content")
    if isinstance(content, str) and protocol.marks.is_strict:
        content = [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list) or not content or not isinstance(content[-1], dict):
        return None if protocol.marks.is_strict else last
    kind, text = content[-1].get("type"), content[-1].get("text")
    if kind in UNMARKABLE or (kind == "text" and not text):
        return None
    end = dict(content[-1])
    last["content"] = [*content[:-1], end]
    return end


def _mark(
    protocol: Protocol,
    body: _Json,
    blocks: tuple[Block, ...],
    ends: dict[str, _End],
    tools: list[_Json],
) -> int:
    """Marks the ends of the layers, and returns how many marks did not fit.

    The last tool is marked, too: a template may write it after the texts, and then the mark at
    the end of its layer does not reach it. A mark of the request's own that comes later and
    holds as long makes one of ours useless. Ours may not hold longer than one of the request's
    that comes before it, by Anthropic's rule on the order of TTLs.
    """
    own = read_marks(protocol, body, _ANY_TTL)
    ranks = {"tools": 0, protocol.turns_field: 2}
    marked = [(ranks.get(str(mark.place[0]), 1), mark.ttl_s) for mark in own.blocks]
    is_strict = protocol.marks is not None and protocol.marks.is_strict
    wanted = [(LAYERS[layer], end) for layer, end in ends.items()]
    if tools and all(end.holder is not tools[-1] for end in ends.values()):
        layer = [block.layer for block in blocks if block.kind == "tools"][-1]
        wanted.append((LAYERS[layer], _End(0, tools[-1])))
    free = LIMIT_MARKS - count_marks(protocol, body)
    left_out = 0
    for ttl_s, (end_rank, holder) in wanted:
        if max([own.whole_ttl_s, *(held for rank, held in marked if rank >= end_rank)]) >= ttl_s:
            continue
        before = [held for rank, held in marked if is_strict and rank < end_rank]
        if free > 0 and ttl_s <= min(before, default=math.inf):
            holder["cache_control"] = {"type": "ephemeral", "ttl": _duration(ttl_s)}
            free -= 1
        else:
            left_out += 1
    return left_out


def _pinned_whole(body: _Json, blocks: tuple[Block, ...]) -> _Json:
    """Pins the whole prompt as long as the first layer lasts, unless the request says otherwise."""
    nvext = body.get("nvext") or {}
    if isinstance(nvext, dict) and "cache_control" not in nvext:
        control = {"type": "ephemeral", "ttl": _duration(LAYERS[blocks[0].layer])}
        body["nvext"] = {**nvext, "cache_control": control}
    return body


def _duration(ttl_s: int) -> str:
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
