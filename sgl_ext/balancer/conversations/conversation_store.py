"""What the balancer keeps for clients, at work: requests made whole by it, and answers kept.

    read: context_id, previous_response_id -> the whole request, and a Turn to be told the answer

What is kept is of the tenant that sent it: another's ids are as unknown to it as made-up ones.
A request that names nothing kept passes as the same object.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import orjson

from sgl_ext.balancer.conversations import contexts, stored_turns
from sgl_ext.balancer.conversations.context_insertion import PATHS, in_context
from sgl_ext.balancer.conversations.document_store import Document, LongChain, Store
from sgl_ext.balancer.conversations.response_recorder import Turn
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.protocols.errors import BalancerError, body_too_large

log = logging.getLogger(__name__)

_TIDY_S = 1.0
_AGAIN_S = 5
# So long a context is kept from its last use on: by the most lasting of its layers.
_CONTEXT_TTL_S = {"stable": 86_400.0, "project": 3600.0}
_Json = dict[str, Any]


class Kept:
    """The store as requests use it. Without a store nothing is kept, and ids go to the engines.

    response_ttl_s: how long a response is kept from its last use on.
    most_bytes: what a request may be long with all that it names.
    clock: seconds since the epoch.
    """

    def __init__(
        self,
        store: Store | None,
        metrics: Metrics,
        response_ttl_s: float,
        most_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._events = metrics.store_events
        self._response_ttl_s = response_ttl_s
        self._most_bytes = most_bytes
        self._clock = clock

    # Requests.

    def read(self, path: str, body: Any, tenant: str) -> tuple[Any, Turn | None]:
        """A parsed body with all that it names put in place; and what is to be told its answer.

        Raises BalancerError: it names what is not known, or not in a way that can be understood.
        """
        if not isinstance(body, dict):
            return body, None
        turn = None
        if path == stored_turns.PATH and self._store is not None:
            body, turn = self._continued(body, tenant)
        if (named := contexts.named(body)) is not None:
            body = self._in_context(path, body, *named, tenant)
        return body, turn

    def _continued(self, body: _Json, tenant: str) -> tuple[_Json, Turn | None]:
        own, previous = stored_turns.own_items(body), body.get("previous_response_id")
        if own is None:
            return body, None
        whole = body
        if previous is not None:
            if not isinstance(previous, str):
                raise _bad("previous_response_id", "must be the id of a response")
            earlier = self._chain(_responses_of(tenant), previous)
            if earlier is None:
                raise BalancerError(
                    HTTPStatus.BAD_REQUEST,
                    f"Previous response with id '{previous}' not found.",
                    code="previous_response_not_found",
                    param="previous_response_id",
                )
            whole = stored_turns.continued(body, earlier, own)
        keeps = body.get("store") is not False
        if previous is None and not keeps:
            return whole, None
        keep = partial(self._keep, tenant, previous, orjson.dumps(own)) if keeps else None
        is_engines = keeps and body.get("background") is True
        return whole, Turn(previous, keep, partial(self._begin, tenant) if is_engines else None)

    def _in_context(self, path: str, body: _Json, id: Any, texts: Any, tenant: str) -> _Json:
        if not isinstance(id, str):
            raise _bad("context_id", "must be the id of a context")
        if path not in PATHS:
            raise _bad("context_id", f"requests of {path} have no place for a context")
        found = self._chain(_contexts_of(tenant), id)
        if found is None:
            raise unknown_context(id)
        blocks = tuple(contexts.Block(*block) for block in orjson.loads(found[-1]))
        try:
            whole, left_out = in_context(path, body, blocks, texts)
        except contexts.Malformed as error:
            raise BalancerError(HTTPStatus.BAD_REQUEST, str(error)) from None
        if left_out:
            self._events.counts[("mark left out",)] += left_out
        return whole

    def _chain(self, owner: str, id: str) -> list[bytes] | None:
        """The items of a document and of all that it continues, which is a use of them."""
        now = self._clock()
        found: list[bytes] | None = self._asked(
            lambda store: store.chain(owner, id, now, self._most_bytes)
        )
        self._events.counts[("unknown" if found is None else "found",)] += 1
        if found is not None:
            self._try(lambda store: store.use(owner, id, now))
        return found

    # Responses.

    def _keep(self, tenant: str, previous: str | None, entered: bytes, response: _Json) -> None:
        """Keeps a complete response. If that fails it is counted, and logged."""
        items = stored_turns.packed(entered, response["output"])
        document = Document(response["id"], items, stored_turns.about(response), previous)
        owner = _responses_of(tenant)
        self._try(lambda store: self._put(store, owner, document, self._response_ttl_s))

    def _begin(self, tenant: str, id: str) -> None:
        """Notes whose a response is that an engine makes in the background."""
        owner, note = _background_of(tenant), Document(id, b"", b"")
        self._try(lambda store: self._put(store, owner, note, self._response_ttl_s))

    def is_in_background(self, tenant: str, id: str) -> bool:
        """Whether an engine makes, or has made, this response of the tenant's."""
        owner = _background_of(tenant)
        return self._asked(lambda store: store.get(owner, id, self._clock())) is not None

    def response(self, tenant: str, id: str) -> _Json | None:
        """A response as it was answered, None if it is not kept."""
        owner = _responses_of(tenant)
        found = self._asked(lambda store: store.get(owner, id, self._clock()))
        return None if found is None else stored_turns.response_of(found.about, found.items)

    def input_items(self, tenant: str, id: str) -> list[_Json] | None:
        """All items that a response was made from, None if it is not kept."""
        owner = _responses_of(tenant)
        found = self._asked(lambda store: store.chain(owner, id, self._clock(), self._most_bytes))
        return None if found is None else stored_turns.listed(id, found)

    def delete_response(self, tenant: str, id: str) -> bool:
        """Lets a response go, and with it what continues it. False if it is not kept."""
        owner = _responses_of(tenant)
        return bool(self._asked(lambda store: store.delete(owner, id, self._clock())))

    # Contexts.

    def register(self, tenant: str, document: Any) -> _Json:
        """Keeps a context and shows it. Raises BalancerError if it cannot be, or cannot be kept."""
        if self._store is None:
            message = "No contexts are kept here: store_limit_bytes is 0."
            raise BalancerError(HTTPStatus.NOT_FOUND, message)
        try:
            blocks = contexts.read_blocks(document)
        except contexts.Malformed as error:
            raise BalancerError(HTTPStatus.BAD_REQUEST, str(error)) from None
        id, shown = contexts.context_id(blocks), orjson.dumps(contexts.shown(blocks))
        items, owner = Document(id, orjson.dumps([*map(list, blocks)]), shown), _contexts_of(tenant)
        ttl_s = _CONTEXT_TTL_S[blocks[0].layer]
        if self._asked(lambda store: self._put(store, owner, items, ttl_s)) is None:
            message = "blocks: larger than what is kept at all (store_limit_bytes)"
            raise BalancerError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        return self.context(tenant, id, with_content=False)

    def context(self, tenant: str, id: str, *, with_content: bool) -> _Json:
        """A context as it is shown to its client. Raises BalancerError 404 if it is not known."""
        owner = _contexts_of(tenant)
        found = self._asked(lambda store: store.get(owner, id, self._clock()))
        if found is None:
            raise unknown_context(id)
        blocks: list[_Json] = orjson.loads(found.about)
        if with_content:
            for shown, block in zip(blocks, orjson.loads(found.items), strict=True):
                shown["content"] = contexts.Block(*block).content
        told = {"context_id": id, "object": "context", "blocks": blocks}
        return {**told, "expires_at": int(found.expires_s)}

    def delete_context(self, tenant: str, id: str) -> None:
        """Lets a context go. Raises BalancerError 404 if it is not known."""
        owner = _contexts_of(tenant)
        if not self._asked(lambda store: store.delete(owner, id, self._clock())):
            raise unknown_context(id)

    # The store, which may fail.

    def _put(self, store: Store, owner: str, document: Document, ttl_s: float) -> int | None:
        evicted = store.put(owner, document, ttl_s, self._clock())
        self._events.counts[("stored" if evicted is not None else "too large",)] += 1
        if evicted:
            self._events.counts[("evicted",)] += evicted
        return evicted

    def _asked(self, ask: Callable[[Store], Any]) -> Any:
        """What the store says, None if there is none.

        Raises BalancerError 503 if it fails, and 413 if it would be too much.
        """
        try:
            return None if self._store is None else ask(self._store)
        except LongChain:
            raise body_too_large(self._most_bytes) from None
        except sqlite3.Error as error:
            self._failed(error)
            message = "What is kept cannot be read or written now."
            raise BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message, _AGAIN_S) from None

    def _try(self, act: Callable[[Store], Any]) -> None:
        """Has the store do what a request can be answered without."""
        try:
            if self._store is not None:
                act(self._store)
        except sqlite3.Error as error:
            self._failed(error)

    def _failed(self, error: sqlite3.Error) -> None:
        self._events.counts[("failed",)] += 1
        log.warning("the store failed: %s", error)

    async def tidy_forever(self) -> None:
        """Lets go what has expired, and empties the log."""
        while (store := self._store) is not None:
            await asyncio.sleep(_TIDY_S)
            try:
                self._events.counts[("expired",)] += store.sweep(self._clock())
                if store.wants_checkpoint():
                    await asyncio.to_thread(store.checkpoint)
            except (sqlite3.Error, OSError) as error:
                self._events.counts[("failed",)] += 1
                log.warning("the store failed: %s", error)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def _responses_of(tenant: str) -> str:
    return f"responses {tenant}"


def _background_of(tenant: str) -> str:
    return f"background {tenant}"


def _contexts_of(tenant: str) -> str:
    return f"contexts {tenant}"


def unknown_context(id: str) -> BalancerError:
    """A context that is not known, or was not used for too long."""
    return BalancerError(
        HTTPStatus.NOT_FOUND,
        f"context_id: {id!r} is not known, or has expired: register it again (POST /v1/contexts).",
        code="context_not_found",
        param="context_id",
    )


def _bad(field: str, reason: str) -> BalancerError:
    return BalancerError(HTTPStatus.BAD_REQUEST, f"{field}: {reason}", param=field)
