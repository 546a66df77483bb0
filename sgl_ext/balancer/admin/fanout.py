"""Requests that concern every worker: sent to all, or to one after another until one answers."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.balancer.routing.workers import Workers
from sgl_ext.protocols.errors import no_engine
from sgl_ext.requests.session import OWNER_HEADER, TENANT_HEADER

_TIMEOUT = aiohttp.ClientTimeout(total=120)
_TENANT_HEADERS = (TENANT_HEADER, OWNER_HEADER)


class FanOut:
    """Sends requests to workers without placement."""

    def __init__(self, session: aiohttp.ClientSession, workers: Workers) -> None:
        self._session = session
        self._workers = workers

    async def to_all(self, request: web.Request) -> web.Response:
        """Sends the request to every ready worker. The status is the highest of theirs."""
        body = await request.read()
        workers = self._ready()
        answers = await asyncio.gather(*(self._ask(worker, request, body) for worker in workers))
        status = max(status for status, _ in answers)
        document = {
            worker.url: _decoded(text) for worker, (_, text) in zip(workers, answers, strict=True)
        }
        return web.Response(
            status=status, body=orjson.dumps(document), content_type="application/json"
        )

    async def to_holder(self, request: web.Request) -> web.Response:
        """Tries one worker after another, and returns the first answer that is not 404."""
        body = await request.read()
        status, text = HTTPStatus.NOT_FOUND.value, b""
        for worker in self._ready():
            status, text = await self._ask(worker, request, body)
            if status != HTTPStatus.NOT_FOUND:
                break
        return web.Response(status=status, body=text, content_type="application/json")

    def _ready(self) -> list[Worker]:
        if workers := self._workers.ready:
            return workers
        raise no_engine()

    async def _ask(self, worker: Worker, request: web.Request, body: bytes) -> tuple[int, bytes]:
        headers = {
            name: request.headers[name] for name in _TENANT_HEADERS if name in request.headers
        }
        if body:
            headers["content-type"] = request.content_type
        try:
            async with self._session.request(
                request.method,
                worker.url + request.path_qs,
                data=body or None,
                headers=headers,
                timeout=_TIMEOUT,
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
