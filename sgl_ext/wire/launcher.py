"""What a node's launcher, or the process that keeps a fleet, answers its balancer.

GET  /children   the engines, as `EngineRow`s
POST /restart    begins a restart;  GET /restart  the last one     } documents for the client of
POST /reload     reads the settings again                          } the balancer's admin API
"""

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

import msgspec

CHILDREN, RESTART, RELOAD = "/children", "/restart", "/reload"


class ExitRow(TypedDict):
    """When and why a process ended."""

    time_s: float
    cause: str


class EngineRow(TypedDict):
    """An engine that a launcher keeps.

    state: "ready", "starting", "draining" or "ended". stage: of its start, and progress in it, 0 to
    1; None if that is not known. restarts: how often it was started again. crashes: how often it
    ended without being stopped; last_exit: when it did so last, by the wall clock, and why.
    """

    name: str
    url: str
    state: str
    stage: NotRequired[str]
    progress: NotRequired[float | None]
    restarts: NotRequired[int]
    crashes: NotRequired[int]
    last_exit: NotRequired[ExitRow | None]


class _Engines(msgspec.Struct):
    children: list[EngineRow]


def engines_document(rows: Sequence[EngineRow]) -> dict[str, Any]:
    """The JSON document of an answer about the engines."""
    return {"children": [*rows]}


def engines_in(document: Any) -> list[EngineRow]:
    """Raises ValueError if the document is malformed. Unknown fields are ignored."""
    return msgspec.convert(document, _Engines).children
