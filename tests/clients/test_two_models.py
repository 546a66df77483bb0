"""Claude Code with its small model set, on one address for two models of different templates."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import requests
import sgl_ext_cpu
from sgl_ext_cpu.model import make_model
from sgl_ext_cpu.node import free_port, local_model, running_process

from tests.clients.agents import Project
from tests.clients.install import installed
from tests.clients.test_claude_code import _ONE_WORD
from tests.waiting import HANG_S, until

pytestmark = [pytest.mark.installs, pytest.mark.slow]

CONFIG = """
[launch]
platform = "cpu"
log-dir = "{log_dir}"
[balancer]
port = {port}
drain-min-s = 0
[[models]]
name = "large"
path = "{large}"
[models.engine]
reasoning-parser = "qwen3"
tool-call-parser = "qwen25"
[[models]]
name = "small"
path = "{small}"
[models.engine]
tool-call-parser = "llama3"
[engine]
max-total-tokens = 98304
[aliases]
"claude-haiku-*" = "small"
"""
TEMPLATES = Path(sgl_ext_cpu.__file__).with_name("templates")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("two"), free_port()
    small = make_model(folder / "small", "tiny", 7)
    shutil.copy(TEMPLATES / "llama33.jinja", small / "chat_template.jinja")
    config = folder / "node.toml"
    config.write_text(
        CONFIG.format(log_dir=folder / "run", port=port, large=local_model("tiny"), small=small)
    )
    output = folder / "launch.out"
    command = [sys.executable, "-m", "sgl_ext", "serve", "--config", str(config)]
    ready = "sgl-ext is serving"
    with running_process(command, output, lambda: ready in output.read_text()):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def project(url: str, claude_code: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    home, folder = (tmp_path_factory.mktemp(name) for name in ("home", "project"))
    small = {"ANTHROPIC_DEFAULT_HAIKU_MODEL": "small"}
    return replace(
        Project(claude_code, url, home, folder, _ONE_WORD, output_tokens=16), variables=small
    )


def models(url: str) -> dict[str, dict[str, Any]]:
    state = requests.get(f"{url}/sgl_ext/state", timeout=HANG_S).json()
    return {row["name"]: row for row in state["models"]}


def asked(url: str) -> dict[str, float]:
    """How many prompt tokens the engines of each model were sent."""
    page = requests.get(f"{url}/metrics", timeout=HANG_S).text.splitlines()
    found = {"large": 0.0, "small": 0.0}
    for line in page:
        for number, name in enumerate(found):
            if line.startswith(f'sgl_ext_prompt_tokens_total{{worker="engine-{number}'):
                found[name] += float(line.rpartition(" ")[2])
    return found


def restart_of(url: str) -> dict[str, Any]:
    return cast(dict[str, Any], requests.get(f"{url}/sgl_ext/restart", timeout=HANG_S).json())


def test_each_model_answers_claude_code_by_its_own_name(project: Project, url: str) -> None:
    for model, name in (("large", "large"), ("haiku", "small"), ("claude-haiku-4-5", "small")):
        before = asked(url)
        ended = project.ask("Say hello.", "--model", model)
        assert ended["result"] == '"hello"'
        grown = {each for each, tokens in asked(url).items() if tokens > before[each]}
        assert grown == {name}


def test_one_model_restarts_while_claude_code_goes_on_with_the_other(
    project: Project, url: str
) -> None:
    order = requests.post(f"{url}/sgl_ext/restart", json={"model": "small"}, timeout=HANG_S)
    assert [each["name"] for each in order.json()["engines"]] == ["engine-1"]
    ended: list[str] = []
    waits = threading.Thread(
        target=lambda: ended.append(project.ask("Say hello.", "--model", "haiku")["result"])
    )
    waits.start()
    assert project.ask("Say hello.", "--model", "large")["result"] == '"hello"'
    waits.join(HANG_S)
    assert ended == ['"hello"']
    # The engine answers before the restart has noted that it does.
    until(lambda: restart_of(url)["state"] != "running")
    assert (restart_of(url)["state"], restart_of(url)["error"]) == ("done", None)
    assert {name: row["ready"] for name, row in models(url).items()} == {"large": 1, "small": 1}


def person(url: str, home: Path, client: str) -> dict[str, str]:
    """What someone's shell has who wrote a client's file with `sgl-ext clients`, but for the
    variables that the command says to set."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
    command = [sys.executable, "-m", "sgl_ext", "clients", client, "--url", url]
    environ = {**os.environ, **environment}
    subprocess.run([*command, "--write"], env=environ, check=True, timeout=HANG_S)
    shown = subprocess.run([*command, "--json"], env=environ, check=True, capture_output=True)
    line = json.loads(shown.stdout)["clients"][0]["how"].splitlines()[-1]
    words = [word.partition("=") for word in shlex.split(line)]
    given = {name: value for name, mark, value in words if mark and name.isupper()}
    return environment | {n: value.replace("~", str(home), 1) for n, value in given.items()}


def test_qwen_code_takes_the_small_model_beside_its_own(url: str, tmp_path: Path) -> None:
    before, environment = asked(url), person(url, tmp_path, "qwen-code")
    command = [str(installed("Qwen Code") / "qwen"), "--auth-type", "openai", "-p", "Say hello."]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, timeout=HANG_S
    )
    assert done.returncode == 0
    assert all(tokens > before[each] for each, tokens in asked(url).items())


def test_codex_makes_memories_with_the_small_model(url: str, codex: Path, tmp_path: Path) -> None:
    environment = person(url, tmp_path, "codex")
    command = [str(codex), "exec", "--profile", "sgl-ext", "--skip-git-repo-check"]
    command += ["--enable", "memories", "Say hello."]
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL)
    with process:
        try:  # what it asks for has no end, of a model with random weights
            until(lambda: bool(models(url)["small"]["in_flight"]))
        finally:
            process.kill()
