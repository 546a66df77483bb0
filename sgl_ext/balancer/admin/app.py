"""The control plane as an aiohttp application: health, metrics, and requests for all workers.

Requests come through the data path, which has checked their keys and their sizes. Requests for
one worker never come here.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import aiohttp
from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from sgl_ext import pin_mirror
from sgl_ext.balancer.admin import conversation_routes, worker_routes
from sgl_ext.balancer.admin.fanout import to_all
from sgl_ext.balancer.admin.json_io import json_response
from sgl_ext.balancer.admin.worker_routes import ROUTER, SESSION, STRIP
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.relay.services import error_response
from sgl_ext.balancer.routing.router import Router
from sgl_ext.protocols import routes
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.requests.headers import HeaderStrip

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
METRICS = web.AppKey("metrics", Metrics)
PAGE: web.AppKey[Callable[[], bytes]] = web.AppKey("page")
_ANY_SIZE = 1 << 62


def make_app(
    router: Router,
    strip: HeaderStrip,
    session: aiohttp.ClientSession,
    metrics: Metrics,
    page: Callable[[], bytes],
) -> web.Application:
    """The application; `page` renders the metrics. The data path limits the sizes of requests."""
    app = web.Application(client_max_size=_ANY_SIZE, middlewares=[answer_errors])
    app[ROUTER] = router
    app[STRIP] = strip
    app[METRICS] = metrics
    app[PAGE] = page
    app[SESSION] = session
    add_routes(app)
    return app


def add_routes(app: web.Application) -> None:
    """Adds every path of the control plane."""
    add = app.router.add_route
    for method in ("GET", "HEAD"):
        add(method, "/", root)
        add(method, "/health", health)
    add("GET", "/metrics", show_metrics)
    worker_routes.add_routes(app)
    conversation_routes.add_routes(app)
    add("DELETE", pin_mirror.PATH, to_all)
    add("DELETE", routes.PREFILL, to_all)
    for path in routes.FANNED_OUT:
        add("POST", path, to_all)
    for path in (*routes.FANNED_OUT, *routes.FANNED_OUT_GET):
        add("GET", path, to_all)


async def root(_: web.Request) -> web.Response:
    """Some clients request this first, to see whether a server answers."""
    return web.Response(text="sgl-ext balancer\n")


async def health(request: web.Request) -> web.Response:
    """200 if at least one engine is ready, 503 otherwise; lists all engines."""
    workers = request.app[ROUTER].workers
    status = 200 if workers.ready else 503
    document = {
        "status": "ok" if workers.ready else "no engine is ready",
        "workers": [
            {"url": w.url, "ready": w.ready, "in_flight": w.in_flight + w.peer_load.in_flight}
            for w in workers.all
        ],
    }
    return json_response(document, status)


async def show_metrics(request: web.Request) -> web.Response:
    headers = {"content-type": CONTENT_TYPE_PLAIN_0_0_4}
    return web.Response(body=request.app[PAGE](), headers=headers)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost middleware: turns a failure into an answer in the caller's protocol.

    It counts every request but health checks: one that finds no engine ready did not fail.
    """
    try:
        response = await handler(request)
    except BalancerError as error:
        response = _answer(request, error)
    except web.HTTPException as http_error:
        status = HTTPStatus(http_error.status)
        message = f"{request.method} {request.path}: {status.phrase}"
        response = _answer(request, BalancerError(status, message))
    except Exception:
        log.exception("a request failed inside the balancer")
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        response = _answer(request, BalancerError(status, "Internal error in the balancer."))
    if request.path != "/health":
        request.app[METRICS].requests.counts[route_of(request), response.status] += 1
    return response


def _answer(request: web.Request, error: BalancerError) -> web.Response:
    status, reason, lines, body = error_response(request.path, error)
    headers = dict(line.split(": ", 1) for line in lines.decode().splitlines())
    return web.Response(status=status, reason=reason.decode(), body=body, headers=headers)


def route_of(request: web.Request) -> str:
    """The route's pattern: ids in a path must not become labels."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"
