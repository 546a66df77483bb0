"""The other verbs: explain, doctor, pins, clients, bench, reload, and those that pass on."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from sgl_ext.cli import bench
from sgl_ext.cli.app import app
from tests.cli.conftest import Run
from tests.cli.fake_node import FakeNode, Refused, state_of

ROOT = Path(__file__).parents[2]
EXPLAINED = {
    "prompt_tokens": 512,
    "worker": "engine-0",
    "reason": "home",
    "workers": [
        {"name": "engine-0", "cost": 12.5, "recent": 0, "open": True},
        {"name": "engine-1", "cost": 1600.0, "recent": 0, "open": False},
    ],
}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"model": "m", "input": "Hi"}, "/v1/responses"),
        ({"model": "m", "prompt": "Hi"}, "/v1/completions"),
        ({"text": "Hi"}, "/generate"),
        ({"messages": [], "system": "You are"}, "/v1/messages"),
        ({"messages": [], "tools": [{"name": "t", "input_schema": {}}]}, "/v1/messages"),
        ({"messages": [], "tools": [{"type": "function"}]}, "/v1/chat/completions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_body_is_explained_as_a_request_to_its_path(
    node: FakeNode, run: Run, tmp_path: Path, body: Any, path: str
) -> None:
    node.answers[f"POST /sgl_ext/explain{path}"] = EXPLAINED
    (tmp_path / "body.json").write_text(json.dumps(body))
    code, out, err = run("explain", str(tmp_path / "body.json"))
    assert (code, err) == (0, f"sgl-ext: explaining it as POST {path}\n")
    assert node.asked == [(f"POST /sgl_ext/explain{path}", body)]
    rows = [line.split() for line in out.splitlines()]
    assert ["prompt_tokens", "512"] in rows
    assert ["engine", "cost", "open"] in rows
    assert ["engine-1", "1,600", "no"] in rows


def test_a_body_comes_from_stdin_and_its_path_can_be_given(
    node: FakeNode, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.answers["POST /sgl_ext/explain/v1/messages"] = EXPLAINED
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"messages": []}')))
    code, out, err = run("explain", "-", "--path", "/v1/messages", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == EXPLAINED


def test_a_past_request_is_explained_by_its_id(node: FakeNode, run: Run) -> None:
    node.answers["GET /sgl_ext/requests/req_1"] = EXPLAINED
    code, out, _ = run("explain", "req_1", "--json")
    assert (code, json.loads(out)) == (0, EXPLAINED)
    past = {**EXPLAINED, "outcome": "complete", "status": 200, "queue_ms": 0, "ttft_ms": 109}
    node.answers["GET /sgl_ext/requests/req_1"] = past
    assert "first token after 109 ms." in run("explain", "req_1")[1].rstrip().split("\n\n")[-1]
    node.answers["GET /sgl_ext/requests/req_2"] = Refused(404, "no request has this id")
    code, _, err = run("explain", "req_2")
    assert (code, err.count("\n")) == (1, 1)
    assert "req_2: is no file here, and" in err
    assert "no request has this id" in err


@pytest.mark.parametrize("text", ["{", "[]", '{"model": "m"}'])
def test_what_is_no_request_is_not_sent(
    node: FakeNode, run: Run, tmp_path: Path, text: str
) -> None:
    (tmp_path / "body.json").write_text(text)
    assert run("explain", str(tmp_path / "body.json"))[0] == 2
    assert not node.asked


def test_doctor_reads_a_log_as_before_and_else_the_running_node(
    node: FakeNode, run: Run, tmp_path: Path
) -> None:
    node.answers["GET /sgl_ext/divergences"] = {"harnesses": []}
    assert run("doctor") == (0, "There are no prompts yet.\n", "")
    line = {"harness": "codex", "model": "m", "prompt_tokens": 100, "divergence": None}
    (tmp_path / "log").write_text(json.dumps(line))
    code, out, _ = run("doctor", str(tmp_path / "log"), "--json")
    assert (code, json.loads(out)["harnesses"][0]["prompts"]) == (0, 1)
    assert run("doctor", str(tmp_path / "none"))[0] == 2


PIN = state_of()["pins"][0]


def test_pins_are_listed_and_deleted(node: FakeNode, run: Run) -> None:
    node.answers["GET /v1/pins"] = {"pins": [PIN]}
    code, out, _ = run("pins")
    assert code == 0
    row = f"{PIN['prefix']} 599 device 2 59 min 59 s alice s1 engine-0@box:30000"
    assert out.splitlines()[1].split() == row.split()
    assert json.loads(run("pins", "--json")[1]) == {"pins": [PIN]}

    node.answers["DELETE /v1/pins"] = {"http://a": {"deleted": 1}, "http://b": {"deleted": 0}}
    assert run("pins", "delete", "aa", "bb") == (0, "aa: 1 deleted\nbb: 1 deleted\n", "")
    assert [asked for asked, _ in node.asked[-2:]] == [
        "DELETE /v1/pins?prefix=aa",
        "DELETE /v1/pins?prefix=bb",
    ]
    assert run("pins", "delete", "--session", "a b")[0] == 0
    assert node.asked[-1][0] == "DELETE /v1/pins?session=a%20b"


def test_a_pin_that_is_not_there_is_exit_code_1(node: FakeNode, run: Run) -> None:
    node.answers["GET /v1/pins"] = {"pins": []}
    assert run("pins") == (0, "There are no pins.\n", "")
    node.answers["DELETE /v1/pins"] = {"http://a": {"deleted": 0}}
    assert run("pins", "delete", "aa") == (1, "aa: no such pin\n", "")
    code, out, _ = run("pins", "delete", "aa", "--json")
    assert (code, json.loads(out)) == (1, {"deleted": {"aa": 0}})


def test_bench_runs_sglang_s_own_load_with_the_node_s_model_and_key(
    node: FakeNode, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # In place of Python it prints its arguments and the key that it got.
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho benchmark_args=...\necho "$OPENAI_API_KEY$SGL_EXT_API_KEY" "$@"\nexit 3\n'
    )
    python.chmod(0o700)
    monkeypatch.setattr(bench, "find_spec", lambda name: True)
    monkeypatch.setattr(bench.sys, "executable", str(python))
    monkeypatch.setenv("SGL_EXT_API_KEY", "secret")
    node.answers["GET /model_info"] = {"model_path": str(tmp_path)}
    node.answers["GET /v1/models"] = {"data": [{"id": "tiny"}]}
    code, out, err = run("bench", "--requests", "9", "--", "--seed", "3")
    assert (code, err.splitlines()[-1]) == (
        1,
        "sgl-ext: bench: bench_serving ended with exit code 3",
    )
    assert "secret" not in err
    key, *words = out.split()
    assert key == "secret"
    flags = dict(zip(words[2::2], words[3::2], strict=False))
    assert flags["--base-url"] == node.url
    assert flags["--model"] == str(tmp_path)
    assert flags["--served-model-name"] == "tiny"
    assert flags["--num-prompts"] == "8"
    assert words[-2:] == ["--seed", "3"]


def test_bench_says_what_it_needs(
    node: FakeNode, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.answers["GET /model_info"] = {"model_path": "/nowhere/model"}
    monkeypatch.setattr(bench, "find_spec", lambda name: True)
    code, _, err = run("bench")
    assert (code, "/nowhere/model, which is not on this machine" in err) == (2, True)
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    code, _, err = run("bench")
    assert (code, "pip install 'sgl-ext[engine]'" in err) == (2, True)


def test_reload_says_what_has_changed_and_what_cannot(node: FakeNode, run: Run) -> None:
    fixed = [{"key": "port", "why": "the balancer listens there"}]
    document = {"changed": ["tenants.alice"], "unchanged_until_restart": fixed}
    node.answers["POST /sgl_ext/reload"] = document
    code, out, _ = run("reload")
    assert code == 0
    assert out.splitlines() == [
        "changed: tenants.alice",
        "not before a restart: port: the balancer listens there",
    ]
    assert json.loads(run("reload", "--json")[1]) == document
    refused = {"id": "engine-0", "applied": False, "why": "it does not answer"}
    node.answers["POST /sgl_ext/reload"] = document | {"engines": [refused]}
    code, out, _ = run("reload")
    assert (code, out.splitlines()[-1]) == (1, "not by engine-0: it does not answer")
    assert run("reload", "--json")[0] == 1
    node.answers["POST /sgl_ext/reload"] = {"changed": [], "unchanged_until_restart": []}
    assert run("reload")[1] == "nothing has changed\n"


def test_serve_passes_all_its_words_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[list[str]] = []
    monkeypatch.setattr("sgl_ext.launch.main", got.append)
    words = ["--model-path", "m", "--tp", "2", "-x", "--mem=0.5", "word", "--no-a", "--help", "-h"]
    assert run("serve", *words)[0] == 0
    assert got == [words]


def test_keys_are_made_in_a_file(run: Run, tmp_path: Path) -> None:
    file = str(tmp_path / "keys.toml")
    code, key, _ = run("keys", file, "add", "alice", "--note", "her laptop")
    assert (code, key[:4]) == (0, "sgl-")
    assert "alice" in run("keys", file, "list")[1]
    assert run("keys", file, "revok", "x")[0] == 2


def test_the_module_is_the_command_and_has_a_version() -> None:
    command = [sys.executable, "-m", "sgl_ext", "--version"]
    said = subprocess.check_output(command, cwd=ROOT, text=True)
    assert said.startswith("sgl-ext 0.")
    assert ", SGLang " in said


def test_serve_s_help_is_the_launcher_s(run: Run) -> None:
    code, out, _ = run("serve", "--help")
    assert code == 0
    assert " Usage: sgl-ext serve [FLAG ...]" in out
    assert "─ Pins and prefill ahead ─" in out
    assert "--ray-address" in out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_verbs_from_the_command(
    run: Run, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    monkeypatch.setenv("_SGL_EXT_COMPLETE", "")  # it is changed below
    script = run("completion", shell)[1]
    assert f"_SGL_EXT_COMPLETE=complete_{shell}" in script
    words = {"COMP_WORDS": "sgl-ext re", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "sgl-ext re"}
    words |= {"_SGL_EXT_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    out = run()[1]
    assert "restart" in out
    assert "reload" in out
    assert "status" not in out


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("serve --drain-s", ["--drain-s"]),
        ("recipes gpu", ["gpu.toml"]),
        ("clients cod", ["codex"]),
        ("drain engine", ["engine-0", "engine-1"]),
        ("restart engine-1", ["engine-1"]),
        ("keys x", []),
    ],
)
def test_a_shell_gets_flags_recipes_clients_and_engines(
    node: FakeNode, run: Run, monkeypatch: pytest.MonkeyPatch, words: str, found: list[str]
) -> None:
    rows = [{"id": "engine-0@box:30000"}, {"id": "engine-1@box:30000"}]
    node.answers["GET /sgl_ext/workers"] = {"workers": rows}
    monkeypatch.setenv("_SGL_EXT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"sgl-ext {words}")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert run()[1].split() == found


def test_a_shell_waits_for_no_module_that_completions_do_not_need() -> None:
    code = "import sys, sgl_ext.cli.app, sgl_ext.settings.fields; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    needless = {"aiohttp", "http.client", "importlib.metadata", "prometheus_client", "tomlkit"}
    assert needless.isdisjoint(done.stdout.split())


def test_the_help_and_the_manual_list_every_verb(run: Run) -> None:
    code, out, _ = run()
    assert code == 0
    manual = (ROOT / "docs/reference/command.md").read_text()
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    for verb in group.commands:
        assert f" {verb} " in out
        assert f"| `{verb}` | `" in manual


def test_help_is_that_of_the_option_and_version_that_of_its(run: Run) -> None:
    assert run("help") == run("--help")
    assert run("help", "pins", "delete") == run("pins", "delete", "--help")
    assert run("help", "statsu")[0] == 2
    assert run("version") == run("--version")
