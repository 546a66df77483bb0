"""Settings that are read again: what changes at once, what stays until a restart and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from sgl_ext.settings.fields import TABLES, Field
from sgl_ext.settings.reloading import (
    LiveSettings,
    compare,
    engine_values,
    in_words,
    with_values,
)
from sgl_ext.settings.schema import (
    BalancerSettings,
    DefaultHint,
    EngineSettings,
    LaunchSettings,
    SettingsError,
    Tenant,
)
from sgl_ext.settings.sources import balancer_settings, launch_settings

FIELDS = {**TABLES["launch"], **TABLES["balancer"]}
FILE = """
[launch]
model-path = "m"
pin-budget = 0.5
[balancer]
port = 4000
[tenants.people]
weight = 2
[hints.harness.claude-code]
ttl-s = 600
"""


class Node:
    """A file with the settings of a node, and what its processes make of it."""

    def __init__(self, folder: Path) -> None:
        self.file, self.shared = folder / "node.toml", folder / "changed.json"
        self.write(FILE)
        self.start = self.read()

    def write(self, text: str) -> None:
        self.file.write_text(text)

    def read(self) -> LaunchSettings:
        return launch_settings(["--config", str(self.file), "--queue-limit", "7"])

    def process(self) -> LiveSettings[LaunchSettings]:
        return LiveSettings(self.start, self.read, self.shared)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def another_value(field: Field) -> Any:
    """A value that the field's type allows, and not its default."""
    candidates: list[Any] = [
        *(0.25, 0.5, 2, 77, 2 << 20, "hinted", "on", True, False, "file:x", "name", "http://a:1"),
        *("json", "debug", "cpu", "session"),
        *((one,) for one in ("x-a", "file:x")),
    ]
    for value in candidates:
        try:
            converted = msgspec.convert(value, field.annotation)
        except msgspec.ValidationError:
            continue
        if converted != field.default:
            return converted
    raise AssertionError(f"no other value for {field.name}")


def changed_by(name: str, value: Any) -> tuple[LaunchSettings, LaunchSettings]:
    before = LaunchSettings(model_path="m")
    return before, with_values(before, {name: msgspec.to_builtins(value)})


@pytest.mark.parametrize("field", FIELDS.values(), ids=lambda field: field.name)
def test_every_setting_either_changes_or_says_why_not(field: Field) -> None:
    found = compare(*changed_by(field.name, another_value(field)))
    key = field.name.replace("_", "-")
    if field.reload.applies:
        assert (found.changed, found.unchanged) == ([key], [])
        assert field.name in found.values
    else:
        assert (found.changed, found.values) == ([], {})
        assert [(one.key, one.why) for one in found.unchanged] == [(key, field.reload.why)]
        assert field.reload.why


def test_what_is_not_a_field_of_its_own_is_named_one_by_one() -> None:
    before = LaunchSettings(model_path="m", engine_args=("--a",))
    tenants = [msgspec.to_builtins(Tenant(name, 1)) for name in ("a", "b")]
    hints = [msgspec.to_builtins(DefaultHint("model", "m", osl=3))]
    after = with_values(before, {"tenants": tenants, "hints": hints, "engine_args": ["--b"]})
    found = compare(before, after)
    assert found.changed == ["tenants.a", "tenants.b", "hints.model.m"]
    assert [one.key for one in found.unchanged] == ["[engine]"]
    fewer = with_values(after, {"tenants": tenants[:1]})
    assert compare(after, fewer).changed == ["tenants.b"]


@pytest.mark.parametrize(("old", "new"), [("off", "auto"), ("hinted", "off")])
def test_prefill_ahead_is_not_turned_on_or_off(old: str, new: str) -> None:
    before, _ = changed_by("prefill_ahead", old)
    found = compare(
        with_values(before, {"prefill_ahead": old}), changed_by("prefill_ahead", new)[1]
    )
    assert not found.changed
    assert found.unchanged[0].key == "prefill-ahead"


def test_a_reload_applies_what_it_can_and_names_the_rest(node: Node) -> None:
    live = node.process()
    node.write(FILE.replace("0.5", "0.25").replace("4000", "4001").replace("600", "60"))
    assert live.reload().as_json() == {
        "changed": ["pin-budget", "hints.harness.claude-code"],
        "unchanged_until_restart": [{"key": "port", "why": "it is opened at the start"}],
    }
    current = live.current
    assert (current.engine.pin_budget, current.balancer.port) == (0.25, 4000)
    assert current.balancer.queue_limit == 7  # a flag still wins
    assert current.balancer.hints == (DefaultHint("harness", "claude-code", ttl_s=60),)
    assert engine_values(live.version) == {"pin_budget": 0.25}


def test_an_unchanged_file_changes_nothing(node: Node) -> None:
    live = node.process()
    before = live.version
    assert in_words(live.reload().as_json()) == "nothing changed"
    assert live.version is before
    assert not node.shared.exists()


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("[launch]\npin-budget = 3", r"node\.toml: \[launch\] pin-budget=3: must be a number"),
        ("[launch]\npin-ttl-s = 4000", r"\[launch\] pin-ttl-s=4000.0: must be at most"),
        ("[hints.modle.m]", r"\[hints\.modle\]: unknown table; there are hints\.tenant"),
        ("[hints.harness.claude]", r"\[hints\.harness\.claude\]: unknown harness; .* claude-code"),
        ("[hints.model.m]\nosl = -1", r"\[hints\.model\.m\] osl=-1: must be an integer of at"),
        ("[hints.model.m]\nttl-s = 0.5", r"node\.toml: \[hints\.model\.m\] ttl-s=0\.5: must be 0"),
        ("[hints.model.m]\nttl = 5", r"\[hints\.model\.m\] ttl: unknown key; did you mean ttl_s"),
        ("[hints]\nmodel = 3", r"hints\.model=3: must be a table"),
        ("[launch", r"config=.*node\.toml"),
    ],
)
def test_a_wrong_file_is_told_and_changes_nothing(node: Node, line: str, error: str) -> None:
    live = node.process()
    node.write(line)
    with pytest.raises(SettingsError, match=error):
        launch_settings(["--config", str(node.file), "--model-path", "m"])
    with pytest.raises(SettingsError):
        live.reload()
    assert live.version.number == 0
    assert not node.shared.exists()


def test_processes_share_a_version_and_later_ones_begin_with_it(node: Node) -> None:
    one, other = node.process(), node.process()
    node.write(FILE.replace("0.5", "0.25"))
    one.reload()
    assert other.refresh()
    assert not other.refresh()
    assert node.process().version == other.version == one.version
    node.write(FILE.replace("0.5", "0.125"))
    other.reload()
    assert one.refresh()
    assert one.current.engine.pin_budget == 0.125
    assert node.shared.stat().st_mode & 0o777 == 0o600


def test_a_value_that_is_put_back_is_changed_again(node: Node) -> None:
    live = node.process()
    node.write(FILE.replace("0.5", "0.25"))
    live.reload()
    node.write(FILE)
    assert live.reload().changed == ["pin-budget"]
    assert engine_values(live.version) == {"pin_budget": 0.5}


def test_without_a_file_there_is_nothing_to_read() -> None:
    live = LiveSettings(BalancerSettings())
    with pytest.raises(SettingsError, match="without --config"):
        live.reload()


def test_a_balancer_alone_reads_its_tables_of_a_file(node: Node) -> None:
    settings = balancer_settings(["--config", str(node.file), "--port", "5"])
    assert (settings.port, settings.tenants[0].name) == (5, "people")
    assert settings.hints == (DefaultHint("harness", "claude-code", ttl_s=600),)


def test_what_an_engine_gets_is_a_part_of_its_settings() -> None:
    before, after = changed_by("pin_ttl_s", 9.0)
    assert with_values(EngineSettings(), compare(before, after).values).pin_ttl_s == 9.0
