"""How the extension changes SGLang's HTTP server as a whole."""

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import zmq

from sgl_ext.engine import http_server
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.engine.http.event_broadcaster import PATH as EVENTS
from sgl_ext.engine.http.extension import HttpExtension
from sgl_ext.engine.http_server import AnswerMiddleware, InFlightMiddleware


class Status(Enum):
    Up = "Up"
    UnHealthy = "UnHealthy"


class Manager:
    gracefully_exit = False
    server_status = Status.Up


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The managers that have ended."""
    monkeypatch.setattr(http_server, "_SIGTERM_POLL_S", 0)
    return []


def ending(manager: Manager, ended: list[Any]) -> asyncio.Task[None]:
    async def end(this: Any) -> None:
        ended.append(this)

    return asyncio.create_task(http_server.await_sigterm(end, manager))  # type: ignore[arg-type]


async def pass_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_engine_begins_to_end_as_soon_as_sigterm_was_noted(
    ended: list[Any], extend: Callable[..., HttpExtension]
) -> None:
    extend()
    manager = Manager()
    waiting = ending(manager, ended)
    await pass_turns()
    assert not ended
    manager.gracefully_exit = True
    await waiting
    assert ended == [manager]


async def test_an_engine_ends_after_its_last_request_has_been_answered(
    ended: list[Any], extend: Callable[..., HttpExtension]
) -> None:
    extension, manager, go_on = extend(), Manager(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        raise ConnectionResetError

    counted = InFlightMiddleware(app, extension)
    paths = ("/v1/messages", EVENTS)
    requests = [
        asyncio.ensure_future(counted({"type": "http", "path": path}, None, None)) for path in paths
    ]
    manager.gracefully_exit = True
    await pass_turns()
    waiting = ending(manager, ended)
    await pass_turns()
    assert not ended
    go_on.set()
    await waiting
    assert ended == [manager]
    await asyncio.gather(*requests, return_exceptions=True)


async def test_an_engine_that_is_unhealthy_ends_with_its_requests(
    ended: list[Any], extend: Callable[..., HttpExtension]
) -> None:
    manager = Manager()
    manager.gracefully_exit, manager.server_status = True, Status.UnHealthy
    extend().in_flight = 1
    await ending(manager, ended)
    assert ended == [manager]


async def test_streams_of_events_keep_no_engine_from_ending(
    extend: Callable[..., HttpExtension],
) -> None:
    extension = extend()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert extension.in_flight == 0

    await InFlightMiddleware(app, extension)({"type": "http", "path": EVENTS}, None, None)


async def test_a_request_that_comes_too_late_is_refused_so_that_it_can_go_elsewhere(
    ended: list[Any], extend: Callable[..., HttpExtension]
) -> None:
    extension, manager, sent = extend(), Manager(), list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    manager.gracefully_exit = True
    await ending(manager, ended)
    scope = {"type": "http", "path": "/v1/messages", "headers": []}
    await InFlightMiddleware(app, extension)(scope, None, send)
    assert sent[0]["status"] == 503
    assert b"This engine is shutting down." in sent[1]["body"]


LEARNS = {"agent_eviction": "expected"}


class Reports:
    """The way to a scheduler. is_full: it takes no more."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.sent: list[tuple[str, ...]] = []
        self._is_full = is_full

    def answered(self, conversation: str, tools: list[str], at_s: float) -> None:
        if self._is_full:
            raise zmq.Again
        assert conversation
        self.sent.append(tuple(tools))


async def answer(extension: HttpExtension, reports: Any, status: int, **known: Any) -> list[Any]:
    """Has the middleware pass an answer in two parts; what the client gets."""
    context = RequestContext("/v1/messages", conversation=7, **known)
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope.setdefault("state", {})["sgl_ext_context"] = context
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        context.called.append("Bash")
        await send({"type": "http.response.body", "body": b"b"})

    async def send(message: Any) -> None:
        sent.append(message)

    middleware = AnswerMiddleware(app, extension, [reports])
    await middleware({"type": "http", "path": "/v1/messages"}, None, send)
    return sent


async def test_the_scheduler_learns_once_an_answer_is_complete_which_tools_it_calls(
    extend: Callable[..., HttpExtension],
) -> None:
    reports = Reports()
    sent = await answer(extend(**LEARNS), reports, 200, are_hints_sent=True)
    assert reports.sent == [("Bash",)]
    assert [message.get("body") for message in sent] == [None, b"a", b"b"]


@pytest.mark.parametrize(
    ("status", "known", "settings"),
    [
        (500, {"are_hints_sent": True}, LEARNS),
        (200, {"are_hints_sent": False}, LEARNS),
        (200, {"are_hints_sent": True}, {"agent_eviction": "off"}),
    ],
)
async def test_what_the_scheduler_does_not_know_or_use_is_not_reported(
    status: int, known: Any, settings: Any, extend: Callable[..., HttpExtension]
) -> None:
    reports = Reports()
    await answer(extend(**settings), reports, status, **known)
    assert not reports.sent


async def test_a_scheduler_that_takes_no_reports_delays_no_answer(
    extend: Callable[..., HttpExtension],
) -> None:
    counted = counter("answers_not_reported")._value
    before = counted.get()
    sent = await answer(extend(**LEARNS), Reports(is_full=True), 200, are_hints_sent=True)
    assert len(sent) == 3
    assert counted.get() == before + 1
