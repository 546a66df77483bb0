"""`sgl-ext clients`: shown, written, and started, for each client in its own words."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sgl_ext.cli.clients import Connection, clients_of
from tests.cli.conftest import Run
from tests.cli.fake_node import FakeNode, Refused

WINDOW = 200_000
COMMANDS = {"claude-code": "claude", "codex": "codex", "opencode": "opencode", "qwen-code": "qwen"}


def serve(node: FakeNode, model: str = "tiny", window: int = WINDOW, key: str = "") -> None:
    def models(_: Any) -> Any:
        if key and node.keys[-1] != f"Bearer {key}":
            raise Refused(401, "Invalid or missing API key.")
        return {"data": [{"id": model, "context_length": window}]}

    node.answers["GET /v1/models"] = models


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def how_of(run: Run) -> dict[str, str]:
    code, out, _ = run("clients", "--json")
    assert code == 0
    return {row["name"]: row["how"] for row in json.loads(out)["clients"]}


def test_clients_get_the_address_and_the_model_in_their_own_words(node: FakeNode, run: Run) -> None:
    model = 'a "b" $c'
    serve(node, model)
    how = how_of(run)
    words = shlex.split(how["claude-code"])
    assert f"ANTHROPIC_BASE_URL={node.url}" in words
    assert words[words.index("--model") + 1] == model
    codex = tomllib.loads(how["codex"].rpartition("\n\n")[0])
    assert codex["model"] == model
    assert codex["model_providers"]["sgl_ext"]["base_url"] == f"{node.url}/v1"
    text = how["opencode"].partition("\n")[2].rpartition("\n\n")[0]
    assert model in json.loads(text)["provider"]["sgl-ext"]["models"]
    assert f"OPENAI_MODEL={model}" in shlex.split(how["qwen-code"])
    assert f"openai/{model}" in shlex.split(how["aider"].splitlines()[-1])
    assert json.loads(shlex.split(how["curl"])[-1])["model"] == model
    compile(how["python"], "python", "exec")

    code, out, _ = run("clients", "codex")
    assert (code, "wire_api" in out, "ANTHROPIC" in out) == (0, True, False)
    code, _, err = run("clients", "vim")
    assert (code, "must be one of claude-code, codex" in err) == (2, True)


def test_clients_are_told_the_window(node: FakeNode, run: Run) -> None:
    serve(node)
    how = how_of(run)
    assert f"CLAUDE_CODE_MAX_CONTEXT_TOKENS={WINDOW}" in how["claude-code"]
    assert f"CLAUDE_CODE_AUTO_COMPACT_WINDOW={WINDOW}" in how["claude-code"]
    assert f"model_context_window = {WINDOW}" in how["codex"]
    assert f'"context": {WINDOW}' in how["opencode"]
    assert f'"max_input_tokens": {WINDOW}' in how["aider"]
    assert "MAX_OUTPUT_TOKENS" not in how["qwen-code"]
    # Claude Code has a least window at which it compacts, and asks for 32,000 tokens.
    serve(node, window=32_768)
    how = how_of(run)
    assert "AUTO_COMPACT" not in how["claude-code"]
    assert "CLAUDE_CODE_MAX_OUTPUT_TOKENS=8192" in how["claude-code"]
    # An engine without the plugin does not say it.
    node.answers["GET /v1/models"] = {"data": [{"id": "tiny", "context_length": None}]}
    how = how_of(run)
    assert "MAX_CONTEXT" not in how["claude-code"]
    assert "model_context_window" not in how["codex"]


@pytest.mark.parametrize("window", [39_993, 55_000, 8_192, 127_999])
def test_the_longest_answer_leaves_most_of_a_small_window_to_the_prompt(
    node: FakeNode, run: Run, window: int
) -> None:
    serve(node, window=window)
    how = how_of(run)
    assert f"QWEN_CODE_MAX_OUTPUT_TOKENS={window // 4}" in shlex.split(how["qwen-code"])
    assert f"CLAUDE_CODE_MAX_OUTPUT_TOKENS={window // 4}" in shlex.split(how["claude-code"])
    assert f'"output": {min(32_000, window // 4)}' in how["opencode"]


def test_clients_of_a_node_with_keys_get_a_place_for_theirs(
    node: FakeNode, run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(node, key="secret")
    monkeypatch.setenv("SGL_EXT_API_KEY", "secret")
    code, out, _ = run("clients")
    assert code == 0
    assert "ANTHROPIC_AUTH_TOKEN=YOUR_KEY" in out
    assert "SGL_KEY=YOUR_KEY codex" in out
    for name in ("claude-code", "codex", "opencode", "aider"):
        code, out, _ = run("clients", name, "--write")
        assert code == 0
        assert "YOUR_KEY" in out
    written = [path.read_text() for path in home.rglob("*sgl-ext*")]
    assert len(written) == 4
    assert not any("secret" in text or "YOUR_KEY" in text for text in written)


def test_a_written_file_is_the_client_s_own_beside_its_user_s(
    node: FakeNode, run: Run, home: Path
) -> None:
    serve(node)
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text('model = "mine"\n')
    code, out, _ = run("clients", "codex", "--write")
    path = home / ".codex" / "sgl-ext.config.toml"
    assert out.splitlines() == [f"Written: {path}", "Start it: codex --profile sgl-ext"]
    assert tomllib.loads(path.read_text())["model"] == "tiny"
    assert (home / ".codex" / "config.toml").read_text() == 'model = "mine"\n'
    code, out, _ = run("clients", "opencode", "--write")
    assert (code, out.splitlines()[1]) == (
        0,
        "Start it: OPENCODE_CONFIG=~/.config/opencode/sgl-ext.json opencode",
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_client_is_started_with_the_node_s_settings_and_the_key(
    node: FakeNode, home: Path, name: str
) -> None:
    serve(node, key="secret")
    programs = home / "programs"
    programs.mkdir()
    # In place of the client it prints what it was started with.
    program = programs / COMMANDS[name]
    program.write_text('#!/bin/sh\nenv\necho "ARGUMENTS $@"\nexit 7\n')
    program.chmod(0o700)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(home),
        "SGL_EXT_API_KEY": "secret",
        "ANTHROPIC_API_KEY": "another",
    }
    command = [sys.executable, "-m", "sgl_ext", "clients", name, "--run", "--url", node.url]
    ended = subprocess.run(
        [*command, "--", "-p", "two words"], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 7, ended.stderr
    shown = dict(line.split("=", 1) for line in ended.stdout.splitlines() if "=" in line)
    assert "secret" in [
        shown.get(key) for key in ("ANTHROPIC_AUTH_TOKEN", "SGL_KEY", "OPENAI_API_KEY")
    ]
    assert "ANTHROPIC_API_KEY" not in shown
    assert ended.stdout.splitlines()[-1].endswith("-p two words")
    if name == "opencode":
        assert Path(shown["OPENCODE_CONFIG"]).is_file()
    assert "secret" not in "".join(path.read_text() for path in home.rglob("*sgl-ext*"))


def test_what_cannot_be_written_or_started_is_said(
    node: FakeNode, run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(node)
    monkeypatch.setenv("PATH", str(home))
    (home / ".codex").write_text("no folder")
    for line, reason in (
        (["--write"], "--write and --run need the client's NAME"),
        (["codex", "more"], "ARGUMENTS are for --run"),
        (["qwen-code", "--write"], "reads no file of its own"),
        (["codex", "--write"], str(home / ".codex")),
        (["python", "--run"], "python is not started by a command"),
        (["codex", "--run"], "codex is not installed"),
    ):
        code, out, err = run("clients", *line)
        assert (code, out, reason in err) == (2, "", True), err
    serve(node, key="secret")
    monkeypatch.delenv("SGL_EXT_API_KEY", raising=False)
    code, _, err = run("clients", "codex", "--run")
    assert (code, "needs a key" in err) == (1, True)


@pytest.mark.parametrize("models", [{}, {"data": []}, {"data": [{"id_": 1}]}, [1]])
def test_what_is_no_node_is_said(node: FakeNode, run: Run, models: Any) -> None:
    node.answers["GET /v1/models"] = models
    code, out, err = run("clients")
    assert (code, out, "is no node of sgl-ext" in err) == (1, "", True)


def test_clients_get_the_small_model_that_the_node_has(node: FakeNode, run: Run) -> None:
    cards = [{"id": "large", "parent": None}, {"id": "small", "parent": None}]
    node.answers["GET /v1/models"] = {"data": cards}

    def variables(*more: str) -> str:
        return str(run("clients", "claude-code", "--url", node.url, *more)[1])

    assert "ANTHROPIC_DEFAULT_HAIKU_MODEL=small " in variables()
    node.answers["GET /v1/models/claude-haiku-4-5"] = {"id": "claude-haiku-4-5", "parent": "tiny"}
    assert "ANTHROPIC_DEFAULT_HAIKU_MODEL=tiny " in variables()
    assert "ANTHROPIC_DEFAULT_HAIKU_MODEL=own " in variables("--small-model", "own")
    found = json.loads(run("clients", "--json", "--url", node.url)[1])
    how = {each["name"]: each["how"] for each in found["clients"]}
    file = clients_of(Connection(node.url, "large", small="tiny"))["opencode"].file
    assert file is not None
    assert json.loads(file.text)["small_model"] == "sgl-ext/tiny"
    known = clients_of(Connection(node.url, "large", "secret", small="tiny"))
    codex, qwen = known["codex"].file, known["qwen-code"]
    assert codex is not None
    assert set(tomllib.loads(codex.text)["memories"].values()) == {"tiny"}
    assert qwen.file is not None
    assert "secret" not in qwen.file.text
    settings = json.loads(qwen.file.text)
    assert settings["fastModel"] == "tiny"
    assert [one["id"] for one in settings["modelProviders"]["openai"]] == ["large", "tiny"]
    assert qwen.start is not None
    assert qwen.start.environment["QWEN_CODE_SYSTEM_DEFAULTS_PATH"] == "~/.qwen/sgl-ext.json"
    assert "--weak-model openai/tiny" in how["aider"]


def test_a_node_of_one_model_sets_no_small_one(node: FakeNode, run: Run) -> None:
    node.answers["GET /v1/models"] = {"data": [{"id": "large"}]}
    assert "HAIKU" not in run("clients", "claude-code", "--url", node.url)[1]
