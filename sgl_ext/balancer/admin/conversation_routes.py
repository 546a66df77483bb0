"""Clients show and delete their stored responses and contexts; a tenant sees only its own.

POST   /v1/contexts                      registers a context, or renews it
GET    /v1/contexts                      ?limit=1..100 (20), ?after=ID; by id
GET    /v1/contexts/{id}                 its blocks; with their content if ?content=true
DELETE /v1/contexts/{id}
GET    /v1/responses/{id}                a stored response, or one of an engine
DELETE /v1/responses/{id}
POST   /v1/responses/{id}/cancel         only a response of an engine
GET    /v1/responses/{id}/input_items    ?order=asc|desc (desc), ?limit=1..100 (20), ?after=ID
"""

from http import HTTPStatus
from typing import Any

from aiohttp import web

from sgl_ext.balancer.admin.operations import SERVICES, hints_in, json_response, to_holder
from sgl_ext.balancer.conversations import contexts
from sgl_ext.protocols.errors import BalancerError, bad_field
from sgl_ext.protocols.routes import (
    CONTEXTS,
    RESPONSE,
    is_service_beside_responses,
    not_found,
)

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


ROUTES = (
    web.route("POST", CONTEXTS, register),
    web.route("GET", CONTEXTS, list_contexts),
    web.route("GET", f"{CONTEXTS}/{{context}}", show_context),
    web.route("DELETE", f"{CONTEXTS}/{{context}}", delete_context),
    web.route("GET", RESPONSE, show_response),
    web.route("DELETE", RESPONSE, delete_response),
    web.route("GET", f"{RESPONSE}/input_items", list_input_items),
    web.route("POST", f"{RESPONSE}/cancel", cancel_response),
)
