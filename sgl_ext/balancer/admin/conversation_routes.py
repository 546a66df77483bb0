"""What clients see and manage of what is kept for them. A tenant sees its own, and no other's.

POST   /v1/contexts                      registers a context, or renews it
GET    /v1/contexts/{id}                 its blocks; ?content=true with their content
DELETE /v1/contexts/{id}
GET    /v1/responses/{id}                a stored response, or an engine's
DELETE /v1/responses/{id}
POST   /v1/responses/{id}/cancel         of an engine's
GET    /v1/responses/{id}/input_items    ?order=asc|desc (desc), ?limit=1..100 (20), ?after=ID
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web

from sgl_ext.balancer.admin.worker_routes import KEPT, ROUTER, read_json
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.protocols.routes import CONTEXTS, RESPONSE

_MOST_LISTED = 100

Ask = Callable[[web.Request], Awaitable[web.Response]]


def add_routes(app: web.Application, ask_engines: Ask) -> None:
    """Adds them to the control plane. `ask_engines` asks each engine in turn until one knows."""

    async def show_response(request: web.Request) -> web.Response:
        if (found := request.app[KEPT].response(_tenant(request), _id(request))) is not None:
            return _json(found)
        _require_own(request)
        answer = await ask_engines(request)
        # Engines that keep nothing say so with another status: for the client it is not there.
        if answer.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND):
            raise _not_found(_id(request))
        return answer

    async def cancel_response(request: web.Request) -> web.Response:
        _require_own(request)
        return await ask_engines(request)

    add = app.router.add_route
    add("POST", CONTEXTS, register)
    add("GET", f"{CONTEXTS}/{{context}}", show_context)
    add("DELETE", f"{CONTEXTS}/{{context}}", delete_context)
    add("GET", RESPONSE, show_response)
    add("DELETE", RESPONSE, delete_response)
    add("GET", f"{RESPONSE}/input_items", list_input_items)
    add("POST", f"{RESPONSE}/cancel", cancel_response)


async def register(request: web.Request) -> web.Response:
    return _json(request.app[KEPT].register(_tenant(request), await read_json(request)))


async def show_context(request: web.Request) -> web.Response:
    wanted = request.query.get("content", "false")
    if wanted not in ("true", "false"):
        message = f"content: must be true or false, not {wanted[:40]!r}"
        raise BalancerError(HTTPStatus.BAD_REQUEST, message)
    id = request.match_info["context"]
    return _json(request.app[KEPT].context(_tenant(request), id, with_content=wanted == "true"))


async def delete_context(request: web.Request) -> web.Response:
    id = request.match_info["context"]
    request.app[KEPT].delete_context(_tenant(request), id)
    return _json({"context_id": id, "object": "context.deleted", "deleted": True})


async def delete_response(request: web.Request) -> web.Response:
    if not request.app[KEPT].delete_response(_tenant(request), _id(request)):
        raise _not_found(_id(request))
    return _json({"id": _id(request), "object": "response.deleted", "deleted": True})


async def list_input_items(request: web.Request) -> web.Response:
    items = request.app[KEPT].input_items(_tenant(request), _id(request))
    if items is None:
        raise _not_found(_id(request))
    order, limit = request.query.get("order", "desc"), request.query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise _bad("order", "must be asc or desc")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit) <= _MOST_LISTED:
        raise _bad("limit", f"must be 1 to {_MOST_LISTED}")
    if order == "desc":
        items.reverse()
    after = request.query.get("after")
    if after is not None:
        at = next((k for k, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise _bad("after", "must be the id of an item of this response")
        items = items[at + 1 :]
    shown = items[: int(limit)]
    page = {"object": "list", "data": shown, "has_more": len(shown) < len(items)}
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    return _json({**page, "first_id": None, "last_id": None, **ends})


def _tenant(request: web.Request) -> str:
    headers = {name.lower(): value for name, value in request.headers.items()}
    return request.app[ROUTER].tenants.asking(headers).name


def _require_own(request: web.Request) -> None:
    """Raises BalancerError 404 if a tenant asks for an engine's response of another's.

    Engines show and cancel theirs for whoever knows the id, as may who is no tenant.
    """
    tenant = _tenant(request)
    if tenant and not request.app[KEPT].is_in_background(tenant, _id(request)):
        raise _not_found(_id(request))


def _id(request: web.Request) -> str:
    return request.match_info["response"]


def _not_found(id: str) -> BalancerError:
    return BalancerError(HTTPStatus.NOT_FOUND, f"Response with id '{id}' not found.")


def _bad(field: str, reason: str) -> BalancerError:
    return BalancerError(HTTPStatus.BAD_REQUEST, f"{field}: {reason}", param=field)


def _json(document: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(document), content_type="application/json")
