"""JSON requests and responses of the control plane."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web

from sgl_ext.protocols.errors import BalancerError


async def read_json(request: web.Request) -> Any:
    """A request's parsed body. Raises BalancerError 400 if it is not JSON."""
    try:
        return orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise BalancerError(HTTPStatus.BAD_REQUEST, f"body: not valid JSON: {error}") from None


def json_response(document: Any, status: int = HTTPStatus.OK) -> web.Response:
    """`document` as a JSON response."""
    body = orjson.dumps(document)
    return web.Response(status=int(status), body=body, content_type="application/json")
