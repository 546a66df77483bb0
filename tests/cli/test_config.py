"""`config`: a file is checked, and what holds is shown, without a node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_ext.cli import config
from sgl_ext.node.in_effect import SettingsInEffect
from sgl_ext.node.reloads import live_settings
from sgl_ext.settings.sources import launch_settings, sourced_settings
from tests.cli.conftest import Run

TEXT = """
[launch]
pin-ttl-s = "5min"
instances = 1
[balancer]
api-key = "file:key"
[tenants.people]
max-priority = 50
[hints.harness.codex]
ttl-s = 60
[engine]
api-key = "hush"
mem-fraction-static = 0.8
"""


def written(folder: Path, text: str = TEXT) -> str:
    (folder / "key").write_text("sk-hush\n")
    path = folder / "node.toml"
    path.write_text(text.replace("file:key", f"file:{folder}/key"))
    return str(path)


def test_a_file_is_checked_and_an_error_names_file_key_and_value(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path)
    code, out, err = run("config", "check", path)
    assert (code, err) == (0, "")
    assert out == f"{path} is right: 6 settings are given, the others are defaults\n"
    wrong = written(tmp_path, "[balancer]\ndrain-s = '3 weeks'")
    code, _, err = run("config", "check", wrong)
    assert code == 2
    assert err.startswith(f"sgl-ext: {wrong}: [balancer] drain-s='3 weeks': must be a number")
    code, _, err = run("config", "check", str(tmp_path / "none.toml"))
    assert (code, "No such file" in err) == (2, True)
    code, _, err = run("config", "check", written(tmp_path), "--drian-s", "3")
    assert (code, err) == (2, "sgl-ext: --drian-s: unknown flag; did you mean --drain-s?\n")
    typo = written(tmp_path, "[engine]\nmem-fraction-statik = 0.8")
    code, _, err = run("config", "check", typo)
    assert (code, err.partition(";")[0]) == (
        2,
        f"sgl-ext: {typo}: [engine] --mem-fraction-statik: unknown flag",
    )
    code, _, err = run("config", "check", path, "--drain-s")
    assert (code, err) == (2, "sgl-ext: --drain-s: expected one argument\n")


def test_what_holds_is_shown_with_its_place_and_no_secret(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path)
    argv = ["config", "show", "--config", path, "--drain-s", "1h"]
    code, out, _ = run(*argv, "--json")
    assert code == 0
    assert "hush" not in out
    rows = {row["key"]: (row["value"], row["source"]) for row in json.loads(out)}
    assert rows == {
        "instances": ("1", f"{path}: [launch]"),
        "pin-ttl-s": ("300", f"{path}: [launch]"),
        "api-key": (f"file:{tmp_path}/key", f"{path}: [balancer]"),
        "drain-s": (3600, "--drain-s"),
        "tenants": (["people"], "[tenants]"),
        "hints": (["harness.codex"], "[hints]"),
        "engine-args": ("--api-key ... --mem-fraction-static 0.8", "[engine]"),
    }
    lines = run(*argv)[1].splitlines()
    assert ["drain-s", "3,600", "--drain-s"] in [line.split() for line in lines]
    lines = run(*argv, "--port", "31700")[1].splitlines()
    assert ["port", "31700", "--port"] in [line.split() for line in lines]
    every = run(*argv, "--all", "--json")[1]
    assert {"key": "port", "value": "30000", "source": "default"} in json.loads(every)
    assert "as --config node.toml" in run("config", "show", "node.toml")[2]


def test_a_running_node_s_settings_are_those_that_it_has_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "node_process", lambda folder: 77)
    code, _, err = run("config", "show", "--running", str(tmp_path))
    assert (code, "No such file" in err) == (1, True)
    argv = ["--config", written(tmp_path), "--log-dir", str(tmp_path), "--model-path", "m"]
    settings = launch_settings(argv)
    live = live_settings(settings, lambda: launch_settings(argv))
    found = SettingsInEffect(live, [], lambda: sourced_settings(argv))
    found.write()
    shown = ["config", "show", "--running", str(tmp_path), "--json"]
    before = {row["key"]: (row["value"], row["source"]) for row in json.loads(run(*shown)[1])}
    assert before["pin-ttl-s"] == ("300", f"{tmp_path}/node.toml: [launch]")
    assert before["log-dir"] == (str(tmp_path), "--log-dir")
    assert "hush" not in (tmp_path / "settings.json").read_text()
    every = json.loads(run(*shown, "--all")[1])
    store = {"key": "store", "value": f"{tmp_path}/store.sqlite", "source": "default"}
    assert store in every

    # A file that is changed counts when it is reloaded, and then only what can change.
    written(tmp_path, TEXT.replace("5min", "7min").replace("instances = 1", "instances = 2"))
    found.write()
    assert {r["key"]: (r["value"], r["source"]) for r in json.loads(run(*shown)[1])} == before
    live.reload()
    found.write()
    after = {r["key"]: (r["value"], r["source"]) for r in json.loads(run(*shown)[1])}
    changed = {key for key in before if after.get(key) != before[key]}
    assert changed == {"pin-ttl-s"}
    assert after["pin-ttl-s"] == (420, f"{tmp_path}/node.toml: [launch]")


def test_several_models_are_shown_with_what_each_has(run: Run, tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(
        '[[models]]\npath = "/m/a"\nname = "a"\ntp = 2\n[models.engine]\ndtype = "half"\n'
        '[[models]]\npath = "/m/b"\nname = "b"\nfallback = "a"\n[aliases]\n"*" = "a"\n'
    )
    out = run("config", "show", "--config", str(tmp_path / "node.toml"), "--json")[1]
    assert {row["key"]: row["value"] for row in json.loads(out)} == {
        **{"a: path": "/m/a", "a: tp": 2, "a: engine-args": "--dtype half"},
        **{"b: path": "/m/b", "b: fallback": "a", "aliases": ["* = a"]},
    }


def test_without_a_running_node_it_says_where_to_look(run: Run, tmp_path: Path) -> None:
    code, _, err = run("config", "show", "--running", str(tmp_path))
    assert (code, "give the node's --log-dir" in err) == (1, True)
