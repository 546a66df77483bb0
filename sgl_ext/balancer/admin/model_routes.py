"""The list of models of a balancer that has several names for them: models, adapters, aliases.

GET /v1/models          all, each with its window, in OpenAI's shape or Anthropic's
GET /v1/models/NAME     the one that a request of this name goes to
GET /api/tags           all, in Ollama's shape

With one model and no alias, an engine answers these.
"""

import time
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from sgl_ext.balancer.admin.operations import SERVICES, json_response
from sgl_ext.balancer.routing.models import ModelPool, Models
from sgl_ext.protocols import models as shapes
from sgl_ext.protocols.errors import bad_field

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
