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
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from sgl_ext import pin_mirror
from sgl_ext.balancer.conversations.conversation_store import ConversationStore
from sgl_ext.balancer.metrics.registry import Metrics
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


@dataclass(frozen=True)
class ControlParts:
    """What the control plane uses of the balancer.

    page: renders the metrics of all processes.
    divergences: the findings of all processes; None if prompts are not compared.
    """

    router: Router
    strip: HeaderStrip
    session: aiohttp.ClientSession
    metrics: Metrics
    conversations: ConversationStore
    page: Callable[[], bytes]
    divergences: Callable[[], dict[str, Any] | None]


PARTS = web.AppKey("parts", ControlParts)


async def show_workers(request: web.Request) -> web.Response:
    workers = request.app[PARTS].router.workers.all
    return json_response({"workers": [_shown(worker) for worker in workers]})


async def add_worker(request: web.Request) -> web.Response:
    document = await read_json(request)
    url = document.get("url") if isinstance(document, dict) else None
    workers = request.app[PARTS].router.workers
    if not isinstance(url, str) or not is_worker_url(url):
        raise BalancerError(HTTPStatus.BAD_REQUEST, f"url: must be http://HOST:PORT, not {url!r}")
    status = HTTPStatus.OK if workers.find(url) else HTTPStatus.CREATED
    worker = workers.add(url)
    await WorkerProbes(workers, request.app[PARTS].session).probe(worker)
    return json_response(_shown(worker), status)


async def drain_worker(request: web.Request) -> web.Response:
    url = request.query.get("url", "")
    workers = request.app[PARTS].router.workers
    worker = workers.find(url)
    if worker is None:
        raise BalancerError(HTTPStatus.NOT_FOUND, f"url: no worker is {url!r}")
    workers.drain(worker)
    return json_response(_shown(worker), HTTPStatus.ACCEPTED)


async def show_pins(request: web.Request) -> web.Response:
    now_s = asyncio.get_running_loop().time()
    workers = request.app[PARTS].router.workers.all
    owner = request.headers.get(OWNER_HEADER)
    pins = [row | {"worker": w.url} for w in workers for row in w.pins.rows(now_s, owner)]
    return json_response({"pins": pins})


async def show_divergences(request: web.Request) -> web.Response:
    found = request.app[PARTS].divergences()
    if found is None:
        message = "Prompts are not compared: start the balancer with --diagnose or --request-log."
        raise BalancerError(HTTPStatus.NOT_FOUND, message)
    return json_response(found)


async def explain(request: web.Request) -> web.Response:
    path = "/" + request.match_info["path"]
    if path not in routes.PLACED:
        raise BalancerError(HTTPStatus.NOT_FOUND, f"{path}: requests to this path are not placed")
    document = await read_json(request)
    router = request.app[PARTS].router
    hints = {name.lower(): value for name, value in request.headers.items()}
    document, _ = request.app[PARTS].conversations.expand(
        path, document, router.tenants.asking(hints).name
    )
    stripped = strip_request(of_path(path), document, request.app[PARTS].strip)
    routing = router.read(path, hints, stripped.body, request.content_length or 0)
    return json_response({**router.explain(routing), "headers_stripped": stripped.headers})


async def read_json(request: web.Request) -> Any:
    """A request's parsed body. Raises BalancerError 400 if it is not JSON."""
    try:
        return orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise BalancerError(HTTPStatus.BAD_REQUEST, f"body: not valid JSON: {error}") from None


def json_response(document: Any, status: int = HTTPStatus.OK) -> web.Response:
    """`document` as a JSON response."""
    body = orjson.dumps(document)
    return web.Response(status=int(status), body=body, content_type="application/json")


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


ROUTES = (
    web.route("GET", "/sgl_ext/workers", show_workers),
    web.route("POST", "/sgl_ext/workers", add_worker),
    web.route("DELETE", "/sgl_ext/workers", drain_worker),
    web.route("GET", "/sgl_ext/divergences", show_divergences),
    web.route("GET", pin_mirror.PATH, show_pins),
    web.route("POST", "/sgl_ext/explain/{path:.+}", explain),
)
