"""What a balancer logs: the states of its engines, and what happened to requests."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sgl_ext.membership import sources
from sgl_ext.membership.member import Member
from sgl_ext.membership.sources import write_members
from tests.balancer.conftest import Engine, Start
from tests.balancer.test_routing import until

REQUEST = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Any:
    """The lines so far, each as its message and its fields."""
    caplog.set_level(logging.INFO, "sgl_ext")
    return lambda: [(record.message, vars(record)) for record in caplog.records]


async def test_each_state_of_an_engine_is_logged_once_with_its_cause(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Any
) -> None:
    monkeypatch.setattr(sources, "POLL_S", 0.01)
    listed = tmp_path / "engines.json"
    write_members(listed, ())
    engine = Engine("a")
    await start(engine, workers=(), workers_from=(f"file:{listed}",))

    async def until_last(message: str) -> dict[str, Any]:
        async def is_there() -> bool:
            return bool(states()) and states()[-1][0] == message

        await until(is_there)
        found: dict[str, Any] = states()[-1][1]
        return found

    def states() -> list[Any]:
        return [line for line in logged() if line[1].get("engine") == "one"]

    write_members(listed, (Member(id="one", url=engine.url),))
    assert (await until_last("engine ready"))["url"] == engine.url
    assert engine.server is not None
    await engine.server.close()
    unreachable = await until_last("engine unreachable")
    assert unreachable["cause"] in ("Connection refused", "Server disconnected")
    write_members(listed, ())
    await until_last("engine gone")
    assert [message for message, _ in states()] == [
        "engine added",
        "engine ready",
        "engine unreachable",
        "engine draining",
        "engine gone",
    ]


async def test_retries_and_rejections_are_logged_with_their_cause(
    start: Start, logged: Any
) -> None:
    asked: list[str] = []

    async def first_busy(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return web.json_response({}, status=503 if len(asked) == 1 else 200)

    client = await start(Engine("a", first_busy), Engine("b", first_busy), interval_s=60.0)
    assert (await client.post("/v1/messages", json=REQUEST)).status == 200
    fields = next(fields for message, fields in logged() if message == "attempt failed")
    assert (fields["cause"], fields["url"][:17]) == ("status 503", "http://127.0.0.1:")

    for _ in range(9):
        assert (await client.get("/v1/messages")).status == 405
    rejected = [fields for message, fields in logged() if message == "request rejected"]
    assert [line["cause"] for line in rejected] == ["Method Not Allowed"] * 3
    assert (rejected[0]["status"], rejected[0]["path"]) == (405, "/v1/messages")


async def test_a_rejection_is_logged_with_the_status_that_the_client_got(
    start: Start, logged: Any
) -> None:
    client = await start()
    assert (await client.post("/v1/messages", json=REQUEST)).status == 529
    assert (await client.post("/v1/chat/completions", json=REQUEST)).status == 503
    rejected = [fields for message, fields in logged() if message == "request rejected"]
    assert [(line["status"], line["path"]) for line in rejected] == [
        (529, "/v1/messages"),
        (503, "/v1/chat/completions"),
    ]
