"""Real clients, at the versions of versions.toml.

And engines whose model follows a script, so that clients can use their tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest
import requests
from sgl_ext_cpu.node import Node, StartNode

from sgl_ext import keys
from tests.answers import answers_are_the_sdks, looked_at_answers
from tests.clients import scripts
from tests.clients.install import installed
from tests.waiting import HANG_S

__all__ = ["answers_are_the_sdks", "looked_at_answers"]


@pytest.fixture(scope="session")
def claude_code() -> Path:
    """The `claude` command."""
    return installed("Claude Code") / "claude"


@pytest.fixture(scope="session")
def codex() -> Path:
    """The `codex` command."""
    return installed("Codex") / "codex"


@pytest.fixture(scope="module")
def claude(node: Node) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=node.url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(node: Node) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{node.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def served_model(node: Node) -> str:
    """The model's name as the engines know it. `/v1/responses` refuses any other."""
    return _served_model(node)


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The homes of those who mend a greeting, each with that greeting in its folder `project`."""
    names = ("Ann", "Bob", "Cleo", "Dan", "OpenCode", "Qwen", "aider", "agents")
    found = {name: tmp_path_factory.mktemp(name) for name in names}
    for home in found.values():
        _greeting(home).parent.mkdir()
        _greeting(home).write_text(scripts.OLD)
    return found


@pytest.fixture(scope="session")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of keys of the scripted node, on which `root` is an admin."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text("[tenants.root]\nadmin = true\n")
    return path


@pytest.fixture(scope="session")
def api_keys(keys_file: Path) -> dict[str, str]:
    """A key of each tenant of the scripted node: the people, one who has no home, and others."""
    tenants = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Fay", "Gil", "sdks", "root")
    return {tenant: keys.add_key(keys_file, tenant)[0] for tenant in tenants}


@pytest.fixture(scope="session")
def scripted(
    start_node: StartNode,
    homes: dict[str, Path],
    keys_file: Path,
    api_keys: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Node]:
    """Two real engines, which answer by `tests/clients/scripts.py`, behind a balancer that
    wants one of `api_keys`."""
    folder = tmp_path_factory.mktemp("scripted")
    lines = [
        *scripts.for_claude_code("Ann", _greeting(homes["Ann"])),
        *scripts.for_claude_code("Bob", _greeting(homes["Bob"])),
        *scripts.for_codex("Cleo", _greeting(homes["Cleo"])),
        *scripts.for_codex("Dan", _greeting(homes["Dan"])),
        *scripts.for_claude_code("agents", _greeting(homes["agents"])),
        *scripts.for_open_code("OpenCode", _greeting(homes["OpenCode"])),
        *scripts.for_qwen_code("Qwen", _greeting(homes["Qwen"])),
        *scripts.for_aider("aider", _greeting(homes["aider"])),
        *scripts.for_sdks(),
        *scripts.for_odd_calls(),
        *scripts.for_late_tools(),
        *scripts.for_schemas(),
        *scripts.for_libraries(),
        *scripts.for_structures(),
        *scripts.for_short_sessions(),
        *scripts.for_written_calls(),
    ]
    script = folder / "script.jsonl"
    script.write_text("".join(json.dumps(line) + "\n" for line in lines))
    environment = {"SGLEXT_CPU_SCRIPT": str(script)}
    flags = ("--instances", "2", "--keys", str(keys_file))
    with start_node(folder / "logs", *flags, environment=environment) as started:
        yield started


@pytest.fixture(scope="session")
def scripted_model(scripted: Node, api_keys: dict[str, str]) -> str:
    """The same of the scripted engines."""
    return _served_model(scripted, api_keys["sdks"])


def _served_model(node: Node, key: str = "any") -> str:
    headers = {"x-api-key": key}
    models = requests.get(f"{node.url}/v1/models", headers=headers, timeout=HANG_S).json()["data"]
    return str(models[0]["id"])


def _greeting(home: Path) -> Path:
    return home / "project" / "hello.py"
