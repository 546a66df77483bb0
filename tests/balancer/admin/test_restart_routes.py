"""Restarts over the balancer: what it passes on to a launcher's socket, and what it says itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from sgl_ext.balancer.cluster.launcher import Launcher
from tests.balancer.conftest import Engine, Start

RUNNING = {"id": "restart-1", "state": "running", "engines": [], "error": None}
ENGINES = [{"name": "engine-0", "url": "http://127.0.0.1:1", "state": "ready"}]


class FakeLauncher:
    """A launcher that keeps what it was sent, and answers as its test says."""

    def __init__(self, socket: Path) -> None:
        self.socket = str(socket)
        self.seen: list[bytes] = []
        self.answer = (202, RUNNING)

    async def begin(self, request: web.Request) -> web.Response:
        self.seen.append(await request.read())
        return web.json_response(self.answer[1], status=self.answer[0])

    async def last(self, request: web.Request) -> web.Response:
        return web.json_response(RUNNING)

    async def children(self, request: web.Request) -> web.Response:
        return web.json_response({"children": ENGINES})


@pytest.fixture
async def launcher(tmp_path: Path) -> AsyncIterator[FakeLauncher]:
    fake = FakeLauncher(tmp_path / "launcher.sock")
    app = web.Application()
    app.router.add_post("/restart", fake.begin)
    app.router.add_get("/restart", fake.last)
    app.router.add_get("/children", fake.children)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, fake.socket).start()
    yield fake
    await runner.cleanup()


async def test_a_restart_is_the_launchers_and_its_refusals_have_the_servers_shape(
    start: Start, launcher: FakeLauncher
) -> None:
    client = await start(Engine("a"), launcher_socket=launcher.socket)
    body = b'{"engine": "engine-0"}'
    answer = await client.post(
        "/sgl_ext/restart", data=body, headers={"content-type": "application/json"}
    )
    assert (answer.status, await answer.json()) == (202, RUNNING)
    assert launcher.seen == [body]
    assert await (await client.get("/sgl_ext/restart")).json() == RUNNING
    launcher.answer = (409, {"error": "restart-1 is running."})
    answer = await client.post("/sgl_ext/restart")
    assert answer.status == 409
    assert (await answer.json())["error"]["message"] == "restart-1 is running."


async def test_without_a_launcher_it_says_that_there_is_none(start: Start, tmp_path: Path) -> None:
    client = await start(Engine("a"))
    answer = await client.post("/sgl_ext/restart")
    assert answer.status == 501
    message = (await answer.json())["error"]["message"]
    assert message == "No launcher started this balancer: restart engines where they were started."
    client = await start(Engine("a"), launcher_socket=str(tmp_path / "gone.sock"))
    answer = await client.get("/sgl_ext/restart")
    assert answer.status == 502
    assert "The launcher does not answer" in (await answer.json())["error"]["message"]


async def test_the_launcher_says_how_far_its_engines_are(
    launcher: FakeLauncher, tmp_path: Path
) -> None:
    for socket, expected in (
        (launcher.socket, ENGINES),
        (str(tmp_path / "gone.sock"), []),
        (None, []),
    ):
        link = Launcher(socket)
        assert await link.children() == expected
        await link.close()
