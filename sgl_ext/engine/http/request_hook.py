"""The request hook: what every HTTP route of the engine reads as its body passes here once.

SGLang parses each JSON body in `ORJSONRequest.json`, before validation and
before any protocol's conversion, so one hook serves every protocol.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from http import HTTPStatus
from typing import Any

from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import WHOLE_PROMPT, RequestContext, enter
from sgl_ext.engine.core.settings import settings as _settings
from sgl_ext.engine.host_cache.message_cache import recall
from sgl_ext.engine.http.translation import for_sglang
from sgl_ext.protocols.registry import of_path
from sgl_ext.requests.cache_marks import Marks, read_marks
from sgl_ext.requests.headers import HeaderStrip
from sgl_ext.requests.priority import Importance, read_importance
from sgl_ext.requests.segments import Chain, read_chain, with_sorted_tools
from sgl_ext.requests.session import (
    GROUP_HEADER,
    is_final,
    salt_of,
    session_key,
    stated_session,
)
from sgl_ext.requests.system_text import strip_request
from sgl_ext.tenants import Tenants

MAX_SEGMENTS = 16_384


@cache
def _tenants() -> Tenants:
    return Tenants(_settings().tenants, _settings().max_priority)


@cache
def _strip() -> HeaderStrip:
    return HeaderStrip(_settings().strip_headers)


async def read_body(original: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
    """Parses the body as SGLang does, strips it, and keeps what it says of its client and cache.

    Raises HTTPException if what it asks of the cache is malformed.
    """
    if hasattr(request, "_json"):
        return request._json
    body = await original(request)
    strip = _strip()
    path = request.url.path
    protocol = of_path(path)
    stripped = strip_request(protocol, body, strip)
    raw = await request.body()
    left = strip.mentions(raw) - stripped.headers
    if stripped.headers or left > 0:
        counter("headers_stripped").labels(path).inc(stripped.headers)
        counter("headers_left").labels(path).inc(max(left, 0))
    body = with_sorted_tools(stripped.body) if _settings().sort_tools else stripped.body
    marks = _marks(path, body)
    headers = dict(request.headers.items())  # the last of a name counts, as in the balancer
    tenant = _tenants().asking(headers)
    chain = read_chain(protocol, body, salt=salt_of(headers))
    if len(chain.hashes) > MAX_SEGMENTS:
        counter("chains_left_out").inc()
        chain = Chain()
    context = RequestContext(
        path,
        body,
        chain,
        marks,
        _importance(path, headers, body, tenant.max_priority),
        owner=tenant.name,
        group=headers.get(GROUP_HEADER),
        session=stated_session(headers, body) or "",
        is_last=is_final(headers),
        pins=((WHOLE_PROMPT, marks.whole_ttl_s),) if marks.whole_ttl_s else (),
        conversation=session_key(headers, body, chain),
    )
    enter(context)
    request.state.context = context  # SGLang converts some requests outside their context
    request._json = recall(path, for_sglang(request, protocol, path, body), context.group)
    return request._json


def _marks(path: str, body: Any) -> Marks:
    marks = read_marks(of_path(path), body, _settings().ttl_limits)
    if marks.ignored:
        counter("cache_hints_ignored").labels(path).inc(marks.ignored)
    _refuse(marks.error)
    return marks


def _importance(path: str, headers: dict[str, str], body: Any, ceiling: int) -> Importance:
    importance = read_importance(headers, body, ceiling)
    if importance.ignored:
        counter("priority_hints_ignored").labels(path).inc(importance.ignored)
    if importance.is_clamped:
        counter("priority_clamped").labels(path).inc()
    _refuse(importance.error)
    return importance


def _refuse(error: str) -> None:
    if error:
        from fastapi import HTTPException

        raise HTTPException(HTTPStatus.BAD_REQUEST, error)
