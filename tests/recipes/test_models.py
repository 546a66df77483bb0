"""The recipes of model families, held against SGLang's flags and its registries of parsers."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from sgl_ext.node.flags import check_flags
from sgl_ext.recipes import recipes
from sgl_ext.settings.sources import launch_settings

ROOT = Path(__file__).parents[2]
FAMILIES = {name: path for name, path in recipes().items() if name.startswith("models/")}
PAGE = (ROOT / "docs/guide/models.md").read_text()


def variants(path: Path) -> list[str]:
    """The file as it is, and with each block of keys that are commented out."""
    text = path.read_text()
    blocks = re.findall(r"(?:^# [a-z-]+ = .*\n)+", text, re.MULTILINE)
    return [text, *(f"[engine]\n{re.sub('(?m)^# ', '', block)}" for block in blocks)]


def flags_of(text: str, folder: Path) -> list[str]:
    (folder / "recipe.toml").write_text(text)
    config = str(folder / "recipe.toml")
    return list(launch_settings(["--config", config, "--model-path", "m"]).engine_args)


def test_each_family_has_one() -> None:
    names = {name.removeprefix("models/").removesuffix(".toml") for name in FAMILIES}
    assert names == {"qwen3", "glm", "kimi", "deepseek", "gpt-oss", "llama"}


def parsers_of(flags: list[str]) -> dict[str, str]:
    return {flag: value for flag, value in pairwise(flags) if flag.endswith("-parser")}


@pytest.mark.parametrize("name", FAMILIES)
def test_sglang_takes_its_flags_and_the_page_has_its_parsers(name: str, tmp_path: Path) -> None:
    for text in variants(FAMILIES[name]):
        flags = flags_of(text, tmp_path)
        check_flags(flags)
        parsers = parsers_of(flags)
        assert "--tool-call-parser" in parsers
        assert all(f"`{parser}`" in PAGE for parser in parsers.values())


@pytest.mark.long
def test_sglang_has_all_their_parsers(tmp_path: Path) -> None:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    registries = {
        "--tool-call-parser": FunctionCallParser.ToolCallParserEnum,
        "--reasoning-parser": ReasoningParser.DetectorMap,
    }
    for text in (text for path in FAMILIES.values() for text in variants(path)):
        for flag, parser in parsers_of(flags_of(text, tmp_path)).items():
            assert parser in registries[flag]


@pytest.mark.parametrize("name", ["gpu.toml", *FAMILIES])
def test_a_recipe_starts_by_its_name(name: str) -> None:
    settings = launch_settings(["--config", name.removesuffix(".toml"), "--model-path", "m"])
    assert settings.platform == "gpu"
    if name == "gpu.toml":
        assert [*settings.engine_args] == [
            *("--reasoning-parser", "auto"),
            *("--tool-call-parser", "auto"),
        ]


def test_several_models_have_a_recipe(tmp_path: Path) -> None:
    text = recipes()["several-models.toml"].read_text()
    for each in (text, re.sub(r"(?m)^# (fallback|gpus)", r"\1", text)):
        (tmp_path / "node.toml").write_text(each)
        settings = launch_settings(["--config", str(tmp_path / "node.toml")])
        large, small = settings.of_models
        assert (large.model_name, large.tp, small.model_name) == ("large", 8, "small")
        for one in (large, small):
            check_flags(list(one.engine_args))
        assert [alias.model for alias in settings.balancer.aliases] == ["small", "large"]
