"""Requests that concern every worker: sent to all, or to one after another until one answers."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from sgl_ext.balancer.admin.worker_routes import PARTS, json_response
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.protocols.errors import no_engine
from sgl_ext.requests.session import OWNER_HEADER, TENANT_HEADER

_TIMEOUT = aiohttp.ClientTimeout(total=120)
_FORWARDED_HEADERS = (TENANT_HEADER, OWNER_HEADER)


async def to_all(request: web.Request) -> web.Response:
    """Sends the request to every ready worker. The status is the highest of theirs."""
    workers = _ready(request)
    answers = await asyncio.gather(*(_send(worker, request) for worker in workers))
    texts = zip(workers, (text for _, text in answers), strict=True)
    document = {worker.url: _decoded(text) for worker, text in texts}
    return json_response(document, max(status for status, _ in answers))


async def to_holder(request: web.Request) -> web.Response:
    """Tries one worker after another, and returns the first answer that is not 404."""
    status, text = HTTPStatus.NOT_FOUND.value, b""
    for worker in _ready(request):
        status, text = await _send(worker, request)
        if status != HTTPStatus.NOT_FOUND:
            break
    return web.Response(status=status, body=text, content_type="application/json")


def _ready(request: web.Request) -> list[Worker]:
    if workers := request.app[PARTS].router.workers.ready:
        return workers
    raise no_engine()


async def _send(worker: Worker, request: web.Request) -> tuple[int, bytes]:
    body = await request.read()
    headers = {
        name: request.headers[name] for name in _FORWARDED_HEADERS if name in request.headers
    }
    if body:
        headers["content-type"] = request.content_type
    url = worker.url + request.path_qs
    try:
        async with request.app[PARTS].session.request(
            request.method, url, data=body or None, headers=headers, timeout=_TIMEOUT
        ) as answer:
            return answer.status, await answer.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        message = orjson.dumps({"error": f"no answer: {type(error).__name__}"})
        return HTTPStatus.BAD_GATEWAY.value, message


def _decoded(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text.decode("utf-8", "replace").strip()
