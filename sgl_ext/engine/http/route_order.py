"""The order in which the engine's routes are asked: those that generate first.

SGLang has some ninety routes, asks one after the other whether a request is theirs, and does so
twice for its metrics.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.routing import BaseRoute, Match

from sgl_ext.protocols.registry import GENERATING_PATHS


def ask_first(routes: list[BaseRoute], paths: Collection[str] = GENERATING_PATHS) -> None:
    """Puts the routes of these paths before all others, where that changes no answer: if another
    route before them takes the same path, they stay."""
    first: list[BaseRoute] = []
    others: list[BaseRoute] = []
    for route in routes:
        path = getattr(route, "path", None)
        is_first = path in paths and not any(_takes(other, str(path)) for other in others)
        (first if is_first else others).append(route)
    routes[:] = first + others


def _takes(route: BaseRoute, path: str) -> bool:
    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": []}
    return route.matches(scope)[0] is not Match.NONE
