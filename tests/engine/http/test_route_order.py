"""Routes that are asked first: every request goes where it went before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Mount, Route

from sgl_ext.engine.http.route_order import ask_first

FIRST = frozenset({"/v1/messages", "/generate"})
ALL = ["/v1/messages", "/generate", "/health", "/v1/{name}", "/{any:path}", "/v1/messages/more"]


async def answer(_: Request) -> Response:
    return Response()


def taker(routes: list[BaseRoute], method: str, path: str) -> BaseRoute | None:
    """Whose a request is, as Starlette decides it."""
    partial = None
    for route in routes:
        scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return route
        partial = route if match is Match.PARTIAL and partial is None else partial
    return partial


made = st.builds(
    lambda path, method: Route(path, answer, methods=[method]),
    st.sampled_from(ALL),
    st.sampled_from(["GET", "POST"]),
) | st.just("/v1").map(lambda path: Mount(path, routes=[]))


@given(st.lists(made, max_size=8))
def test_every_request_goes_where_it_went_before(routes: list[BaseRoute]) -> None:
    asked = list(routes)
    ask_first(asked, FIRST)
    assert sorted(map(id, asked)) == sorted(map(id, routes))
    for path in [*ALL, "/v1/other", "/"]:
        for method in ("GET", "POST", "PUT"):
            assert taker(asked, method, path) is taker(routes, method, path)


def test_what_generates_is_asked_first() -> None:
    paths = ["/health", "/v1/{name}/more", "/v1/messages", "/docs", "/generate"]
    asked: list[BaseRoute] = [Route(path, answer) for path in paths]
    ask_first(asked, FIRST)
    assert [getattr(route, "path", "") for route in asked[:2]] == ["/v1/messages", "/generate"]
