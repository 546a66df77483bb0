"""The control plane as an aiohttp application: health, metrics, and requests for all workers.

Requests come through the data path, which has checked their keys and their sizes. Requests for
one worker never come here.

The page at `/` and `/sgl_ext/ui` shows the live state. Its files are in `sgl_ext/balancer/ui` and
hold no data: what they show comes from `state.py`, with the rules of access that hold there. They
load nothing from elsewhere, and their policy makes the browser refuse it: a client's text that
became a script could not run, or send anything.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection
from functools import cache
from http import HTTPStatus
from pathlib import Path

from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from sgl_ext.balancer.admin import conversation_routes
from sgl_ext.balancer.admin.engine_metrics import EngineMetrics
from sgl_ext.balancer.admin.model_routes import MODEL_ROUTES
from sgl_ext.balancer.admin.operations import OPERATION_ROUTES, SERVICES, json_response, to_all
from sgl_ext.balancer.admin.state import STATE_ROUTES, STATES, States
from sgl_ext.balancer.http.upstream import ConnectionPool, UpstreamConnection
from sgl_ext.balancer.relay.services import Services, error_response
from sgl_ext.limits.bounds import MAX_HEAD_BYTES
from sgl_ext.protocols import request_ids, routes
from sgl_ext.protocols.errors import BalancerError, internal_error, method_not_allowed
from sgl_ext.protocols.routes import UI

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_ANY_SIZE = 1 << 62


def make_app(services: Services, interval_s: float = 1.0) -> web.Application:
    """The application. The data path limits the sizes of requests.

    interval_s: the time between two states of a live stream.
    """
    app = web.Application(client_max_size=_ANY_SIZE, middlewares=[answer_errors])
    app[SERVICES] = services
    app[STATES] = States(services, interval_s)
    engine_metrics = EngineMetrics(
        services.workers, services.session, services.metrics, services.launcher
    )
    to_all_workers = [
        ("DELETE", routes.PREFILL),
        *(("POST", path) for path in routes.FANNED_OUT),
        *(("GET", path) for path in routes.FANNED_OUT_GET),
    ]
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/live", live),
            web.get("/ready", ready),
            web.route("GET", "/metrics", show_metrics),
            web.route("GET", "/metrics/engines", engine_metrics.show),
            *OPERATION_ROUTES,
            *MODEL_ROUTES,
            *STATE_ROUTES,
            *PAGE_ROUTES,
            *conversation_routes.ROUTES,
            *(web.route(method, path, to_all) for method, path in to_all_workers),
        ]
    )
    return app


class ControlPool(ConnectionPool):
    """Connections to an application in this process, over socket pairs.

    To an exchange the application is a worker like any other, so that one client connection
    serves both planes with one key check and one set of limits. A socket pair has no address: only
    the balancer reaches the application. Call `start` before the first request.
    """

    def __init__(self, app: web.Application) -> None:
        super().__init__("http://balancer")
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            # The data path has limited the whole head.
            max_line_size=MAX_HEAD_BYTES,
            max_field_size=MAX_HEAD_BYTES,
            max_headers=MAX_HEAD_BYTES,
        )

    async def start(self) -> None:
        """Starts the application."""
        await self._runner.setup()

    async def stop(self) -> None:
        """Stops the application and closes its connections."""
        self.close()
        await self._runner.cleanup()

    async def _open(self) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        server = self._runner.server
        assert server is not None, "the application is not running"
        ours, theirs = socket.socketpair()
        await loop.connect_accepted_socket(server, theirs)
        _, connection = await loop.create_unix_connection(
            lambda: UpstreamConnection(self), sock=ours
        )
        return connection


async def health(request: web.Request) -> web.Response:
    """200 if at least one engine is ready, 503 otherwise and while draining; lists all engines.
    With fewer than there should be, the status is "degraded".

    is_drained: whether an operator took its requests away.
    hung_s: for how long an engine has hung without a stop from outside; 0 if it does not hang.
    """
    services = request.app[SERVICES]
    now_s = services.router.clock()
    document = {
        "status": services.status,
        "workers": [
            {
                "id": w.id,
                "url": w.url,
                "ready": w.ready,
                "in_flight": w.in_flight + w.peer_load.in_flight,
                "state": w.state,
                "is_drained": w.member.state == "drained",
                "hung_s": 0.0 if w.hung_s is None else now_s - w.hung_s,
            }
            for w in services.workers.all
        ],
    }
    return json_response(document, 200 if services.status in ("ok", "degraded") else 503)


async def live(_: web.Request) -> web.Response:
    """200 while the event loop runs, also while draining and without engines: a liveness probe
    must not end a process that a restart would not help."""
    return web.Response(text="live\n")


async def ready(request: web.Request) -> web.Response:
    """200 if a load balancer in front should send requests here; 503 with the reason otherwise."""
    services = request.app[SERVICES]
    reason = "draining" if services.draining else services.readiness.reason_against()
    return web.Response(text=f"{reason or 'ready'}\n", status=503 if reason else 200)


async def show_metrics(request: web.Request) -> web.Response:
    headers = {"content-type": CONTENT_TYPE_PLAIN_0_0_4}
    page = await asyncio.to_thread(request.app[SERVICES].whole.metrics_page)
    return web.Response(body=page, headers=headers)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost middleware: turns a failure into an answer in the caller's protocol.

    It counts every request but health checks: one that finds no engine ready did not fail.
    """
    try:
        if request.can_read_body and request.content_type != "application/json":
            raise BalancerError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"content-type: must be application/json, not {request.content_type!r}",
            )
        response = await handler(request)
    except BalancerError as error:
        response = _answer(request, error)
    except web.HTTPMethodNotAllowed as wrong:
        response = _answer(request, _wrong_method(request, wrong.allowed_methods))
    except web.HTTPNotFound:
        response = _answer(request, _no_path(request))
    except web.HTTPException as http_error:
        status = HTTPStatus(http_error.status)
        message = f"{request.method} {request.path}: {status.phrase}"
        response = _answer(request, BalancerError(status, message))
    except Exception:
        about = {"request_id": request.headers.get(request_ids.HEADER, "")}
        log.exception("a request failed in the balancer", extra=about)
        response = _answer(request, internal_error())
    if request.path not in routes.HEALTH:
        resource = request.match_info.route.resource
        # The route's pattern: ids in a path must not become labels.
        route = "unknown" if resource is None else resource.canonical
        request.app[SERVICES].metrics.requests.counts[route, response.status] += 1
    return response


def _no_path(request: web.Request) -> BalancerError:
    message = routes.not_found(request.method, request.path)
    return BalancerError(HTTPStatus.NOT_FOUND, message)


def _wrong_method(request: web.Request, allowed: Collection[str]) -> BalancerError:
    if routes.is_beside_responses(request.path):
        return _no_path(request)
    return method_not_allowed(request.method, request.path, allowed)


def _answer(request: web.Request, error: BalancerError) -> web.Response:
    request_id = request.headers.get(request_ids.HEADER, "")  # from the data path
    status, reason, lines, body = error_response(request.path, error, request_id)
    headers = dict(line.split(": ", 1) for line in lines.decode().splitlines())
    return web.Response(status=status, reason=reason.decode(), body=body, headers=headers)


_FOLDER = Path(__file__).parents[1] / "ui"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
    "vary": "accept",
}


async def root(request: web.Request) -> web.Response:
    """The page for a browser. Other clients request this first to see whether a server answers."""
    if "text/html" in request.headers.get("accept", ""):
        return _file("index.html")
    return web.Response(text="sgl-ext balancer\n", headers={"vary": "accept"})


async def show_page(_: web.Request) -> web.Response:
    return _file("index.html")


async def show_file(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    if name not in _files():
        raise web.HTTPNotFound
    return _file(name)


def _file(name: str) -> web.Response:
    headers = {**_HEADERS, "content-type": _TYPES[Path(name).suffix]}
    return web.Response(body=_files()[name], headers=headers)


@cache
def _files() -> dict[str, bytes]:
    """All files, read once."""
    return {each.name: each.read_bytes() for each in _FOLDER.iterdir() if each.suffix in _TYPES}


PAGE_ROUTES = (
    web.get("/", root),
    web.get(UI, show_page),
    web.get(f"{UI}/{{name}}", show_file),
)
