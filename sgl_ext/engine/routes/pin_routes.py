"""`/v1/pins`: lists the engine's pins, and deletes them.

GET     {"pins": [{"prefix", "segment", "tokens", "ttl_s", "left_s", "hits", "owner",
                   "session", "rank"}, ...]}
DELETE  ?prefix=HASH or ?session=ID   {"deleted": how many}

A request with `x-sgl-ext-owner` sees and deletes only the pins of that tenant. `rank` is the
data-parallel rank whose cache has the pin; DELETE with `x-sgl-ext-rank` deletes at that rank alone.
"""

import asyncio
import time
from collections.abc import Sequence
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sgl_ext.engine.core.folder import Outbox
from sgl_ext.pin_mirror import PATH, PinMirror
from sgl_ext.reading.client import OWNER_HEADER, RANK_HEADER

_TIMEOUT_S = 10.0
_POLL_S = 0.02


def pin_routes(pins: Sequence[PinMirror], outboxes: Sequence[Outbox]) -> list[Route]:
    """The routes, which answer from the pins of each rank and send deletions to its scheduler."""

    async def show(request: Request) -> JSONResponse:
        owner = request.headers.get(OWNER_HEADER)
        now_s = time.monotonic()
        rows = [r | {"rank": n} for n, each in enumerate(pins) for r in each.rows(now_s, owner)]
        return JSONResponse({"pins": rows})

    async def delete(request: Request) -> JSONResponse:
        query = request.query_params
        prefix, session = query.get("prefix"), query.get("session")
        if not prefix and not session:
            return _error(HTTPStatus.BAD_REQUEST, "prefix or session: one of them must be given")
        owner, rank = request.headers.get(OWNER_HEADER), request.headers.get(RANK_HEADER)
        named = [
            [] if rank not in (None, str(number)) else each.named(prefix, session, owner)
            for number, each in enumerate(pins)
        ]
        for names, outbox in zip(named, outboxes, strict=True):
            if names:
                outbox.unpin(names)
        for _ in range(int(_TIMEOUT_S / _POLL_S)):
            if not any(n in each for names, each in zip(named, pins, strict=True) for n in names):
                return JSONResponse({"deleted": sum(map(len, named))})
            await asyncio.sleep(_POLL_S)
        return _error(HTTPStatus.GATEWAY_TIMEOUT, "the scheduler did not delete them in time")

    return [Route(PATH, show, methods=["GET"]), Route(PATH, delete, methods=["DELETE"])]


def _error(status: HTTPStatus, message: str) -> JSONResponse:
    """An error; the error middleware gives it its protocol's shape."""
    return JSONResponse({"error": {"message": message}}, status)
