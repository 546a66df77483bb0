"""How the extension changes SGLang's HTTP server as a whole."""

import asyncio
import signal
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest

from sgl_ext.engine import http_server
from sgl_ext.engine.http.extension import HttpExtension
from sgl_ext.engine.http_server import InFlightMiddleware
from sgl_ext.wire.events import EVENTS_PATH as EVENTS


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_ends_the_server_ends_its_streams_first(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """A server waits until every response has ended."""
    ended = list[str]()
    before = signal.signal(number, lambda *_: ended.append("server"))
    try:
        monkeypatch.setattr(http_server, "end_streams", lambda: ended.append("streams"))
        http_server.end_streams_at(number)
        signal.raise_signal(number)
        assert ended == ["streams", "server"]
    finally:
        signal.signal(number, before)
