"""The control plane as an aiohttp application: health, metrics, and requests for all workers.

Requests come through the data path, which has checked their keys and their sizes. Requests for
one worker never come here.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection
from http import HTTPStatus

from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from sgl_ext.balancer.admin import conversation_routes, page
from sgl_ext.balancer.admin.engine_metrics import EngineMetrics
from sgl_ext.balancer.admin.operations import OPERATION_ROUTES, SERVICES, json_response, to_all
from sgl_ext.balancer.admin.state import STATE_ROUTES, STATES, States
from sgl_ext.balancer.http.upstream import ConnectionPool, UpstreamConnection
from sgl_ext.balancer.relay.services import Services, error_response
from sgl_ext.limits.bounds import MAX_HEAD_BYTES
from sgl_ext.protocols import request_ids, routes
from sgl_ext.protocols.errors import BalancerError, internal_error, method_not_allowed

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
            *STATE_ROUTES,
            *page.ROUTES,
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

    hung_s: how long an engine hangs that nobody stopped from outside; 0 if it does not.
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
                "hung_s": 0.0 if w.hung_s is None else now_s - w.hung_s,
            }
            for w in services.workers.all
        ],
    }
    return json_response(document, 200 if services.status == "ok" else 503)


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
