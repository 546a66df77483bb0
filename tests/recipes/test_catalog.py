"""The recipes are found, printed and copied, and the launcher takes their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_ext.recipes import recipe, recipes, run, settings_file, write_recipes
from sgl_ext.settings.schema import SettingsError
from sgl_ext.settings.sources import launch_settings


def test_a_name_stands_for_the_settings_that_come_with_the_launcher() -> None:
    settings = launch_settings(["--config", "cpu", "--model-path", "m"])
    assert "--max-total-tokens" in settings.engine_args
    assert recipe("cpu") == recipe("cpu.toml")


def test_a_file_of_ones_own_wins_over_the_recipe_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cpu").write_text("[launch]\nmodel-path = 'mine'\n")
    assert settings_file("cpu") == "cpu"
    assert launch_settings(["--config", "cpu"]).model_path == "mine"


def test_a_name_that_is_neither_is_an_error_that_quotes_it() -> None:
    with pytest.raises(SettingsError, match=r"config='tpu': .*No such file"):
        launch_settings(["--config", "tpu", "--model-path", "m"])


def test_all_are_copied_and_a_changed_copy_is_kept(tmp_path: Path) -> None:
    written = write_recipes(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in written} == set(recipes())
    assert (tmp_path / "kubernetes/base/engine/engine.yaml").exists()
    write_recipes(tmp_path)
    (tmp_path / "gpu.toml").write_text("mine")
    with pytest.raises(FileExistsError, match=r"gpu\.toml"):
        write_recipes(tmp_path)
    assert (tmp_path / "gpu.toml").read_text() == "mine"


def test_the_command_lists_prints_and_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([]) == 0
    assert "kubernetes/base/engine/engine.yaml" in capsys.readouterr().out
    assert run(["gpu"]) == 0
    assert capsys.readouterr().out == recipe("gpu.toml").read_text()
    assert run(["--write", str(tmp_path / "new")]) == 0
    assert run(["tpu.toml"]) == 2
    assert "'gpu.toml' is" in capsys.readouterr().err
