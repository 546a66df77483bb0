"""Stored responses and contexts: reads what requests name, and stores new ones.

Each tenant has its own: an id of another tenant is as unknown as one that does not exist.
"""

import asyncio
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from sgl_ext.balancer.conversations import (
    contexts,
    response_turns,
    threads,
)
from sgl_ext.balancer.conversations.expansion import (
    Found,
    Named,
    Turn,
    item_documents,
    unknown_context,
)
from sgl_ext.balancer.conversations.response_turns import LaneTurns, ResponseRecorder
from sgl_ext.balancer.conversations.tenant_documents import TenantDocuments
from sgl_ext.balancer.conversations.threads import ThreadRecorder
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.documents import Document
from sgl_ext.protocols.errors import BalancerError

# How long a context lives after its last use, by its longest-lived layer.
_CONTEXT_TTL_S = {"stable": 86_400.0, "project": 3600.0}
_RESPONSES, _BACKGROUND, _CONTEXTS = "responses", "background", "contexts"
_THREADS, _ITEMS = "threads", "items"
# So many lookups of items are in the store's queue at once.
_BATCH = 16
_Json = dict[str, Any]


@dataclass(slots=True)
class ConversationStore:
    """Without a document store nothing is stored, and ids of responses pass to the engines.

    response_ttl_s: how long a response lives after its last use.
    """

    documents: TenantDocuments
    metrics: Metrics
    response_ttl_s: float

    # Requests.

    async def find(self, named: Named, tenant: str, turns: LaneTurns | None = None) -> Found:
        """Reads what a request names; it counts as used.

        turns: what the request's connection remembers. Raises BalancerError 503 if the store cannot
        be read, 413 if it is too large.
        """
        use, previous, context = self.documents.use, named.previous, named.context
        remembered: list[bytes] = []
        if previous is not None and turns is not None:
            remembered, previous = turns.chain(previous)
        kind = _THREADS if named.is_thread else _RESPONSES
        earlier = None if previous is None else await use(kind, tenant, previous)
        is_known = earlier is not None or (previous is None and named.previous is not None)
        return Found(
            [*(earlier or ()), *remembered] if is_known else None,
            None if context is None else await use(_CONTEXTS, tenant, context),
            await self._items(tenant, named.items) if named.items else None,
        )

    async def _items(self, tenant: str, ids: tuple[str, ...]) -> dict[str, bytes]:
        """The known ones of these items. Raises BalancerError 413 if they are too large."""
        items: dict[str, bytes] = {}
        for start in range(0, len(ids), _BATCH):
            batch = ids[start : start + _BATCH]
            used = await asyncio.gather(*(self.documents.use(_ITEMS, tenant, id) for id in batch))
            items |= {id: found[-1] for id, found in zip(batch, used, strict=True) if found}
            self.documents.require_small(sum(map(len, items.values())))
        return items

    def recorder(
        self, turn: Turn | None, tenant: str, turns: LaneTurns | None = None
    ) -> ResponseRecorder | ThreadRecorder | None:
        """Records the answer of a request of this turn; None without one. turns: as of `find`."""
        if turn is None:
            return None
        if turn.is_thread and turn.entered is not None:
            return ThreadRecorder(partial(self._store_turn, tenant, turn.previous, turn.entered))
        if turn.entered is None:
            return ResponseRecorder(turn.previous, None)
        store = partial(self._store_response, tenant, turn, turn.entered, turns)
        note = partial(self._note_background, tenant) if turn.in_background else None
        return ResponseRecorder(turn.previous, store, note)

    async def _store_turn(
        self, tenant: str, previous: str | None, own: bytes, id: str, content: list[Any]
    ) -> bool:
        """False if the turn of a thread could not be stored."""
        document = Document(id, threads.packed(own, content), b"", previous)
        try:
            return await self.documents.put(_THREADS, tenant, document, self.response_ttl_s)
        except BalancerError:
            return False

    # Responses.

    async def _store_response(
        self, tenant: str, turn: Turn, entered: bytes, turns: LaneTurns | None, response: _Json
    ) -> bool:
        """False if the response could not be stored."""
        items = response_turns.packed(entered, response["output"])
        if turns is not None:
            turns.add(response["id"], turn.previous, items)
        if not turn.is_stored:
            return True
        document = Document(response["id"], items, response_turns.about(response), turn.previous)
        kept = item_documents(response["output"])
        put, ttl_s = self.documents.put, self.response_ttl_s
        try:
            whether = await asyncio.gather(
                put(_RESPONSES, tenant, document, ttl_s),
                *(put(_ITEMS, tenant, item, ttl_s) for item in kept),
            )
        except BalancerError:
            return False
        return whether[0]

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
        return None if found is None else response_turns.response_of(found.about, found.items)

    async def input_items(self, tenant: str, id: str) -> list[_Json] | None:
        """All items that a response was made from, None if it is not stored."""
        found = await self.documents.chain(_RESPONSES, tenant, id)
        return None if found is None else response_turns.listed(id, found)

    async def delete_response(self, tenant: str, id: str) -> bool:
        """Deletes a response and its items, so that those that continue it end, too. False if it
        is unknown."""
        found = await self.response(tenant, id)
        for item in item_documents(found["output"] if found else []):
            await self.documents.delete(_ITEMS, tenant, item.id)
        return await self.documents.delete(_RESPONSES, tenant, id)

    # Contexts.

    async def register_context(self, tenant: str, registered: contexts.Registration) -> _Json:
        """Stores a context and describes it. Raises BalancerError if it is too large."""
        if not self.documents.exist:
            message = "Contexts are not available: store_limit_bytes is 0."
            raise BalancerError(HTTPStatus.NOT_FOUND, message)
        about, id = registered.about, registered.about["context_id"]
        if not await self._put_context(tenant, registered):
            message = "blocks: larger than a tenant's share of the store (store_limit_bytes)"
            raise BalancerError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        found = await self.documents.get(_CONTEXTS, tenant, id)
        if found is None:
            raise unknown_context(id)
        return {**about, "expires_at": int(found.expires_s)}

    async def keep_context(self, tenant: str, made: contexts.Registration) -> str:
        """Stores a context that a request made: "made", "renewed" if it was there, or why it is
        not stored. Raises BalancerError 503 if the store fails."""
        if await self.documents.renew(_CONTEXTS, tenant, made.about["context_id"]):
            return "renewed"
        if not self.documents.exist:
            return "no_store"
        return "made" if await self._put_context(tenant, made) else "too_large"

    async def _put_context(self, tenant: str, registered: contexts.Registration) -> bool:
        about, items = registered
        document = Document(about["context_id"], items, contexts.summary(about), is_listed=True)
        ttl_s = _CONTEXT_TTL_S[about["blocks"][0]["layer"]]
        return await self.documents.put(_CONTEXTS, tenant, document, ttl_s)

    async def context(self, tenant: str, id: str, *, with_content: bool) -> _Json:
        """Describes a context. Raises BalancerError 404 if it is unknown."""
        found = await self.documents.get(_CONTEXTS, tenant, id)
        if found is None:
            raise unknown_context(id)
        blocks = contexts.unpacked_blocks(found.items)
        name = contexts.read_summary(found.about)["name"]
        about = contexts.describe(id, blocks, name, with_content=with_content)
        return {**about, "expires_at": int(found.expires_s)}

    async def list_contexts(self, tenant: str, after: str, limit: int) -> tuple[list[_Json], bool]:
        """The tenant's contexts whose ids follow `after`, in the order of their ids, at most
        `limit`; and whether there are more."""
        found = await self.documents.listing(_CONTEXTS, tenant, after, limit + 1)
        listed = [
            {
                "context_id": each.id,
                "object": "context",
                **contexts.read_summary(each.about),
                "last_used_at": int(each.used_s),
                "expires_at": int(each.expires_s),
            }
            for each in found[:limit]
        ]
        return listed, len(found) > limit

    async def delete_context(self, tenant: str, id: str) -> None:
        """Raises BalancerError 404 if the context is unknown."""
        if not await self.documents.delete(_CONTEXTS, tenant, id):
            raise unknown_context(id)
