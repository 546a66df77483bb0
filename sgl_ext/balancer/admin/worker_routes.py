"""Administration: workers join and leave at run time, and a placement explains itself.

GET    /sgl_ext/workers                       every worker and its state
POST   /sgl_ext/workers  {"url": "http://..."} takes one in, or back if it drains
DELETE /sgl_ext/workers?url=http://...        drains one: nothing new goes there,
                                              what runs ends, then it is let go
GET    /v1/pins                               every engine's pinned prefixes, its URL with each
GET    /sgl_ext/divergences                   where prompts part from those before them
POST   /sgl_ext/explain/v1/messages           where this request would go, and why;
                                              any path and body that are placed
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from sgl_ext.balancer.conversations.conversation_store import Kept
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.workers import Worker
from sgl_ext.protocols import routes
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.requests.headers import HeaderStrip
from sgl_ext.requests.session import OWNER_HEADER
from sgl_ext.requests.system_text import strip_request
from sgl_ext.settings.checks import is_worker_url

WORKERS_PATH = "/sgl_ext/workers"
EXPLAIN_PATH = "/sgl_ext/explain"
DIVERGENCES_PATH = "/sgl_ext/divergences"
ROUTER = web.AppKey("router", Router)
STRIP = web.AppKey("strip", HeaderStrip)
DIVERGENCES: web.AppKey[Callable[[], dict[str, Any] | None]] = web.AppKey("divergences")
SESSION = web.AppKey("session", aiohttp.ClientSession)
KEPT = web.AppKey("kept", Kept)


async def show_workers(request: web.Request) -> web.Response:
    workers = request.app[ROUTER].workers.all
    return _json(HTTPStatus.OK, {"workers": [_shown(worker) for worker in workers]})


async def add_worker(request: web.Request) -> web.Response:
    document = await read_json(request)
    url = document.get("url") if isinstance(document, dict) else None
    workers = request.app[ROUTER].workers
    if not isinstance(url, str) or not is_worker_url(url):
        raise BalancerError(HTTPStatus.BAD_REQUEST, f"url: must be http://HOST:PORT, not {url!r}")
    status = HTTPStatus.OK if workers.find(url) else HTTPStatus.CREATED
    worker = workers.add(url)
    await workers.probe_one(request.app[SESSION], worker)
    return _json(status, _shown(worker))


async def drain_worker(request: web.Request) -> web.Response:
    url = request.query.get("url", "")
    workers = request.app[ROUTER].workers
    worker = workers.find(url)
    if worker is None:
        raise BalancerError(HTTPStatus.NOT_FOUND, f"url: no worker is {url!r}")
    workers.drain(worker)
    return _json(HTTPStatus.ACCEPTED, _shown(worker))


async def show_pins(request: web.Request) -> web.Response:
    now_s = asyncio.get_running_loop().time()
    workers = request.app[ROUTER].workers.all
    owner = request.headers.get(OWNER_HEADER)
    pins = [row | {"worker": w.url} for w in workers for row in w.pins.rows(now_s, owner)]
    return _json(HTTPStatus.OK, {"pins": pins})


async def show_divergences(request: web.Request) -> web.Response:
    found = request.app[DIVERGENCES]()
    if found is None:
        message = "Nothing is looked at: start the balancer with --diagnose or --request-log."
        raise BalancerError(HTTPStatus.NOT_FOUND, message)
    return _json(HTTPStatus.OK, found)


async def explain(request: web.Request) -> web.Response:
    path = "/" + request.match_info["path"]
    if path not in routes.PLACED:
        raise BalancerError(HTTPStatus.NOT_FOUND, f"{path}: requests of this path are not placed")
    document = await read_json(request)
    router = request.app[ROUTER]
    hints = {name.lower(): value for name, value in request.headers.items()}
    document, _ = request.app[KEPT].read(path, document, router.tenants.asking(hints).name)
    stripped = strip_request(path, document, request.app[STRIP])
    routing = router.read(path, hints, stripped.body, request.content_length or 0)
    return _json(HTTPStatus.OK, {**router.explain(routing), "headers_stripped": stripped.headers})


async def read_json(request: web.Request) -> Any:
    """A request's body, parsed. Raises BalancerError 400 if it is no JSON."""
    try:
        return orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise BalancerError(HTTPStatus.BAD_REQUEST, f"body: not valid JSON: {error}") from None


def _shown(worker: Worker) -> dict[str, Any]:
    return {
        "url": worker.url,
        "ready": worker.ready,
        "draining": worker.draining,
        "breaker": worker.breaker.state,
        "in_flight": worker.in_flight,
        "pending_tokens": worker.pending_tokens,
        "publishes_prefixes": worker.publishes,
    }


def _json(status: HTTPStatus, document: dict[str, Any]) -> web.Response:
    return web.Response(
        status=status.value, body=orjson.dumps(document), content_type="application/json"
    )
