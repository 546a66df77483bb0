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
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from sgl_ext.balancer.admin.engine_metrics import EngineMetrics
from sgl_ext.balancer.admin.operations import (
    OPERATION_ROUTES,
    SERVICES,
    hints_in,
    json_response,
    to_all,
    to_holder,
)
from sgl_ext.balancer.admin.state import STATE_ROUTES, STATES, States
from sgl_ext.balancer.conversations import contexts
from sgl_ext.balancer.http.upstream import ConnectionPool, UpstreamConnection
from sgl_ext.balancer.relay.services import Services, error_response
from sgl_ext.balancer.routing.models import ModelPool, Models
from sgl_ext.limits.bounds import MAX_HEAD_BYTES
from sgl_ext.protocols import models as shapes
from sgl_ext.protocols import request_ids, routes
from sgl_ext.protocols.errors import BalancerError, bad_field, internal_error, method_not_allowed
from sgl_ext.protocols.routes import (
    CONTEXTS,
    RESPONSE,
    UI,
    is_service_beside_responses,
    not_found,
)

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
            *CONVERSATION_ROUTES,
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
        try:
            await loop.connect_accepted_socket(server, theirs)
            _, connection = await loop.create_unix_connection(
                lambda: UpstreamConnection(self), sock=ours
            )
        except BaseException:  # a client that leaves cancels this
            ours.close()
            raise
        return connection


async def health(request: web.Request) -> web.Response:
    """200 if at least one engine is ready, 503 otherwise and while draining; lists all engines.
    With fewer than there should be, the status is "degraded".

    ready: whether each process of this balancer finds the engine ready.
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
                "ready": services.workers.is_ready_in_all(w),
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


# The list of models of a balancer that has several names for them: models, adapters, aliases.
#
# GET /v1/models          all, each with its window, in OpenAI's shape or Anthropic's
# GET /v1/models/NAME     the one that a request of this name goes to
# GET /api/tags           all, in Ollama's shape
#
# With one model and no alias, an engine answers these.

_BEGAN = int(time.time())


async def show_list(request: web.Request) -> web.Response:
    cards = [*_cards(request.app[SERVICES].models)]
    if shapes.ANTHROPIC_HEADER not in request.headers:
        found = [shapes.openai_model(*each) for each in cards]
        return json_response({"object": "list", "data": found})
    query = request.query
    limit = shapes.page_limit(query.get("limit"))
    if limit is None:
        raise bad_field("limit", f"must be a number from 1 to {shapes.MOST_ON_A_PAGE}")
    page = shapes.anthropic_page(
        [shapes.anthropic_model(*each) for each in cards],
        after_id=query.get("after_id"),
        before_id=query.get("before_id"),
        limit=limit,
    )
    return json_response(page)


async def show_one(request: web.Request) -> web.Response:
    models, name = request.app[SERVICES].models, request.match_info["model"]
    pool = models.named(name)
    is_anthropic = shapes.ANTHROPIC_HEADER in request.headers
    shape = shapes.anthropic_model if is_anthropic else shapes.openai_model
    return json_response(shape(_card(name, pool), pool.window_tokens))


async def show_tags(request: web.Request) -> web.Response:
    cards = _cards(request.app[SERVICES].models)
    return json_response({"models": [shapes.ollama_model(card) for card, _ in cards]})


def _cards(models: Models) -> Iterator[tuple[dict[str, Any], int | None]]:
    """The card and the window of each name that stands for itself, not of patterns."""
    for pool in models.listed:
        yield _card(pool.name, pool), pool.window_tokens
        for name in pool.adapters:
            yield _card(name, pool), pool.window_tokens
    for name in models.exact_aliases:
        if (meant := models.find(name)) is not None:
            yield _card(name, meant), meant.window_tokens


def _card(name: str, pool: ModelPool) -> dict[str, Any]:
    card = {"id": name, "object": "model", "created": _BEGAN, "owned_by": "sglang", "root": name}
    return card | {"parent": pool.name if name != pool.name else None}


MODEL_ROUTES = (
    web.route("GET", shapes.PATH, show_list),
    web.route("GET", f"{shapes.PATH}/{{model:.+}}", show_one),
    web.route("GET", shapes.TAGS_PATH, show_tags),
)


# Clients show and delete their stored responses and contexts; a tenant sees only its own.
#
# POST   /v1/contexts                      registers a context, or renews it
# GET    /v1/contexts                      ?limit=1..100 (20), ?after=ID; by id
# GET    /v1/contexts/{id}                 its blocks; with their content if ?content=true
# DELETE /v1/contexts/{id}
# GET    /v1/responses/{id}                a stored response, or one of an engine
# DELETE /v1/responses/{id}
# POST   /v1/responses/{id}/cancel         only a response of an engine
# GET    /v1/responses/{id}/input_items    ?order=asc|desc (desc), ?limit=1..100 (20), ?after=ID

_MAX_LIMIT = 100


async def register(request: web.Request) -> web.Response:
    services, tenant = request.app[SERVICES], _tenant(request)
    registration = await services.bodies.read_registration(tenant, await request.read())
    return json_response(await services.bodies.conversations.register_context(tenant, registration))


async def list_contexts(request: web.Request) -> web.Response:
    store, after = request.app[SERVICES].bodies.conversations, request.query.get("after", "")
    if after and not contexts.ID.match(after):
        raise bad_field("after", "must be the id of a context")
    listed, has_more = await store.list_contexts(_tenant(request), after, _limit(request))
    ids = [context["context_id"] for context in listed]
    return json_response(_page(listed, ids, has_more))


async def show_context(request: web.Request) -> web.Response:
    wanted = request.query.get("content", "false")
    if wanted not in ("true", "false"):
        raise bad_field("content", f"must be true or false, not {wanted[:40]!r}")
    store, id = request.app[SERVICES].bodies.conversations, request.match_info["context"]
    shown = await store.context(_tenant(request), id, with_content=wanted == "true")
    return json_response(shown)


async def delete_context(request: web.Request) -> web.Response:
    id = request.match_info["context"]
    await request.app[SERVICES].bodies.conversations.delete_context(_tenant(request), id)
    return json_response({"context_id": id, "object": "context.deleted", "deleted": True})


async def show_response(request: web.Request) -> web.Response:
    found = await request.app[SERVICES].bodies.conversations.response(
        _tenant(request), _id(request)
    )
    if found is not None:
        return json_response(found)
    return await _ask_holder(request)


async def cancel_response(request: web.Request) -> web.Response:
    return await _ask_holder(request)


async def _ask_holder(request: web.Request) -> web.Response:
    """The answer of the engine that has the response."""
    await _require_owner(request)
    answer = await to_holder(request)
    # Engines without a response store answer 400: for the client that is "not found", too.
    if answer.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND):
        raise _not_found(_id(request))
    return answer


async def delete_response(request: web.Request) -> web.Response:
    store = request.app[SERVICES].bodies.conversations
    if not await store.delete_response(_tenant(request), _id(request)):
        raise _not_found(_id(request))
    return json_response({"id": _id(request), "object": "response.deleted", "deleted": True})


async def list_input_items(request: web.Request) -> web.Response:
    items = await request.app[SERVICES].bodies.conversations.input_items(
        _tenant(request), _id(request)
    )
    if items is None:
        raise _not_found(_id(request))
    order, limit = request.query.get("order", "desc"), _limit(request)
    if order not in ("asc", "desc"):
        raise bad_field("order", "must be asc or desc")
    if order == "desc":
        items.reverse()
    after = request.query.get("after")
    if after is not None:
        at = next((k for k, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise bad_field("after", "must be the id of an item of this response")
        items = items[at + 1 :]
    shown = items[:limit]
    ids = [item["id"] for item in shown]
    return json_response(_page(shown, ids, len(shown) < len(items)))


def _limit(request: web.Request) -> int:
    limit = request.query.get("limit", "20")
    is_number = limit.isascii() and limit.isdigit() and len(limit) <= len(str(_MAX_LIMIT))
    if not is_number or not 1 <= int(limit) <= _MAX_LIMIT:
        raise bad_field("limit", f"must be 1 to {_MAX_LIMIT}")
    return int(limit)


def _page(shown: list[Any], ids: list[str], has_more: bool) -> dict[str, Any]:
    """A page of a list in OpenAI's form."""
    page = {"object": "list", "data": shown, "has_more": has_more}
    return {**page, "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}


def _tenant(request: web.Request) -> str:
    return request.app[SERVICES].tenants.of_headers(hints_in(request)).name


async def _require_owner(request: web.Request) -> None:
    """Raises BalancerError 404 if a tenant requests another tenant's response of an engine.

    Engines show and cancel a response for everybody who knows its id.
    """
    tenant, store = _tenant(request), request.app[SERVICES].bodies.conversations
    if tenant and not await store.is_in_background(tenant, _id(request)):
        raise _not_found(_id(request))


def _id(request: web.Request) -> str:
    """The id in a request's path. Raises BalancerError 404 if it is the name of a service."""
    if is_service_beside_responses(request.path):
        raise BalancerError(HTTPStatus.NOT_FOUND, not_found(request.method, request.path))
    return request.match_info["response"]


def _not_found(id: str) -> BalancerError:
    return BalancerError(HTTPStatus.NOT_FOUND, f"Response with id '{id}' not found.")


CONVERSATION_ROUTES = (
    web.route("POST", CONTEXTS, register),
    web.route("GET", CONTEXTS, list_contexts),
    web.route("GET", f"{CONTEXTS}/{{context}}", show_context),
    web.route("DELETE", f"{CONTEXTS}/{{context}}", delete_context),
    web.route("GET", RESPONSE, show_response),
    web.route("DELETE", RESPONSE, delete_response),
    web.route("GET", f"{RESPONSE}/input_items", list_input_items),
    web.route("POST", f"{RESPONSE}/cancel", cancel_response),
)
