"""One request's way through: read it, choose a worker, send it on, relay the answer.

Promises kept here: a request whose worker fails before the first byte of its
answer has been sent is retried elsewhere; after that byte it is not replayed,
and a cut stream ends in the protocol's error event. When the client leaves,
its handler is cancelled, the upstream connection closes, and the engine aborts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from sgl_ext.balancer.errors import BalancerError, Protocol, error_event, no_engine
from sgl_ext.balancer.metrics import Metrics
from sgl_ext.balancer.workers import Worker, Workers
from sgl_ext.requests.conversation import conversation_key
from sgl_ext.requests.headers import HeaderStrip
from sgl_ext.requests.system_text import strip_request

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
# What belongs to one connection and not to the message (RFC 9110, section 7.6.1).
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "content-length",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# A body arrives here decoded, and the caller's key is for the balancer alone.
_NOT_FOR_WORKERS = _HOP_BY_HOP | {
    "authorization",
    "content-encoding",
    "expect",
    "host",
    "x-api-key",
}
_WORKER_FAILED = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)


class ClientGone(Exception):
    """The caller left before its answer was complete."""


class Proxy:
    """Forwards requests to workers. One for a whole balancer."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        workers: Workers,
        metrics: Metrics,
        strip: HeaderStrip,
    ) -> None:
        self._session = session
        self._workers = workers
        self._metrics = metrics
        self._strip = strip

    async def placed(self, request: web.Request) -> web.StreamResponse:
        """Forwards a JSON request to the worker that its conversation's beginning names."""
        body = await request.read()
        document = _parse_json(request, body)
        stripped = strip_request(request.path, document, self._strip)
        self._metrics.headers_read.inc(stripped.headers)
        return await self._forward(request, body, conversation_key(stripped.body))

    async def to_any(self, request: web.Request) -> web.StreamResponse:
        """Forwards a request that every worker answers alike."""
        return await self._forward(request, await request.read(), None)

    async def _forward(
        self, request: web.Request, body: bytes, prefix: int | None
    ) -> web.StreamResponse:
        arrived = time.perf_counter()
        tried: set[Worker] = set()
        accepted = False
        for _ in range(MAX_ATTEMPTS):
            worker = self._workers.choose(prefix, tried)
            if worker is None:
                break
            if tried:
                self._metrics.retries.inc()
            tried.add(worker)
            with self._workers.carrying(worker):
                try:
                    upstream = await self._send(worker, request, body)
                    async with upstream:
                        return await self._relay(request, upstream, arrived)
                except _WORKER_FAILED as error:
                    log.warning("%s failed before an answer: %s", worker.url, type(error).__name__)
                    if isinstance(error, aiohttp.ClientConnectorError):
                        self._workers.mark(worker, ready=False)
                    else:
                        accepted = True
        if accepted:
            raise BalancerError(HTTPStatus.BAD_GATEWAY, "The engine failed before it answered.")
        raise no_engine()

    async def _send(
        self, worker: Worker, request: web.Request, body: bytes
    ) -> aiohttp.ClientResponse:
        return await self._session.request(
            request.method,
            worker.url + request.path_qs,
            data=body or None,
            headers=_without(request.headers, _NOT_FOR_WORKERS),
            allow_redirects=False,
        )

    async def _relay(
        self, request: web.Request, upstream: aiohttp.ClientResponse, arrived: float
    ) -> web.StreamResponse:
        """Relays an answer. Raises one of _WORKER_FAILED only while nothing has been sent."""
        streams = upstream.content_type == "text/event-stream"
        first_byte = self._metrics.first_byte_s.labels(route_of(request))
        if not streams:
            body = await upstream.read()
            first_byte.observe(time.perf_counter() - arrived)
            headers = _without(upstream.headers, _HOP_BY_HOP)
            return web.Response(status=upstream.status, headers=headers, body=body)

        events = _whole_events(upstream.content)
        first = await anext(events, b"")
        first_byte.observe(time.perf_counter() - arrived)
        try:
            return await self._stream(request, upstream, first, events)
        except aiohttp.ClientConnectionResetError as error:
            # The stack raises the same family for either side; here it is the caller's.
            raise ClientGone from error

    async def _stream(
        self,
        request: web.Request,
        upstream: aiohttp.ClientResponse,
        first: bytes,
        events: AsyncIterator[bytes],
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            status=upstream.status, headers=_without(upstream.headers, _HOP_BY_HOP)
        )
        await response.prepare(request)
        chunk: bytes | None = first
        sent = 0
        while chunk is not None:
            await response.write(chunk)
            sent += chunk.count(b"\n\n")
            try:
                chunk = await anext(events, None)
            except _WORKER_FAILED as error:
                self._metrics.cut_streams.inc()
                log.warning("%s cut a stream: %s", upstream.url.origin(), type(error).__name__)
                message = "The engine stopped in the middle of its answer."
                await response.write(error_event(Protocol.of(request.path), message, sent))
                break
        await response.write_eof()
        return response


def _parse_json(request: web.Request, body: bytes) -> Any:
    if request.content_type != "application/json":
        raise BalancerError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"content-type: must be application/json, not {request.content_type!r}",
        )
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BalancerError(HTTPStatus.BAD_REQUEST, f"body: not valid JSON: {error}") from None


async def _whole_events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Server-sent events as they arrive, never a part of one: a cut leaves no broken event."""
    rest = b""
    async for chunk in content.iter_any():
        chunk = rest + chunk if rest else chunk
        end = chunk.rfind(b"\n\n") + 2
        if end > 1:
            yield chunk[:end]
            rest = chunk[end:]
        else:
            rest = chunk
    if rest:
        yield rest


def _without(headers: CIMultiDictProxy[str], names: frozenset[str]) -> CIMultiDict[str]:
    return CIMultiDict(item for item in headers.items() if item[0].lower() not in names)


def route_of(request: web.Request) -> str:
    """The route's own pattern, so that ids in a path do not become labels."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"
