"""The launcher's socket: who can open it, when it is replaced, and what it answers."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from sgl_ext.node.child import Child
from sgl_ext.node.control import Control, socket_path
from sgl_ext.settings.schema import SettingsError
from tests.node.test_restarts import FakeNode


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.UnixConnector(str(socket_path(tmp_path)))
    async with aiohttp.ClientSession("http://launcher", connector=connector) as session:
        yield session


def engine(tmp_path: Path) -> Child:
    log = tmp_path / "engine-0.log"
    log.write_text("server_args=...\nLoad weight begin\nshards:  50% Completed\n")
    return Child("engine-0", (), {}, log, "http://127.0.0.1:1")


async def test_it_tells_how_far_engines_are_and_restarts_them_once_the_node_has_started(
    tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    control = Control(socket_path(tmp_path), [engine(tmp_path)])
    await control.start()
    (row,) = (await (await client.get("/children")).json())["children"]
    assert (row["name"], row["url"]) == ("engine-0", "http://127.0.0.1:1")
    assert (row["state"], row["stage"], row["progress"]) == ("starting", "loading weights", 0.5)
    assert row["restarts"] == 0
    answer = await client.post("/restart")
    assert (answer.status, await answer.json()) == (409, {"error": "the node is still starting"})
    control.restarts = FakeNode().restarts
    assert (await client.get("/restart")).status == 404
    answer = await client.post("/restart", data=b'{"engine": 7}')
    assert answer.status == 400
    assert "`int`" in (await answer.json())["error"]
    answer = await client.post("/restart", data=b'{"engine": "engine-1"}')
    assert answer.status == 202
    begun = await answer.json()
    assert begun["engines"][0]["name"] == "engine-1"
    assert (await (await client.get("/restart")).json())["id"] == begun["id"]
    answer = await client.get("/nothing")
    assert (answer.status, await answer.json()) == (404, {"error": "Not Found"})
    await control.stop()
    assert not socket_path(tmp_path).exists()


async def test_where_it_restarts_nothing_it_says_what_does(
    tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    control = Control(socket_path(tmp_path), [engine(tmp_path)], "use the fleet's command")
    await control.start()
    for answer in (await client.post("/restart"), await client.get("/restart")):
        assert (answer.status, await answer.json()) == (501, {"error": "use the fleet's command"})
    await control.stop()


async def test_only_its_user_can_open_it_and_that_of_a_killed_launcher_is_replaced(
    tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    path = socket_path(tmp_path)
    killed, control = Control(path, []), Control(path, [])
    await killed.start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.stat().st_ino
    await control.start()
    assert path.stat().st_ino != before
    assert (await client.get("/children")).status == 200
    await control.stop()
    await killed.stop()


async def test_a_directory_with_a_long_name_has_its_socket_elsewhere(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    path = socket_path(long)
    assert path.parent.parent != long
    control = Control(path, [])
    await control.start()
    assert path.exists()
    await control.stop()
    control = Control(tmp_path / "missing" / "launcher.sock", [])
    with pytest.raises(SettingsError, match="no socket can be made there: No such file"):
        await control.start()
    await control.stop()
