"""Engines that hang are ended, so that they are started again."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from scheduler.silence import RESTART_S
from sgl_ext.node.child import Child
from sgl_ext.node.children import EngineList
from sgl_ext.node.keepers import EngineCalls, HungEngines, keep_running
from tests.node.test_restarts import FakeEngine, FakeNode
from tests.waiting import HANG_S


class Calls:
    """What the balancer says of hung engines."""

    def __init__(self) -> None:
        self.hung: dict[str, float] = {}

    async def hung_s(self) -> dict[str, float]:
        return self.hung


async def test_an_engine_that_hangs_is_ended_after_a_while() -> None:
    node, calls, ended = FakeNode(3), Calls(), list[str]()
    engines: list[Any] = node.engines
    listed = EngineList(Path(), engines, "box:30000")

    async def end(engine: Any) -> None:
        ended.append(engine.name)
        engine.exit_code = -9

    hung = HungEngines(engines, listed, calls, node.said.append, end)
    ids = [listed.id_of(engine) for engine in engines]
    calls.hung = {ids[0]: RESTART_S - 1, ids[1]: RESTART_S}
    await hung.look()
    assert ended == ["engine-1"]
    assert node.said == ["engine-1 has hung for 60 s and is ended"]
    await hung.look()
    assert ended == ["engine-1"], "it has ended already"
    again: FakeEngine = engines[1]
    await again.start()
    await hung.look()
    assert ended == ["engine-1"], "it was another start that hung"
    calls.hung = {ids[0]: RESTART_S, ids[2]: RESTART_S}
    listed.restarting["engine-0"] = ""
    await hung.look()
    assert ended == ["engine-1", "engine-2"], "what restarts on order is left to that"


async def test_the_balancer_says_which_engines_hang() -> None:
    rows = [{"id": "engine-0@box", "hung_s": 61.5}, {"id": "engine-1@box", "hung_s": 0.0}]

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"workers": rows}, status=503)

    app = web.Application()
    app.router.add_get("/health", health)
    async with TestServer(app) as server:
        calls = EngineCalls(str(server.make_url("")).rstrip("/"), None)
        assert await calls.hung_s() == {"engine-0@box": 61.5}
        await calls.close()
    silent = EngineCalls("http://127.0.0.1:1", None)
    assert await silent.hung_s() == {}
    await silent.close()


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("raise RuntimeError('no memory')", "exit code 1: RuntimeError: no memory"),
        ("raise SystemExit(3)", "exit code 3"),
        (
            "import os, signal\n"
            "print('Subprocess detokenizer (pid=9) crashed with exit code -9.', flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)",
            "SIGKILL of its detokenizer",
        ),
    ],
)
async def test_how_an_engine_ended_is_kept(tmp_path: Path, program: str, cause: str) -> None:
    engine = Child("engine-0", [sys.executable, "-c", program], {}, tmp_path / "log", "http://x:1")
    said = asyncio.Event()
    await engine.start()
    keeping = asyncio.create_task(keep_running(engine, lambda _: said.set()))
    async with asyncio.timeout(HANG_S):
        await said.wait()
    keeping.cancel()
    assert engine.last_exit is not None
    assert (engine.crashes, engine.last_exit.cause) == (1, cause)
