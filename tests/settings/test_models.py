"""[[models]] and [aliases]: what a node makes of them, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_ext.settings.schema import Alias, LaunchSettings, ServedModel, SettingsError
from sgl_ext.settings.sources import adapters_in, balancer_settings, gpu_names, launch_settings

TWO = """
[[models]]
name = "large"
path = "/m/Large"
instances = 2
tp = 2
fallback = "small"

[[models]]
path = "/m/small"
gpus = [4, 5]
[models.engine]
reasoning-parser = "qwen3"
lora-paths = ["sql=/m/sql"]

[engine]
max-total-tokens = 1000
"""
ALIASES = '[aliases]\n"claude-haiku-*" = "small"\n"*" = "large"\n'
NO_PATH = TWO.replace('path = "/m/small"', 'name = "small"')


def read(tmp_path: Path, text: str, *flags: str) -> LaunchSettings:
    path = tmp_path / "node.toml"
    path.write_text(text)
    return launch_settings(["--config", str(path), *flags])


def named(text: str) -> str:
    """The second model by a short name."""
    return text.replace('path = "/m/small"', 'path = "/m/small"\nname = "small"')


def test_each_model_has_settings_of_its_own(tmp_path: Path) -> None:
    settings = read(tmp_path, named(TWO) + ALIASES, "--log-level", "debug")
    large, small = settings.of_models
    assert settings.instances == 3
    assert (large.model_path, large.model_name, large.instances, large.tp) == (
        *("/m/Large", "large"),
        *(2, 2),
    )
    assert (small.model_path, small.model_name, small.instances, small.tp) == (
        *("/m/small", "small"),
        *(1, 1),
    )
    assert large.engine_args == ("--max-total-tokens", "1000")
    assert small.engine_args[2:] == ("--reasoning-parser", "qwen3", "--lora-paths", "sql=/m/sql")
    assert settings.balancer.served == (ServedModel("large", "small"), ServedModel("small"))
    aliases = (Alias("claude-haiku-*", "small"), Alias("*", "large"))
    assert settings.balancer.aliases == aliases
    assert not large.models


def test_a_node_of_one_model_is_as_it_was(tmp_path: Path) -> None:
    settings = read(tmp_path, '[launch]\nmodel-path = "/m/x"\n')
    assert settings.of_models == (settings,)
    assert (settings.balancer.served, settings.balancer.aliases) == ((), ())


def test_aliases_may_name_adapters_and_the_model_of_a_node_of_one(tmp_path: Path) -> None:
    text = '[launch]\nmodel-path = "/m/x"\n[engine]\nlora-paths = ["sql=/a", "law=/b"]\n'
    text += '[aliases]\ndb = "sql"\nmine = "/m/x"\n'
    assert len(read(tmp_path, text).balancer.aliases) == 2


def test_a_model_without_a_path_has_its_engines_elsewhere(tmp_path: Path) -> None:
    text = '[[models]]\npath = "/m/x"\nname = "x"\n[[models]]\nname = "far"\n'
    settings = read(tmp_path, text + '[aliases]\n"*" = "far"\n')
    assert [one.model_name for one in settings.of_models] == ["x"]
    assert [one.name for one in settings.balancer.served] == ["x", "far"]
    assert settings.instances == 1


def test_a_balancer_alone_reads_the_names(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(named(TWO) + ALIASES)
    settings = balancer_settings(["--config", str(path)])
    assert [one.name for one in settings.served] == ["large", "small"]
    assert len(settings.aliases) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            named(TWO).replace('"large"', '"small"'),
            "[[models]] number 2 name='small': another model has this name",
        ),
        (
            named(TWO).replace("instances", "instance"),
            "[[models]] number 1 instance: unknown key; did you mean instances?",
        ),
        (
            named(TWO).replace("instances = 2", "instances = 0"),
            "[[models]] number 1 instances=0: must be an integer of at least 1",
        ),
        (
            named(TWO).replace("tp = 2", 'gpus = "3-4"'),
            "[[models]] number 2 gpus='4,5': large has GPU 4, too",
        ),
        (
            named(TWO).replace('fallback = "small"', 'fallback = "smal"'),
            "[[models]] number 1 fallback='smal': must be one of small",
        ),
        (
            named(TWO).replace('fallback = "small"', 'fallback = "large"'),
            "[[models]] number 1 fallback='large': must be one of small",
        ),
        (
            named(TWO) + '[aliases]\nfast = "smaller"\n',
            "[aliases] fast='smaller': no such model; there are large, small, sql",
        ),
        (
            named(TWO) + '[aliases]\nlarge = "small"\n',
            "[aliases] large='small': a model has this name",
        ),
        (named(TWO) + "[aliases]\nfast = 1\n", "[aliases] fast=1: must be a name"),
        (
            named(TWO) + '[launch]\nmodel-path = "/m/x"\n',
            "[launch] model-path='/m/x': {path}: [[models]] has it for each model",
        ),
        (named(TWO) + "[launch]\ntp = 2\n", "[launch] tp=2: {path}: [[models]] has it for each"),
        ('[models]\nname = "x"\n', "[models]: must be a list of tables, [[models]]"),
        ("[[models]]\ninstances = 1\n", "[[models]] number 1 name: missing"),
        ('[[models]]\nname = "x"\n', "[[models]] path: missing; one model at least"),
        (
            '[[models]]\nname = "a b"\npath = "/m"\n',
            "[[models]] number 1 name='a b': must be a name without blanks and wildcards",
        ),
        (
            NO_PATH,
            "[[models]] number 2 path=None: missing: gpus and engine are of engines of this node",
        ),
        (
            named(TWO).replace("reasoning-parser", "served-model-name"),
            "[engine]=['--served-model-name']: [[models]] names each model",
        ),
        (
            named(TWO).replace("[engine]\n", '[launch]\nray-address = "auto"\n[engine]\n'),
            "[launch] ray-address='auto': engines on Ray have one model: no [[models]]",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_file_key_and_value(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError) as error:
        read(tmp_path, text)
    path = str(tmp_path / "node.toml")
    assert message.replace("{path}", path) in str(error.value)
    assert path in str(error.value) or "[engine]=" in str(error.value)


def test_lists_of_gpus() -> None:
    assert gpu_names("0,2-4,MIG-a1-b2") == ["0", "2", "3", "4", "MIG-a1-b2"]
    assert gpu_names("") == []


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--lora-paths", "a=/x", "b=/y", "--tp", "2"], ["a", "b"]),
        (["--lora-paths=a=/x"], ["a"]),
        (["--lora-paths", "/x"], []),
        (["--model", "a=b"], []),
    ],
)
def test_names_of_adapters(argv: list[str], names: list[str]) -> None:
    assert adapters_in(argv) == names
