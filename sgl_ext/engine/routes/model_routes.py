"""`GET /v1/models` and `/v1/models/{id}`, in place of SGLang's: with the context window, and in
Anthropic's shape for its clients."""

import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sgl_ext.compat.error_shape import EngineError
from sgl_ext.engine import sglang_api
from sgl_ext.protocols.models import (
    ANTHROPIC_HEADER,
    PATH,
    anthropic_model,
    anthropic_page,
    openai_model,
)

# Anthropic's default and highest number of models on a page.
_PAGE, _MOST = 20, 1000
# When the engine was started: SGLang says the time of the request.
_CREATED = {"created": int(time.time())}


def model_routes() -> list[Route]:
    """The routes: the list, and one model."""
    return [
        Route(PATH, _list, methods=["GET"]),
        Route(f"{PATH}/{{model:path}}", _show, methods=["GET"]),
    ]


async def _list(request: Request) -> Response:
    if not _is_anthropic(request):
        return JSONResponse({"object": "list", "data": await _models(openai_model)})
    query = request.query_params
    limit = query.get("limit", str(_PAGE))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:5]) <= _MOST):
        message = f"limit: must be a number from 1 to {_MOST}"
        return _error(EngineError(400, message, "limit"))
    page = anthropic_page(
        await _models(anthropic_model),
        after_id=query.get("after_id"),
        before_id=query.get("before_id"),
        limit=int(limit),
    )
    return JSONResponse(page)


async def _show(request: Request) -> Response:
    name = request.path_params["model"]
    models = await _models(anthropic_model if _is_anthropic(request) else openai_model)
    for model in models:
        if model["id"] == name:
            return JSONResponse(model)
    message = f"model: {name} does not exist; GET {PATH} lists those that do"
    return _error(EngineError(404, message, "model"))


async def _models(shape: Callable[[dict[str, Any], int], dict[str, Any]]) -> list[dict[str, Any]]:
    """The model, and the LoRA adapters that are loaded, which have the model's window."""
    window_tokens = sglang_api.get_global_state().tokenizer_manager.model_config.context_len
    cards = (await sglang_api.available_models()).data
    return [shape(card.model_dump() | _CREATED, window_tokens) for card in cards]


def _is_anthropic(request: Request) -> bool:
    return ANTHROPIC_HEADER in request.headers


def _error(error: EngineError) -> Response:
    """An error, which the middleware then shapes."""
    document = {"error": {"message": error.message, "param": error.param}}
    return JSONResponse(document, error.status)
