"""`GET /sgl_ext/events`: the prefix events of the engine's data-parallel rank 0, or `?rank=N`."""

from collections.abc import Callable, Sequence
from http import HTTPStatus

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from sgl_ext.engine.http.event_broadcaster import PATH, SUBSCRIBERS_PATH, EventBroadcaster


def event_routes(
    broadcasters: Sequence[EventBroadcaster], subscriber_count: Callable[[], int]
) -> list[Route]:
    """The routes of the streams, one for each rank, and of the number of their readers."""

    async def show_subscribers(_: Request) -> JSONResponse:
        # A balancer reads an engine that drains until the last answer has come: with 0 it may end.
        return JSONResponse({"subscribers": subscriber_count()})

    return [
        Route(PATH, _Streams(broadcasters), methods=["GET"]),
        Route(SUBSCRIBERS_PATH, show_subscribers, methods=["GET"]),
    ]


class _Streams:
    """The ASGI application of all streams."""

    def __init__(self, broadcasters: Sequence[EventBroadcaster]) -> None:
        self._by_rank = {str(each.rank): each for each in broadcasters}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rank = QueryParams(scope["query_string"]).get("rank", "0")
        stream = self._by_rank.get(rank)
        if stream is None:
            message = f"rank: this engine has the ranks 0 to {len(self._by_rank) - 1}"
            error = JSONResponse({"error": {"message": message}}, HTTPStatus.NOT_FOUND)
            await error(scope, receive, send)
        else:
            await stream(scope, receive, send)
