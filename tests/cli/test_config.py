"""`config`: a file is checked, and what holds is shown, without a node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_ext.cli import config
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
    every = run(*argv, "--all", "--json")[1]
    assert {"key": "port", "value": "30000", "source": "default"} in json.loads(every)
    assert "as --config node.toml" in run("config", "show", "node.toml")[2]


def test_a_running_node_s_settings_are_those_of_its_command_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node.toml").write_text("[balancer]\nport = 31000\n")
    proc = tmp_path / "proc/77"
    proc.mkdir(parents=True)
    (proc / "cwd").symlink_to(tmp_path)
    words = ["python", "bin/sgl-ext", "serve", "--config", "node.toml", "--tp", "2"]
    (proc / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
    monkeypatch.setattr(config, "node_process", lambda folder: 77)
    found = config.command_line(tmp_path, tmp_path / "proc")
    assert found == ["--config", str(tmp_path / "node.toml"), "--tp", "2"]
    monkeypatch.setattr(config, "command_line", lambda folder: found)
    code, out, _ = run("config", "show", "--running", str(tmp_path))
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["port", "31,000", f"{tmp_path}/node.toml:", "[balancer]"] in rows
    assert ["tp", "2", "--tp"] in rows


def test_without_a_running_node_it_says_where_to_look(run: Run, tmp_path: Path) -> None:
    code, _, err = run("config", "show", "--running", str(tmp_path))
    assert (code, "give the node's --log-dir" in err) == (1, True)
