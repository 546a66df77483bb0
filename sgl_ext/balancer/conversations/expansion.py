"""Puts the content of stored responses and contexts into the requests that name them.

It needs no store: what a request names is given to it. So a large request can be read in another
process.

An item of `/v1/responses` may name an item of an earlier answer instead of being sent:

    {"type": "item_reference", "id": "fc_1"}

The AI SDK does so with every item of earlier answers. Each item of a stored answer is a document of
its own under its id, so that a reference is found without the response that it was a part of.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

import orjson

from radix.byte_lru import ByteLRU
from sgl_ext.balancer.conversations import contexts, response_turns, threads
from sgl_ext.balancer.conversations.contexts import FIELDS, LAYERS, Block, malformed
from sgl_ext.balancer.store.documents import Document
from sgl_ext.limits.bounds import find_many
from sgl_ext.prompts.blocks import NamedBlock
from sgl_ext.protocols.errors import BalancerError, bad_field
from sgl_ext.protocols.registry import of_path
from sgl_ext.protocols.responses import COUNT_RESPONSE, RESPONSES
from sgl_ext.reading.cache_marks import (
    LIMIT_MARKS,
    UNMARKABLE,
    TtlLimits,
    count_marks,
    read_marks,
)
from sgl_ext.reading.protocol import INSTRUCTION_ROLES, Part, Protocol, ToolForm

_REFERENCE = "item_reference"
MAX_REFERENCES = 2_000
"""Of one request: each is a lookup in the store."""
MAX_ITEMS = 256
"""Of one answer; later ones cannot be referred to."""
_Json = dict[str, Any]


def referenced_ids(items: list[Any]) -> tuple[str, ...]:
    """The ids that input items refer to. Raises BalancerError 400, also for an id that comes twice:
    a small body could repeat a large item."""
    ids: dict[str, None] = {}
    for at in _references(items):
        id = items[at].get("id")
        if not isinstance(id, str):
            raise bad_field(f"input[{at}].id", "must be the id of an item")
        if id in ids:
            raise bad_field(f"input[{at}].id", f"refers to {id!r} again")
        ids[id] = None
    if len(ids) > MAX_REFERENCES:
        raise bad_field("input", f"refers to more than {MAX_REFERENCES} items")
    return tuple(ids)


def with_referenced_items(items: list[Any], found: Mapping[str, bytes]) -> list[Any]:
    """The items with what they refer to in place of the references.

    found: the JSON of items by their ids. Raises BalancerError 404 for an id that is not there.
    """
    own = [*items]
    for at in _references(items):
        own[at] = _item(at, items[at], found)
    return own


def _references(items: list[Any]) -> list[int]:
    """Where references are. In one expression, as it looks at each item of each request."""
    return [
        at
        for at, item in enumerate(items)
        if isinstance(item, dict) and item.get("type") == _REFERENCE
    ]


def _item(at: int, reference: _Json, found: Mapping[str, bytes]) -> Any:
    id = reference["id"]
    if id in found:
        return orjson.loads(found[id])
    # The first sentence is OpenAI's.
    message = (
        f"Item with id '{id}' not found. Items of answers are kept unless `store` is false, and "
        f"until they expire: send the item itself at input[{at}]."
    )
    raise BalancerError(HTTPStatus.NOT_FOUND, message, param=f"input[{at}].id")


def item_documents(output: list[Any]) -> list[Document]:
    """The items of an answer as documents."""
    return [
        Document(item["id"], orjson.dumps(item), b"")
        for item in output[:MAX_ITEMS]
        if isinstance(item, dict) and isinstance(item.get("id"), str)
    ]


_PARSED_BYTES = 64 << 20
STORED_PATHS = (*RESPONSES.paths, *COUNT_RESPONSE.paths)
"""Of requests that may be a turn to store, whatever fields they have."""
_TURNS = (*STORED_PATHS, *threads.PATHS)


class Named(NamedTuple):
    """The ids in a request of what is stored: the answer that it continues, and its context.

    is_thread: the answer is one of /v1/messages, and not of /v1/responses.
    items: items of earlier answers that its input refers to.
    """

    previous: str | None
    context: str | None
    is_thread: bool = False
    items: tuple[str, ...] = ()


class Found(NamedTuple):
    """The items of what a request names, and of all that it continues; None if unknown.

    items: the JSON of each item that it refers to and that is known; None if it refers to none.
    """

    previous: list[bytes] | None = None
    context: list[bytes] | None = None
    items: Mapping[str, bytes] | None = None

    @property
    def size_bytes(self) -> int:
        items = () if self.items is None else self.items.values()
        return sum(map(len, (*(self.previous or ()), *(self.context or ()), *items)))


class Turn(NamedTuple):
    """A request as a turn of its conversation.

    previous: the id of the answer that it continues.
    entered: what it adds, as JSON; None if the answer is neither stored nor remembered.
    is_thread: a turn of /v1/messages, and not of /v1/responses.
    is_stored: whether it is stored; otherwise only its connection remembers it.
    """

    previous: str | None
    entered: bytes | None
    in_background: bool = False
    is_thread: bool = False
    is_stored: bool = True


class Expanded(NamedTuple):
    """A parsed request with the content that it names, which is the same object if it names none.

    turn: None if the response is neither stored nor continues one.
    marks_left_out: cache marks of its context for which the request had no room.
    context: the blocks of its context that have content.
    """

    body: Any
    turn: Turn | None = None
    marks_left_out: int = 0
    context: tuple[NamedBlock, ...] = ()


@dataclass(slots=True)
class Expander:
    """keeps_turns: whether turns are stored. Otherwise ids of responses pass to the engines, and
    threads of /v1/messages are unknown."""

    keeps_turns: bool
    # The id is a hash of the content, so equal ids have equal blocks for all tenants.
    blocks: ByteLRU[tuple[contexts.Block, ...]] = field(
        default_factory=lambda: ByteLRU(_PARSED_BYTES)
    )

    def names(self, path: str, body: Any, *, remembers: bool = False) -> Named | None:
        """What a parsed body names of the store; None without a name.

        remembers: whether its connection remembers turns. Raises BalancerError 400.
        """
        if not isinstance(body, dict):
            return None
        previous, is_thread = None, path in threads.PATHS
        items: tuple[str, ...] = ()
        if is_thread:
            previous = threads.previous_id(body)
        elif (
            self._continues(path, remembers) and (own := response_turns.own_items(body)) is not None
        ):
            previous = body.get("previous_response_id")
            items = referenced_ids(own)
        if previous is not None and not isinstance(previous, str):
            raise bad_field("previous_response_id", "must be the id of a response")
        context, _ = contexts.named(body) or (None, None)
        if context is not None and not isinstance(context, str):
            raise bad_field("context_id", "must be the id of a context")
        if previous is context is None and not items:
            return None
        return Named(previous, context, is_thread, items)

    def has_turns(self, path: str, *, remembers: bool = False, may_name: bool = True) -> bool:
        """Whether a request may be a turn to store, for `expand`. may_name: whether it has a field
        that could name what is stored: a turn of /v1/messages has one, `thread`."""
        if self.keeps_turns:
            return path in (_TURNS if may_name else STORED_PATHS)
        return remembers and path in RESPONSES.paths

    def expand(
        self, path: str, body: Any, found: Found | None = None, *, remembers: bool = False
    ) -> Expanded:
        """Expands a parsed body. found: what it names. remembers: as of `names`.

        Raises BalancerError for an unknown id and for a malformed field.
        """
        if not isinstance(body, dict):
            return Expanded(body)
        found, turn, marks_left_out = found or Found(), None, 0
        context: tuple[NamedBlock, ...] = ()
        if self._continues(path, remembers):
            body, turn = _continue(body, found, self.keeps_turns, remembers)
            turn = None if path in COUNT_RESPONSE.paths else turn
        elif path in threads.PATHS:
            body, turn = _continue_thread(body, found.previous, self.keeps_turns)
        if (named := contexts.named(body)) is not None:
            body, marks_left_out, blocks = self._insert_context(path, body, *named, found.context)
            context = tuple(NamedBlock(b.id, b.layer, b.hash) for b in blocks if b.hash is not None)
        return Expanded(body, turn, marks_left_out, context)

    def _continues(self, path: str, remembers: bool) -> bool:
        return path in STORED_PATHS and (self.keeps_turns or remembers)

    def _insert_context(
        self, path: str, body: _Json, id: Any, texts: Any, found: list[bytes] | None
    ) -> tuple[_Json, int, tuple[contexts.Block, ...]]:
        if id is None:
            raise bad_field("context_id", "must be the id of a context")
        protocol = of_path(path)
        if protocol.add_texts is None:
            raise bad_field("context_id", f"requests to {path} cannot name a context")
        if found is None:
            raise unknown_context(id)
        blocks = self.blocks.get(id)
        if blocks is None:
            blocks = contexts.unpacked_blocks(found[-1])
            self.blocks.add(id, blocks, len(found[-1]))
        return *insert_context(protocol, body, blocks, texts), blocks


def _continue(
    body: _Json, found: Found, keeps_turns: bool, remembers: bool
) -> tuple[_Json, Turn | None]:
    own, previous = response_turns.own_items(body), body.get("previous_response_id")
    if own is None:
        return body, None
    whole, earlier = body, found.previous
    if found.items is not None:
        if (excess := find_many(*found.items.values())) is not None:
            raise bad_field("input", f"in the items that it refers to, {excess.message}")
        own = with_referenced_items(own, found.items)
        whole = {**body, "input": own}
    if previous is not None:
        if earlier is None:
            raise BalancerError(
                HTTPStatus.BAD_REQUEST,
                f"Previous response with id '{previous}' not found.",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        if (excess := find_many(*earlier)) is not None:
            raise bad_field("previous_response_id", f"in its conversation, {excess.message}")
        whole = response_turns.continued(body, earlier, own)
    is_stored = keeps_turns and body.get("store") is not False
    if not is_stored and not remembers:
        return whole, None if previous is None else Turn(previous, None)
    try:
        entered = orjson.dumps(own)
    except TypeError:
        raise bad_field("input", "is nested too deeply") from None
    return whole, Turn(previous, entered, body.get("background") is True, is_stored=is_stored)


def _continue_thread(
    body: _Json, earlier: list[bytes] | None, keeps_turns: bool
) -> tuple[_Json, Turn | None]:
    previous, own = threads.previous_id(body), threads.own_part(body)
    turn = Turn(previous, own, is_thread=True) if own is not None and keeps_turns else None
    if previous is None:
        return body, turn
    if earlier is None:
        raise threads.not_found(previous)
    if (excess := find_many(*earlier)) is not None:
        raise bad_field("thread.previous_message_id", f"in its thread, {excess.message}")
    return threads.continued(body, earlier), turn


def unknown_context(id: str) -> BalancerError:
    """A context that was never registered, or has expired."""
    return BalancerError(
        HTTPStatus.NOT_FOUND,
        f"context_id: {id!r} is unknown or has expired: register it again (POST /v1/contexts).",
        code="context_not_found",
        param="context_id",
    )


# Inserts the content of a context into the requests that name it.
#
# `stable` and `project` blocks come ahead of the request's own tools and instructions:
#
#     /v1/messages (count_tokens)   `tools`; each text a block of `system`
#     /v1/chat/completions          `tools`; each text a part of the first message, of role system,
#                                   or of the request's own system or developer message there
#     /v1/responses                 `tools`; `instructions`, joined by blank lines
#
# Messages of a context come ahead of the request's own, only in the protocol that they are from. If
# the last one is open, the request's first message of the same role goes on with it.
#
# Texts of `runtime` blocks come first in the first user message. Many chat templates write the
# tools after the system text, but all write messages after both. So a changed runtime text costs
# neither the tools nor the instructions.
#
# A request that has the same content in these places by itself has the same prompt. The end of
# each layer gets a cache mark, unless the request's own marks hold it as long; /v1/responses
# has one text for all layers, so its whole prompt is pinned.

_ANY_TTL = TtlLimits(0.0, math.inf)


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
