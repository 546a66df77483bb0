"""Stored responses and contexts: reads them into requests, and stores new ones.

    expand: a request with context_id or previous_response_id -> the request with their content

Each tenant has its own: an id of another tenant is as unknown as one that does not exist.
"""

import asyncio
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

import orjson

from radix.byte_lru import ByteLRU
from sgl_ext.balancer.conversations import contexts, stored_turns
from sgl_ext.balancer.conversations.context_insertion import insert_context
from sgl_ext.balancer.conversations.document_store import Document
from sgl_ext.balancer.conversations.stored_turns import ResponseRecorder
from sgl_ext.balancer.conversations.tenant_documents import TenantDocuments
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.limits.elements import find_many
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.protocols.registry import of_path
from sgl_ext.protocols.responses import RESPONSES

_PARSED_BYTES = 64 << 20
# How long a context lives after its last use, by its longest-lived layer.
_CONTEXT_TTL_S = {"stable": 86_400.0, "project": 3600.0}
_RESPONSES, _BACKGROUND, _CONTEXTS = "responses", "background", "contexts"
_Json = dict[str, Any]


class Named(NamedTuple):
    """The ids in a request of what is stored: the response that it continues, and its context."""

    previous: str | None
    context: str | None


class Found(NamedTuple):
    """The items of what a request names, and of all that it continues; None if unknown."""

    previous: list[bytes] | None = None
    context: list[bytes] | None = None


@dataclass(slots=True)
class ConversationStore:
    """Without a document store nothing is stored, and ids of responses pass to the engines.

    response_ttl_s: how long a response lives after its last use.
    """

    documents: TenantDocuments
    metrics: Metrics
    response_ttl_s: float
    # The id is a hash of the content, so equal ids have equal blocks for all tenants.
    _blocks: ByteLRU[tuple[contexts.Block, ...]] = field(
        default_factory=lambda: ByteLRU(_PARSED_BYTES)
    )

    # Requests.

    def names(self, path: str, body: Any) -> Named | None:
        """What a parsed body names of the store; None without a name. Raises BalancerError 400."""
        if not isinstance(body, dict):
            return None
        previous = None
        if self._continues(path) and stored_turns.own_items(body) is not None:
            previous = body.get("previous_response_id")
        if previous is not None and not isinstance(previous, str):
            raise bad_field("previous_response_id", "must be the id of a response")
        context, _ = contexts.named(body) or (None, None)
        if context is not None and not isinstance(context, str):
            raise bad_field("context_id", "must be the id of a context")
        return None if previous is context is None else Named(previous, context)

    async def find(self, named: Named, tenant: str) -> Found:
        """Reads what a request names; it counts as used. Raises BalancerError 503 if the store
        cannot be read, 413 if it is too large."""
        use, (previous, context) = self.documents.use, named
        return Found(
            None if previous is None else await use(_RESPONSES, tenant, previous),
            None if context is None else await use(_CONTEXTS, tenant, context),
        )

    def expand(
        self, path: str, body: Any, tenant: str, found: Found | None = None
    ) -> tuple[Any, ResponseRecorder | None]:
        """A parsed body with the content of the ids that it names, and its answer's recorder.

        found: what it names. A body that names nothing is returned as the same object. Raises
        BalancerError for an unknown id and for a malformed field.
        """
        if not isinstance(body, dict):
            return body, None
        found, recorder = found or Found(), None
        if self._continues(path):
            body, recorder = self._continue(body, tenant, found.previous)
        if (named := contexts.named(body)) is not None:
            body = self._insert_context(path, body, *named, found.context)
        return body, recorder

    def _continues(self, path: str) -> bool:
        return path in RESPONSES.paths and self.documents.exist

    def _continue(
        self, body: _Json, tenant: str, earlier: list[bytes] | None
    ) -> tuple[_Json, ResponseRecorder | None]:
        own, previous = stored_turns.own_items(body), body.get("previous_response_id")
        if own is None:
            return body, None
        whole = body
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
            whole = stored_turns.continued(body, earlier, own)
        if body.get("store") is False:
            return whole, None if previous is None else ResponseRecorder(previous, None)
        try:
            entered = orjson.dumps(own)
        except TypeError:
            raise bad_field("input", "is nested too deeply") from None
        store = partial(self._store_response, tenant, previous, entered)
        in_background = body.get("background") is True
        note = partial(self._note_background, tenant) if in_background else None
        return whole, ResponseRecorder(previous, store, note)

    def _insert_context(
        self, path: str, body: _Json, id: Any, texts: Any, found: list[bytes] | None
    ) -> _Json:
        if id is None:
            raise bad_field("context_id", "must be the id of a context")
        protocol = of_path(path)
        if protocol.add_texts is None:
            raise bad_field("context_id", f"requests to {path} cannot name a context")
        if found is None:
            raise unknown_context(id)
        blocks = self._blocks.get(id)
        if blocks is None:
            blocks = contexts.unpacked_blocks(found[-1])
            self._blocks.add(id, blocks, len(found[-1]))
        whole, marks_left_out = insert_context(protocol, body, blocks, texts)
        if marks_left_out:
            self.metrics.store_events.counts[("mark_left_out",)] += marks_left_out
        return whole

    # Responses.

    async def _store_response(
        self, tenant: str, previous: str | None, entered: bytes, response: _Json
    ) -> bool:
        """False if the response could not be stored."""
        items = stored_turns.packed(entered, response["output"])
        document = Document(response["id"], items, stored_turns.about(response), previous)
        try:
            return await self.documents.put(_RESPONSES, tenant, document, self.response_ttl_s)
        except BalancerError:
            return False

    def _note_background(self, tenant: str, id: str) -> asyncio.Task[Any]:
        note = Document(id, b"", b"")
        storing = self.documents.put(_BACKGROUND, tenant, note, self.response_ttl_s)
        return self.documents.later(storing)

    async def is_in_background(self, tenant: str, id: str) -> bool:
        """Whether this is a response of the tenant that an engine made in the background."""
        return await self.documents.get(_BACKGROUND, tenant, id) is not None

    async def response(self, tenant: str, id: str) -> _Json | None:
        """A response as the client got it, None if it is not stored."""
        found = await self.documents.get(_RESPONSES, tenant, id)
        return None if found is None else stored_turns.response_of(found.about, found.items)

    async def input_items(self, tenant: str, id: str) -> list[_Json] | None:
        """All items that a response was made from, None if it is not stored."""
        found = await self.documents.chain(_RESPONSES, tenant, id)
        return None if found is None else stored_turns.listed(id, found)

    async def delete_response(self, tenant: str, id: str) -> bool:
        """Deletes a response, so that those that continue it end, too. False if it is unknown."""
        return await self.documents.delete(_RESPONSES, tenant, id)

    # Contexts.

    async def register_context(self, tenant: str, document: Any) -> _Json:
        """Stores a context and describes it. Raises BalancerError if it is invalid or too large."""
        if not self.documents.exist:
            message = "Contexts are not available: store_limit_bytes is 0."
            raise BalancerError(HTTPStatus.NOT_FOUND, message)
        blocks = contexts.read_blocks(document)
        id, ttl_s = contexts.context_id(blocks), _CONTEXT_TTL_S[blocks[0].layer]
        stored = Document(id, orjson.dumps([*map(list, blocks)]), b"")
        if not await self.documents.put(_CONTEXTS, tenant, stored, ttl_s):
            message = "blocks: larger than a tenant's share of the store (store_limit_bytes)"
            raise BalancerError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        return await self.context(tenant, id, with_content=False)

    async def context(self, tenant: str, id: str, *, with_content: bool) -> _Json:
        """Describes a context. Raises BalancerError 404 if it is unknown."""
        found = await self.documents.get(_CONTEXTS, tenant, id)
        if found is None:
            raise unknown_context(id)
        blocks = [
            contexts.described(block, with_content=with_content)
            for block in contexts.unpacked_blocks(found.items)
        ]
        about = {"context_id": id, "object": "context", "blocks": blocks}
        return {**about, "expires_at": int(found.expires_s)}

    async def delete_context(self, tenant: str, id: str) -> None:
        """Raises BalancerError 404 if the context is unknown."""
        if not await self.documents.delete(_CONTEXTS, tenant, id):
            raise unknown_context(id)


def unknown_context(id: str) -> BalancerError:
    """A context that was never registered, or has expired."""
    return BalancerError(
        HTTPStatus.NOT_FOUND,
        f"context_id: {id!r} is unknown or has expired: register it again (POST /v1/contexts).",
        code="context_not_found",
        param="context_id",
    )


def bad_field(field: str, reason: str) -> BalancerError:
    """A field of a request, or a query parameter, that is invalid."""
    return BalancerError(HTTPStatus.BAD_REQUEST, f"{field}: {reason}", param=field)
