"""docs/reference/settings.md and the files in launch/ agree with the schema."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.settings_page import PAGE, page
from sgl_ext.settings.sources import launch_settings

RECIPES = sorted(Path(__file__).parent.parent.parent.glob("launch/*.toml"))


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python -m docs.settings_page"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_every_key_in_a_recipe_exists_commented_out_or_not(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SGL_KEY", "key")
    for name in ("keys.toml", "warmup.jsonl"):
        Path(name).touch()
    Path("engine.secret").write_text("0123456789abcdef")
    text = re.sub(r"(?m)^# (?=[a-z-]+ = |\[)", "", recipe.read_text())
    Path("all.toml").write_text(text)
    model = [] if "[[models]]" in text else ["--model-path", "m"]
    settings = launch_settings(["--config", "all.toml", *model])
    assert any("--reasoning-parser" in one.engine_args for one in settings.of_models)
