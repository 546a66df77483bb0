"""`/v1/pins`: lists the engine's pins, and deletes them.

GET     {"pins": [{"prefix", "segment", "tokens", "ttl_s", "left_s", "hits", "owner",
                   "session"}, ...]}
DELETE  ?prefix=HASH or ?session=ID   {"deleted": how many}

A request with `x-sgl-ext-owner` sees and deletes only the pins of that tenant.
"""

import asyncio
import time
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sgl_ext.engine.core.folder import Outbox
from sgl_ext.pin_mirror import PATH, PinMirror
from sgl_ext.requests.session import OWNER_HEADER

_TIMEOUT_S = 10.0
_POLL_S = 0.02


def pin_routes(pins: PinMirror, outbox: Outbox) -> list[Route]:
    """The routes, which answer from `pins` and send deletions to the scheduler."""

    async def show(request: Request) -> JSONResponse:
        owner = request.headers.get(OWNER_HEADER)
        return JSONResponse({"pins": pins.rows(time.monotonic(), owner)})

    async def delete(request: Request) -> JSONResponse:
        query = request.query_params
        prefix, session = query.get("prefix"), query.get("session")
        if not prefix and not session:
            return _error(HTTPStatus.BAD_REQUEST, "prefix or session: one of them must be given")
        named = pins.named(prefix, session, request.headers.get(OWNER_HEADER))
        if not named:
            return JSONResponse({"deleted": 0})
        outbox.unpin(named)
        for _ in range(int(_TIMEOUT_S / _POLL_S)):
            if not any(name in pins for name in named):
                return JSONResponse({"deleted": len(named)})
            await asyncio.sleep(_POLL_S)
        return _error(HTTPStatus.GATEWAY_TIMEOUT, "the scheduler did not delete them in time")

    return [Route(PATH, show, methods=["GET"]), Route(PATH, delete, methods=["DELETE"])]


def _error(status: HTTPStatus, message: str) -> JSONResponse:
    """An error; the error middleware gives it its protocol's shape."""
    return JSONResponse({"error": {"message": message}}, status)
