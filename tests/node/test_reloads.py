"""The launcher's reloads: what it says, what engines are started with, what its socket answers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sgl_ext.node.child import Child
from sgl_ext.node.control import Control, socket_path
from sgl_ext.node.reloads import Reloads, changes_path, live_settings
from sgl_ext.settings.schema import EngineSettings, SettingsError
from sgl_ext.settings.sources import launch_settings

FILE = "[launch]\nmodel-path = 'm'\npin-budget = 0.5\nlog-dir = '{}'\n"


class Launcher:
    def __init__(self, folder: Path, *, has_file: bool = True) -> None:
        self.file = folder / "node.toml"
        self.text = FILE.format(folder)
        self.file.write_text(self.text)
        read = partial(launch_settings, ["--config", str(self.file)])
        self.child = Child("engine-0", (), {}, folder / "engine-0.log", "http://127.0.0.1:1")
        self.said: list[str] = []
        self.refused: list[str] = []
        self.live = live_settings(read(), read if has_file else None)
        self.reloads = Reloads(self.live, [self.child], self.said.append, self.refused.append)

    async def reload(self, old: str = "", new: str = "") -> dict[str, Any]:
        self.file.write_text(self.text.replace(old, new) if old else self.text)
        return await self.reloads.reload()


async def test_engines_are_started_with_what_was_changed(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    assert (await launcher.reload("0.5", "0.25"))["changed"] == ["pin-budget"]
    started_with = EngineSettings.from_environment(launcher.child._environment)
    assert started_with.pin_budget == 0.25
    assert launcher.said == ["reload: changed: pin-budget"]


async def test_a_wrong_file_is_told_once_and_changes_nothing(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    with pytest.raises(SettingsError):
        await launcher.reload("0.5", "5")
    (said,) = launcher.refused
    assert not launcher.said
    assert "node.toml: [launch] pin-budget=5: must be" in said
    assert said.endswith("nothing was changed")
    assert not changes_path(tmp_path).exists()


async def test_a_new_launcher_forgets_what_an_earlier_one_changed(tmp_path: Path) -> None:
    await Launcher(tmp_path).reload("0.5", "0.25")
    assert changes_path(tmp_path).exists()
    assert Launcher(tmp_path).live.version.number == 0
    assert not changes_path(tmp_path).exists()


async def test_the_socket_tells_what_changed_and_what_is_wrong(tmp_path: Path) -> None:
    launcher, control = Launcher(tmp_path), Control(socket_path(tmp_path), [])
    await control.start()
    connector = aiohttp.UnixConnector(str(socket_path(tmp_path)))
    async with aiohttp.ClientSession("http://launcher", connector=connector) as client:
        assert (await client.post("/reload")).status == 404
        control.reload = launcher.reloads.reload
        answer = await client.post("/reload")
        document = {"changed": [], "unchanged_until_restart": []}
        assert (answer.status, await answer.json()) == (200, document)
        launcher.file.write_text("[launch]\npin-budget = 5")
        answer = await client.post("/reload")
        assert answer.status == 400
        assert "pin-budget=5" in (await answer.json())["error"]
        control.reload = Launcher(tmp_path, has_file=False).reloads.reload
        answer = await client.post("/reload")
        assert answer.status == 409
        assert "--config" in (await answer.json())["error"]
    await control.stop()
