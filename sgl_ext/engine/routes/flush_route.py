"""`POST /flush_cache?timeout=SECONDS`: empties the cache once no request runs or waits.

SGLang flushes an idle engine alone, and an engine still finishes a request whose answer was sent.
So a flush waits for a short time unless the caller states another one. An engine that does not
become idle answers 409 with the requests that it still has.
"""

from http import HTTPStatus
from itertools import islice
from math import inf

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from sgl_ext.engine import sglang_api

PATH = "/flush_cache"
WAIT_S = 5.0
LIMIT_S = 60.0
_MOST_NAMED = 8


def flush_route() -> Route:
    """The route, in place of SGLang's and with its access level."""
    flush._auth_level = sglang_api.AuthLevel.ADMIN_OPTIONAL  # type: ignore[attr-defined]
    return Route(PATH, flush, methods=["GET", "POST"])


async def flush(request: Request) -> Response:
    """Flushes, or answers 409."""
    wait_s = _wait_s(request.query_params.get("timeout"))
    if wait_s is None:
        message = f"timeout: a number of seconds from 0 to {LIMIT_S:g} is expected"
        return JSONResponse({"error": {"message": message}}, HTTPStatus.BAD_REQUEST)
    manager = sglang_api.get_global_state().tokenizer_manager
    result = await manager.flush_cache(timeout_s=wait_s)
    if result.success:
        return PlainTextResponse("Cache flushed.\n")
    names = [str(name) for name in islice(manager.rid_to_state, _MOST_NAMED)]
    pending = len(manager.rid_to_state)
    message = (
        f"the cache was not flushed within {wait_s:g} s; pending requests: {pending}. "
        f"{result.message or 'Wait for them or abort them.'}"
    )
    error = {"message": message, "pending": pending, "requests": names}
    return JSONResponse({"error": error}, HTTPStatus.CONFLICT)


def _wait_s(text: str | None) -> float | None:
    """How long to wait; None if `text` states no time that is allowed."""
    try:
        wait_s = WAIT_S if text is None else float(text)
    except ValueError:
        wait_s = inf
    return wait_s if 0 <= wait_s <= LIMIT_S else None
