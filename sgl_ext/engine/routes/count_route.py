"""`POST /v1/responses/input_tokens`: the prompt tokens of the same request to `/v1/responses`.

SGLang has no such path, and takes its name for the id of a response. A request with the body goes
up to its generation, so its prompt is counted that the same request has.
"""

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.dry_run import convert
from sgl_ext.engine.sglang_http_types import GenerateReqInput
from sgl_ext.protocols.responses import COUNT_RESPONSE, RESPONSES

# Nothing is generated, streamed or stored.
_INSTEAD = {"stream": False, "store": False, "background": False}


def count_route() -> Route:
    """The route."""

    async def count(request: Request) -> Response:
        try:
            body = orjson.loads(await request.body())
        except orjson.JSONDecodeError as error:
            return _error(f"body: not valid JSON: {error}")
        if not isinstance(body, dict):
            return _error("body: must be a JSON object")
        manager = sglang_api.get_global_state().tokenizer_manager
        asked = {"model": manager.served_model_name, **body, **_INSTEAD}
        dry_run = await convert(request.app, RESPONSES.paths[0], request.scope["headers"], asked)
        if dry_run.request is None:
            return Response(dry_run.answer, dry_run.status, media_type="application/json")
        tokens = _tokens_of(dry_run.request, manager.tokenizer)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    return Route(COUNT_RESPONSE.paths[0], count, methods=["POST"])


def _tokens_of(request: GenerateReqInput, tokenizer: Any) -> int:
    if request.input_ids is not None:
        return len(request.input_ids)
    return len(tokenizer.encode(request.text))


def _error(message: str) -> JSONResponse:
    """An error; the error middleware gives it its protocol's shape."""
    return JSONResponse({"error": {"message": message}}, 400)
