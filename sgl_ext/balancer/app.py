"""The balancer as an aiohttp application: its steps in one list, its routes in one table."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus

import aiohttp
import orjson
from aiohttp import web

from sgl_ext.balancer import routes
from sgl_ext.balancer.errors import BalancerError, Protocol, error_body
from sgl_ext.balancer.fanout import FanOut
from sgl_ext.balancer.metrics import Metrics
from sgl_ext.balancer.proxy import ClientGone, Proxy, route_of
from sgl_ext.balancer.workers import Workers
from sgl_ext.config import BalancerConfig
from sgl_ext.requests.headers import HeaderStrip

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_UNGUARDED = {("GET", "/health"), ("HEAD", "/health"), ("GET", "/"), ("HEAD", "/")}
# SGLang closes an idle connection after 5 s; ours must go first, or a request races the close.
_KEEPALIVE_S = 4.0


def make_app(config: BalancerConfig) -> web.Application:
    """The whole balancer. Workers are probed from the moment it starts."""
    metrics = Metrics()
    app = web.Application(
        client_max_size=config.max_body_bytes,
        middlewares=[answer_errors(metrics), require_key(config.read_api_key())],
    )

    async def run_workers(_: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            workers = Workers(config.workers, metrics)
            proxy = Proxy(session, workers, metrics, HeaderStrip(config.strip_headers))
            app[PARTS] = Parts(workers, proxy, FanOut(session, workers), metrics)
            await workers.probe(session)
            probing = asyncio.create_task(workers.probe_forever(session))
            yield
            probing.cancel()
            with suppress(asyncio.CancelledError):
                await probing

    app.cleanup_ctx.append(run_workers)
    add_routes(app)
    return app


class Parts:
    """What the handlers of one application share."""

    def __init__(self, workers: Workers, proxy: Proxy, fan_out: FanOut, metrics: Metrics) -> None:
        self.workers = workers
        self.proxy = proxy
        self.fan_out = fan_out
        self.metrics = metrics


PARTS = web.AppKey("parts", Parts)


def add_routes(app: web.Application) -> None:
    """Every path the balancer answers; all else is 404."""
    add = app.router.add_route
    add("GET", "/", root)
    add("HEAD", "/", root)
    add("GET", "/health", health)
    add("HEAD", "/health", health)
    add("GET", "/metrics", show_metrics)
    for path in routes.PLACED:
        add("POST", path, placed)
    for path in routes.ANY_GET:
        add("GET", path, to_any)
    for path in routes.ANY_POST:
        add("POST", path, to_any)
    for path in routes.SOUGHT_GET:
        add("GET", path, to_holder)
    for path in routes.SOUGHT_POST:
        add("POST", path, to_holder)
    for path in routes.FANNED_OUT:
        add("POST", path, to_all)
        add("GET", path, to_all)
    for path in routes.FANNED_OUT_GET:
        add("GET", path, to_all)


async def root(_: web.Request) -> web.Response:
    """Clients knock here first to see whether anyone is in."""
    return web.Response(text="sgl-ext balancer\n")


async def health(request: web.Request) -> web.Response:
    """200 if at least one engine is ready, 503 otherwise; either way, who is."""
    workers = request.app[PARTS].workers
    status = 200 if workers.ready else 503
    document = {
        "status": "ok" if workers.ready else "no engine is ready",
        "workers": [
            {"url": w.url, "ready": w.ready, "in_flight": w.in_flight} for w in workers.all
        ],
    }
    return web.Response(status=status, body=orjson.dumps(document), content_type="application/json")


async def show_metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[PARTS].metrics.render(), content_type="text/plain")


async def placed(request: web.Request) -> web.StreamResponse:
    return await request.app[PARTS].proxy.placed(request)


async def to_any(request: web.Request) -> web.StreamResponse:
    return await request.app[PARTS].proxy.to_any(request)


async def to_all(request: web.Request) -> web.Response:
    return await request.app[PARTS].fan_out.to_all(request)


async def to_holder(request: web.Request) -> web.Response:
    return await request.app[PARTS].fan_out.to_holder(request)


def answer_errors(metrics: Metrics) -> Callable[..., Awaitable[web.StreamResponse]]:
    """The outermost step: a failure becomes an answer in the caller's protocol; all are counted."""

    @web.middleware
    async def step(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except BalancerError as error:
            response = _answer(request, error.status, error.message, error.retry_after_s)
        except web.HTTPRequestEntityTooLarge:
            limit = request.client_max_size
            response = _answer(request, 413, f"body: larger than {limit} bytes")
        except web.HTTPException as error:
            status = HTTPStatus(error.status)
            response = _answer(request, status, f"{request.method} {request.path}: {status.phrase}")
        except (asyncio.CancelledError, ClientGone):
            metrics.client_gone.inc()
            raise
        except Exception:
            log.exception("a request failed inside the balancer")
            response = _answer(request, 500, "Internal error in the balancer.")
        metrics.requests.labels(route_of(request), response.status).inc()
        return response

    return step


def require_key(key: str | None) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Lets a request through if it carries the key, as OpenAI's clients send it or Anthropic's."""
    expected = None if key is None else key.encode()

    @web.middleware
    async def step(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected is None or (request.method, request.path) in _UNGUARDED:
            return await handler(request)
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        offered = bearer or request.headers.get("x-api-key", "")
        if hmac.compare_digest(offered.encode("utf-8", "surrogateescape"), expected):
            return await handler(request)
        raise BalancerError(HTTPStatus.UNAUTHORIZED, "Invalid or missing API key.")

    return step


def _answer(
    request: web.Request, status: int, message: str, retry_after_s: int | None = None
) -> web.Response:
    body = error_body(Protocol.of(request.path), int(status), message)
    headers = {}
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    elif status < 500:
        # Anthropic's and OpenAI's clients obey it; without it they repeat even a 401.
        headers["x-should-retry"] = "false"
    return web.Response(
        status=int(status), body=body, content_type="application/json", headers=headers
    )
