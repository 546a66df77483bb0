"""`GET /ready`: 200 if the engine takes requests, else 503; 504 if it has been stopped for a while.

A scheduler that is stopped (SIGSTOP, a frozen container) sends nothing, as does one in a long
prefill, so from outside they look alike for a minute. The state of its process shows it at once.
After STOPPED_S the balancer gives the requests that it has there to other engines.
"""

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import psutil
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sgl_ext.engine import sglang_api
from sgl_ext.reading.client import RANKS_HEADER, ROLE_HEADER
from sgl_ext.settings.reloading import SETTINGS_HEADER

PATH = "/ready"
STOPPED_S = 3.0


def ready_route(
    settings_number: Callable[[], int] = lambda: 0, ranks: int = 1, role: str = ""
) -> Route:
    """The route, in place of SGLang's. settings_number: the version of changed settings. ranks: how
    many data-parallel ranks there are. role: as of ROLE_HEADER."""
    readiness = Readiness()

    async def ready(request: Request) -> Response:
        manager = sglang_api.get_global_state().tokenizer_manager
        status = readiness.status(takes_requests=manager.is_ready())
        headers = {SETTINGS_HEADER: str(settings_number()), RANKS_HEADER: str(ranks)}
        if role:
            headers[ROLE_HEADER] = role
        return Response(None, status, headers)

    return Route(PATH, ready, methods=["GET"])


class Readiness:
    """children: lists the engine's other processes. SGLang ends the engine if one of them ends."""

    def __init__(
        self,
        children: Callable[[], list[Any]] = lambda: psutil.Process().children(recursive=True),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._list = children
        self._clock = clock
        self._children: list[Any] = []
        self._since_s: float | None = None

    def status(self, *, takes_requests: bool) -> HTTPStatus:
        """The status to answer. takes_requests: what SGLang says."""
        if takes_requests and not self._children:  # listing them takes milliseconds
            self._children = self._list()
        if not any(map(_is_stopped, self._children)):
            self._since_s = None
            return HTTPStatus.OK if takes_requests else HTTPStatus.SERVICE_UNAVAILABLE
        now_s = self._clock()
        self._since_s = now_s if self._since_s is None else self._since_s
        is_long = now_s - self._since_s >= STOPPED_S
        return HTTPStatus.GATEWAY_TIMEOUT if is_long else HTTPStatus.SERVICE_UNAVAILABLE


def _is_stopped(process: Any) -> bool:
    """A process that a debugger traces is not: profilers stop it for a moment."""
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
