"""Administration: adds and drains workers, and explains placements.

GET    /sgl_ext/workers                         every worker and its state
POST   /sgl_ext/workers  {"url": "http://..."}  adds a worker, or ends its draining
DELETE /sgl_ext/workers?url=http://...          drains a worker: it gets no new requests and
                                                leaves after its last one
GET    /v1/pins                                 the pinned prefixes of every engine, with its URL
GET    /sgl_ext/divergences                     where prompts diverge from earlier ones
POST   /sgl_ext/explain/v1/messages             where this request would go, and why; every path
                                                whose requests are placed
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp import web

from sgl_ext import pin_mirror
from sgl_ext.balancer.admin.json_io import json_response, read_json
from sgl_ext.balancer.conversations.conversation_store import ConversationStore
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.balancer.routing.worker_probes import WorkerProbes
from sgl_ext.protocols import routes
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.protocols.registry import of_path
from sgl_ext.requests.headers import HeaderStrip
from sgl_ext.requests.session import OWNER_HEADER
from sgl_ext.requests.system_text import strip_request
from sgl_ext.settings.checks import is_worker_url

ROUTER = web.AppKey("router", Router)
STRIP = web.AppKey("strip", HeaderStrip)
DIVERGENCES: web.AppKey[Callable[[], dict[str, Any] | None]] = web.AppKey("divergences")
SESSION = web.AppKey("session", aiohttp.ClientSession)
CONVERSATIONS = web.AppKey("conversations", ConversationStore)


def add_routes(app: web.Application) -> None:
    add = app.router.add_route
    add("GET", "/sgl_ext/workers", show_workers)
    add("POST", "/sgl_ext/workers", add_worker)
    add("DELETE", "/sgl_ext/workers", drain_worker)
    add("GET", "/sgl_ext/divergences", show_divergences)
    add("GET", pin_mirror.PATH, show_pins)
    add("POST", "/sgl_ext/explain/{path:.+}", explain)


async def show_workers(request: web.Request) -> web.Response:
    workers = request.app[ROUTER].workers.all
    return json_response({"workers": [_shown(worker) for worker in workers]})


async def add_worker(request: web.Request) -> web.Response:
    document = await read_json(request)
    url = document.get("url") if isinstance(document, dict) else None
    workers = request.app[ROUTER].workers
    if not isinstance(url, str) or not is_worker_url(url):
        raise BalancerError(HTTPStatus.BAD_REQUEST, f"url: must be http://HOST:PORT, not {url!r}")
    status = HTTPStatus.OK if workers.find(url) else HTTPStatus.CREATED
    worker = workers.add(url)
    await WorkerProbes(workers, request.app[SESSION]).probe(worker)
    return json_response(_shown(worker), status)


async def drain_worker(request: web.Request) -> web.Response:
    url = request.query.get("url", "")
    workers = request.app[ROUTER].workers
    worker = workers.find(url)
    if worker is None:
        raise BalancerError(HTTPStatus.NOT_FOUND, f"url: no worker is {url!r}")
    workers.drain(worker)
    return json_response(_shown(worker), HTTPStatus.ACCEPTED)


async def show_pins(request: web.Request) -> web.Response:
    now_s = asyncio.get_running_loop().time()
    workers = request.app[ROUTER].workers.all
    owner = request.headers.get(OWNER_HEADER)
    pins = [row | {"worker": w.url} for w in workers for row in w.pins.rows(now_s, owner)]
    return json_response({"pins": pins})


async def show_divergences(request: web.Request) -> web.Response:
    found = request.app[DIVERGENCES]()
    if found is None:
        message = "Prompts are not compared: start the balancer with --diagnose or --request-log."
        raise BalancerError(HTTPStatus.NOT_FOUND, message)
    return json_response(found)


async def explain(request: web.Request) -> web.Response:
    path = "/" + request.match_info["path"]
    if path not in routes.PLACED:
        raise BalancerError(HTTPStatus.NOT_FOUND, f"{path}: requests to this path are not placed")
    document = await read_json(request)
    router = request.app[ROUTER]
    hints = {name.lower(): value for name, value in request.headers.items()}
    document, _ = request.app[CONVERSATIONS].expand(
        path, document, router.tenants.asking(hints).name
    )
    stripped = strip_request(of_path(path), document, request.app[STRIP])
    routing = router.read(path, hints, stripped.body, request.content_length or 0)
    return json_response({**router.explain(routing), "headers_stripped": stripped.headers})


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
