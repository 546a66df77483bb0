"""Differential fuzzing of what the balancer and an engine read in one request with a body.

    python -m tests.fuzz.bodies --cases 1000000

The balancer prepares a request as it does for a client. What it would send is received by h11,
parsed as SGLang parses a body, and read by the engine's request hook. Where neither refuses it,
both must have the same segments, session, priority, expected output, tenant and last turn; and
each field that decides in the balancer must have the value that SGLang's models would take.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any

import h11
import orjson
from fastapi import HTTPException
from starlette.requests import Request as StarletteRequest

from sgl_ext.balancer.access.authentication import Authentication
from sgl_ext.balancer.access.rate_limits import RateLimits
from sgl_ext.balancer.conversations.contexts import read_registration
from sgl_ext.balancer.conversations.conversation_store import ConversationStore
from sgl_ext.balancer.conversations.expansion import Named, Turn
from sgl_ext.balancer.conversations.tenant_documents import TenantDocuments
from sgl_ext.balancer.http.request_head import RequestHeadCache
from sgl_ext.balancer.http.request_reader import Request, RequestReader
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.relay.preparation import NOT_PREPARED, Preparation, plan_of, prepare
from sgl_ext.balancer.relay.reading import BodyReader
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.workers import Workers
from sgl_ext.balancer.store.sqlite import DocumentStore, SqliteDocuments, StoreThread
from sgl_ext.engine.core.request_context import RequestContext, context_of
from sgl_ext.engine.http import request_hook
from sgl_ext.limits.byte_account import ByteAccount
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.reading.strip import HeaderStrip
from sgl_ext.settings.schema import IN_MEMORY, EngineSettings
from sgl_ext.tenants import Tenants
from tests.fuzz import documents
from tests.fuzz.client_side import forwarded
from tests.fuzz.command import main
from tests.fuzz.oracle import Difference, equal, events, oracle

_LIMIT_BODY = 1 << 20
# A request reaches an engine's hook below many calls of its server's.
_ENGINE_S_FRAMES = 100


def run(first: int, cases: int, stop: bool = True) -> Counter[str]:
    """Runs cases by number and counts them. Needs an installed extension of an engine.

    Raises Difference, naming the case and its bytes, at the first difference, unless not `stop`.
    """
    return asyncio.run(_run(first, cases, stop))


async def _run(first: int, cases: int, stop: bool) -> Counter[str]:
    counts: Counter[str] = Counter()
    services = await _services()
    admits = [Authentication(None, None, Tenants(), isolates).admit for isolates in (False, True)]
    heads = [RequestHeadCache(admit) for admit in admits]
    for number in range(first, first + cases):
        raw = documents.request(Random(number))
        try:
            counts[await _check(raw, heads[number % 2], services)] += 1
        except Difference as difference:
            message = f"case {number}: {difference}\n{raw!r}"
            if stop:
                raise Difference(message) from None
            counts["differences"] += 1
            print(message)
    return counts


async def _check(raw: bytes, heads: RequestHeadCache, services: Any) -> str:
    """Compares what the two read. Returns who refused the request, or "read"."""
    reader = RequestReader(heads, _LIMIT_BODY, ByteAccount(_LIMIT_BODY))
    reader.ahead += raw
    try:
        request = reader.next()
        if request is None or request.rejection is not None:
            return "refused by its head"
        preparation = await _prepared(services, request)
    except BalancerError as error:
        equal("status", int(error.status) in (400, 404), True)
        return "refused by the balancer"
    try:
        context = await _engine_reads(forwarded(request))
    except HTTPException as error:
        equal("status", error.status_code, 400)
        return "refused by the engine"
    except orjson.JSONDecodeError as error:
        raise Difference(f"only the engine finds malformed JSON: {error}") from None
    _compare(preparation, context)
    return "read"


def _compare(preparation: Preparation, context: RequestContext) -> None:
    routing = preparation.routing
    equal("segments", routing.chain.hashes, context.chain.hashes)
    equal("ends of segments", list(routing.chain.ends), list(context.chain.ends))
    equal("session", routing.session, context.conversation)
    equal("priority", routing.priority, context.importance.priority)
    equal("output", routing.output_tokens, context.importance.output_tokens or 0)
    equal("tenant", routing.tenant, context.owner)
    equal("last turn", routing.is_final, context.is_last)


async def _prepared(services: Any, request: Request) -> Preparation:
    plan = plan_of(services, request.head)
    if plan is None:
        return NOT_PREPARED
    reading = services.reader.read(plan, request.body)
    if isinstance(reading, Named):
        tenant = services.router.tenants.of_headers(plan.hints).name
        found = await services.bodies.conversations.find(reading, tenant)
        reading = services.reader.read(plan, request.body, found)
    return prepare(services, request, plan, reading, services.models.choose(reading.model))


async def _engine_reads(data: bytes) -> RequestContext:
    """The engine's context of a request; its body is parsed as SGLang's ORJSONRequest does."""
    head, body = events(oracle(h11.SERVER, data), h11.Request)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def parse(request: StarletteRequest) -> Any:
        return orjson.loads(await request.body())

    scope = {
        "type": "http",
        "method": "POST",
        "path": head.target.decode(),
        "query_string": b"",
        "headers": [(bytes(name), bytes(value)) for name, value in head.headers],
    }
    request = StarletteRequest(scope, receive)
    _deeper(_ENGINE_S_FRAMES, request_hook.read_body(parse, request))
    context = context_of(request)
    assert context is not None
    return context


def _deeper(frames: int, coroutine: Coroutine[Any, Any, Any]) -> None:
    """Runs a coroutine that waits for nothing with so much less stack left."""
    if frames:
        return _deeper(frames - 1, coroutine)
    with suppress(StopIteration):
        coroutine.send(None)


class _Unthreaded(StoreThread):
    """Runs queries at once: most cases name something, and a thread takes longer than they do."""

    async def read(self, query: Any) -> Any:
        return query(self._store)

    async def write(self, query: Any, size_bytes: int = 0) -> Any:
        return query(self._store)

    async def tidy(self, query: Any) -> Any:
        return query(self._store)


async def _conversations(metrics: Metrics) -> ConversationStore:
    """A store with the context and the response that the requests name."""
    found = SqliteDocuments(_Unthreaded(DocumentStore(IN_MEMORY, 1 << 20), metrics))
    store = ConversationStore(TenantDocuments(found, metrics, _LIMIT_BODY), metrics, 1e9)
    for tenant in documents.TENANTS:
        described = await store.register_context(tenant, read_registration(documents.CONTEXT))
        assert described["context_id"] == documents.CONTEXT_ID
        response = {"id": documents.RESPONSE_ID, "output": [{"type": "message"}]}
        entered = b'[{"role":"user","content":"earlier"}]'
        await store._store_response(tenant, Turn(None, entered), entered, None, response)
    return store


async def _services() -> Any:
    metrics = Metrics()
    tenants = Tenants((), EngineSettings().max_priority)
    router = Router(Workers(metrics), metrics, tenants=tenants)
    pool = SimpleNamespace(router=router)
    return SimpleNamespace(
        tenants=tenants,
        router=router,
        models=SimpleNamespace(choose=lambda _: pool),
        bodies=SimpleNamespace(conversations=await _conversations(metrics), hint_rules=None),
        rate_limits=RateLimits(None, metrics),
        request_log=SimpleNamespace(detector=None),
        cache_turns=SimpleNamespace(prompt_before=lambda *_: None),
        reader=BodyReader(HeaderStrip(), sort_tools=False, keeps_turns=True),
        metrics=metrics,
    )


if __name__ == "__main__":
    main(run, __doc__)
