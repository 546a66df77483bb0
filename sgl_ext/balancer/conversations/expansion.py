"""Puts the content of stored responses and contexts into the requests that name them.

It needs no store: what a request names is given to it. So a large request can be read in another
process.

An item of `/v1/responses` may name an item of an earlier answer instead of being sent:

    {"type": "item_reference", "id": "fc_1"}

The AI SDK does so with every item of earlier answers. Each item of a stored answer is a document of
its own under its id, so that a reference is found without the response that it was a part of.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

import orjson

from radix.byte_lru import ByteLRU
from sgl_ext.balancer.conversations import contexts, response_turns, threads
from sgl_ext.balancer.conversations.context_insertion import insert_context
from sgl_ext.balancer.store.documents import Document
from sgl_ext.limits.bounds import find_many
from sgl_ext.prompts.blocks import NamedBlock
from sgl_ext.protocols.errors import BalancerError, bad_field
from sgl_ext.protocols.registry import of_path
from sgl_ext.protocols.responses import COUNT_RESPONSE, RESPONSES

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
_RESPONSES = (*RESPONSES.paths, *COUNT_RESPONSE.paths)
_TURNS = (*_RESPONSES, *threads.PATHS)


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
            return path in (_TURNS if may_name else _RESPONSES)
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
        return path in _RESPONSES and (self.keeps_turns or remembers)

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
