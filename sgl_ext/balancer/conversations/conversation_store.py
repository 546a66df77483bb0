"""Stored responses and contexts: reads them into requests, and stores new ones.

    expand: a request with context_id or previous_response_id -> the request with their content

Each tenant has its own: an id of another tenant is as unknown as one that does not exist.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

import orjson

from sgl_ext.balancer.conversations import contexts, stored_turns
from sgl_ext.balancer.conversations.context_insertion import insert_context
from sgl_ext.balancer.conversations.document_store import Document, DocumentStore
from sgl_ext.balancer.conversations.stored_turns import ResponseRecorder
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.protocols.registry import of_path
from sgl_ext.protocols.responses import RESPONSES

log = logging.getLogger(__name__)

_SWEEP_S = 1.0
_RETRY_AFTER_S = 5
# How long a context lives after its last use, by its longest-lived layer.
_CONTEXT_TTL_S = {"stable": 86_400.0, "project": 3600.0}
_RESPONSES, _BACKGROUND, _CONTEXTS = "responses", "background", "contexts"
_Json = dict[str, Any]
_T = TypeVar("_T")


@dataclass(slots=True)
class ConversationStore:
    """Without a document store nothing is stored, and ids of responses pass to the engines.

    response_ttl_s: how long a response lives after its last use.
    limit_bytes: the largest request, with everything that it names.
    clock: seconds since the epoch.
    """

    documents: DocumentStore | None
    metrics: Metrics
    response_ttl_s: float
    limit_bytes: int
    clock: Callable[[], float] = time.time

    # Requests.

    def expand(self, path: str, body: Any, tenant: str) -> tuple[Any, ResponseRecorder | None]:
        """A parsed body with the content of the ids that it names, and its answer's recorder.

        A body that names none is returned as the same object. Raises BalancerError for an
        unknown id and for a malformed field.
        """
        if not isinstance(body, dict):
            return body, None
        recorder = None
        if path in RESPONSES.paths and self.documents is not None:
            body, recorder = self._continue(body, tenant)
        if (named := contexts.named(body)) is not None:
            body = self._insert_context(path, body, *named, tenant)
        return body, recorder

    def _continue(self, body: _Json, tenant: str) -> tuple[_Json, ResponseRecorder | None]:
        own, previous = stored_turns.own_items(body), body.get("previous_response_id")
        if own is None:
            return body, None
        whole = body
        if previous is not None:
            if not isinstance(previous, str):
                raise bad_field("previous_response_id", "must be the id of a response")
            earlier = self._chain(_RESPONSES, tenant, previous)
            if earlier is None:
                raise BalancerError(
                    HTTPStatus.BAD_REQUEST,
                    f"Previous response with id '{previous}' not found.",
                    code="previous_response_not_found",
                    param="previous_response_id",
                )
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

    def _insert_context(self, path: str, body: _Json, id: Any, texts: Any, tenant: str) -> _Json:
        if not isinstance(id, str):
            raise bad_field("context_id", "must be the id of a context")
        protocol = of_path(path)
        if protocol.add_texts is None:
            raise bad_field("context_id", f"requests to {path} cannot name a context")
        found = self._chain(_CONTEXTS, tenant, id)
        if found is None:
            raise unknown_context(id)
        blocks = contexts.unpacked_blocks(found[-1])
        whole, marks_left_out = insert_context(protocol, body, blocks, texts)
        if marks_left_out:
            self.metrics.store_events.counts[("mark_left_out",)] += marks_left_out
        return whole

    def _chain(self, kind: str, tenant: str, id: str) -> list[bytes] | None:
        """The items of a document and of those that it continues; all of them count as used."""
        owner, now = _owner(kind, tenant), self.clock()
        found = self._query(lambda store: store.chain(owner, id, now, self.limit_bytes))
        self.metrics.store_events.counts[("unknown" if found is None else "found",)] += 1
        if found is not None:
            self._query(lambda store: store.use(owner, id, now), is_required=False)
        return found

    # Responses.

    def _store_response(
        self, tenant: str, previous: str | None, entered: bytes, response: _Json
    ) -> None:
        items = stored_turns.packed(entered, response["output"])
        document = Document(response["id"], items, stored_turns.about(response), previous)
        self._put(_RESPONSES, tenant, document, self.response_ttl_s, is_required=False)

    def _note_background(self, tenant: str, id: str) -> None:
        note = Document(id, b"", b"")
        self._put(_BACKGROUND, tenant, note, self.response_ttl_s, is_required=False)

    def is_in_background(self, tenant: str, id: str) -> bool:
        """Whether this is a response of the tenant that an engine made in the background."""
        return self._get(_BACKGROUND, tenant, id) is not None

    def response(self, tenant: str, id: str) -> _Json | None:
        """A response as the client got it, None if it is not stored."""
        found = self._get(_RESPONSES, tenant, id)
        return None if found is None else stored_turns.response_of(found.about, found.items)

    def input_items(self, tenant: str, id: str) -> list[_Json] | None:
        """All items that a response was made from, None if it is not stored."""
        owner, now = _owner(_RESPONSES, tenant), self.clock()
        found = self._query(lambda store: store.chain(owner, id, now, self.limit_bytes))
        return None if found is None else stored_turns.listed(id, found)

    def delete_response(self, tenant: str, id: str) -> bool:
        """Deletes a response, so that those that continue it end, too. False if it is unknown."""
        return self._delete(_RESPONSES, tenant, id)

    # Contexts.

    def register_context(self, tenant: str, document: Any) -> _Json:
        """Stores a context and describes it. Raises BalancerError if it is invalid or too large."""
        if self.documents is None:
            message = "Contexts are not available: store_limit_bytes is 0."
            raise BalancerError(HTTPStatus.NOT_FOUND, message)
        blocks = contexts.read_blocks(document)
        id, ttl_s = contexts.context_id(blocks), _CONTEXT_TTL_S[blocks[0].layer]
        stored = Document(id, orjson.dumps([*map(list, blocks)]), b"")
        if self._put(_CONTEXTS, tenant, stored, ttl_s) is None:
            message = "blocks: larger than the whole store (store_limit_bytes)"
            raise BalancerError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        return self.context(tenant, id, with_content=False)

    def context(self, tenant: str, id: str, *, with_content: bool) -> _Json:
        """Describes a context. Raises BalancerError 404 if it is unknown."""
        found = self._get(_CONTEXTS, tenant, id)
        if found is None:
            raise unknown_context(id)
        blocks = [
            contexts.described(block, with_content=with_content)
            for block in contexts.unpacked_blocks(found.items)
        ]
        about = {"context_id": id, "object": "context", "blocks": blocks}
        return {**about, "expires_at": int(found.expires_s)}

    def delete_context(self, tenant: str, id: str) -> None:
        """Raises BalancerError 404 if the context is unknown."""
        if not self._delete(_CONTEXTS, tenant, id):
            raise unknown_context(id)

    # The document store, which may fail.

    def _get(self, kind: str, tenant: str, id: str) -> Document | None:
        return self._query(lambda store: store.get(_owner(kind, tenant), id, self.clock()))

    def _delete(self, kind: str, tenant: str, id: str) -> bool:
        owner, now = _owner(kind, tenant), self.clock()
        return bool(self._query(lambda store: store.delete(owner, id, now)))

    def _put(
        self, kind: str, tenant: str, document: Document, ttl_s: float, *, is_required: bool = True
    ) -> int | None:
        def put(store: DocumentStore) -> int | None:
            evicted = store.put(_owner(kind, tenant), document, ttl_s, self.clock())
            self.metrics.store_events.counts[
                ("stored" if evicted is not None else "too_large",)
            ] += 1
            if evicted:
                self.metrics.store_events.counts[("evicted",)] += evicted
            return evicted

        return self._query(put, is_required=is_required)

    def _query(
        self, query: Callable[[DocumentStore], _T], *, is_required: bool = True
    ) -> _T | None:
        """The result of `query`, None without a document store.

        Raises BalancerError 503 if the store fails, unless the request does not depend on it.
        """
        try:
            return None if self.documents is None else query(self.documents)
        except sqlite3.Error as error:
            self._failed(error)
            if not is_required:
                return None
            message = "The store of responses and contexts is unavailable."
            raise BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message, _RETRY_AFTER_S) from None

    def _failed(self, error: Exception) -> None:
        self.metrics.store_events.counts[("failed",)] += 1
        log.warning("the store failed: %s", error)

    async def sweep_forever(self) -> None:
        """Deletes expired documents and checkpoints the write-ahead log."""
        while (store := self.documents) is not None:
            await asyncio.sleep(_SWEEP_S)
            try:
                self.metrics.store_events.counts[("expired",)] += store.sweep(self.clock())
                if store.wants_checkpoint():
                    await asyncio.to_thread(store.checkpoint)
            except (sqlite3.Error, OSError) as error:
                self._failed(error)

    def close(self) -> None:
        if self.documents is not None:
            self.documents.close()


def _owner(kind: str, tenant: str) -> str:
    """A document's owner in the document store."""
    return f"{kind} {tenant}"


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
