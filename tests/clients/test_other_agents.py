"""Other agents as their users run them: two sessions, each of which mends the same file."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from sgl_ext_cpu.node import Node

from tests.clients import table
from tests.clients.agents import assert_read_from_cache
from tests.clients.install import installed
from tests.clients.recorder import Exchange, recording
from tests.clients.scripts import NEW, OLD, asked
from tests.waiting import HANG_S

pytestmark = [pytest.mark.installs, pytest.mark.other_clients]
_OPEN_CODE = {
    "chat (`@ai-sdk/openai-compatible`)": "@ai-sdk/openai-compatible",
    "messages (`@ai-sdk/anthropic`)": "@ai-sdk/anthropic",
    "responses (`@ai-sdk/openai`)": "@ai-sdk/openai",
}


# The rest is behind the prompt: what Claude Code tells of its environment, and aider's reminder.
_SHARED = {"claude-agent-sdk": 0.75, "aider": 0.7}


class Place(NamedTuple):
    """Where an agent runs, and the node that it uses."""

    url: str
    key: str
    model: str
    home: Path

    @property
    def folder(self) -> Path:
        return self.home / "project"


def run(command: list[str | Path], place: Place, **environment: str) -> None:
    done = subprocess.run(
        command,
        env={"PATH": os.environ["PATH"], "HOME": str(place.home), **environment},
        cwd=place.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def open_code(place: Place, protocol: str, prompt: str) -> None:
    provider = {
        "npm": _OPEN_CODE[protocol],
        "options": {"baseURL": f"{place.url}/v1", "apiKey": place.key},
        "models": {place.model: {"limit": {"context": 32000, "output": 1000}}},
    }
    config = {
        "provider": {"node": provider},
        "small_model": f"node/{place.model}",
        "autoupdate": False,
        "share": "disabled",
    }
    (place.folder / "opencode.json").write_text(json.dumps(config))
    command = installed("OpenCode") / "opencode"
    run(
        [command, "run", "--model", f"node/{place.model}", prompt],
        place,
        OPENCODE_DISABLE_MODELS_FETCH="1",
    )


def qwen_code(place: Place, protocol: str, prompt: str) -> None:
    run(
        [installed("Qwen Code") / "qwen", "--yolo", "--auth-type", "openai", "-p", prompt],
        place,
        OPENAI_BASE_URL=f"{place.url}/v1",
        OPENAI_API_KEY=place.key,
        OPENAI_MODEL=place.model,
        NO_BROWSER="1",
    )


def aider(place: Place, protocol: str, prompt: str) -> None:
    flags = ["--yes-always", "--no-git", "--no-check-update", "--no-show-model-warnings"]
    # It asks for no counts of a stream.
    flags += ["--no-stream", "--analytics-disable", "--edit-format", "diff", "--message", prompt]
    run(
        [installed("aider") / "aider", "--model", f"openai/{place.model}", *flags, "hello.py"],
        place,
        OPENAI_API_BASE=f"{place.url}/v1",
        OPENAI_API_KEY=place.key,
    )


def agent_sdk(place: Place, protocol: str, prompt: str) -> None:
    driver = Path(__file__).with_name("drivers") / "agent_sdk.py"
    run(
        [installed("claude-agent-sdk") / "python", driver, prompt],
        place,
        NODE_MODEL=place.model,
        ANTHROPIC_BASE_URL=place.url,
        ANTHROPIC_API_KEY=place.key,
        DISABLE_TELEMETRY="1",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="400",
    )


AGENTS = [
    *(
        ("OpenCode", "OpenCode", open_code, protocol, 3, "a provider in `opencode.json`")
        for protocol in _OPEN_CODE
    ),
    ("Qwen Code", "Qwen", qwen_code, "chat", 3, "`OPENAI_BASE_URL`, `OPENAI_MODEL`"),
    ("aider", "aider", aider, "chat", 1, "`OPENAI_API_BASE`"),
    ("claude-agent-sdk", "agents", agent_sdk, "messages", 3, "`ANTHROPIC_BASE_URL`"),
]


@pytest.mark.parametrize(
    ("client", "name", "agent", "protocol", "requests", "settings"),
    AGENTS,
    ids=[f"{agent[0]} {agent[3]}" for agent in AGENTS],
)
def test_a_second_session_reads_what_it_shares_from_the_cache(
    scripted: Node,
    scripted_model: str,
    api_keys: Mapping[str, str],
    homes: Mapping[str, Path],
    client: str,
    name: str,
    agent: object,
    protocol: str,
    requests: int,
    settings: str,
) -> None:
    assert callable(agent)
    sessions: list[list[Exchange]] = []
    for first in ("", "Be quick and mind the style. "):
        (homes[name] / "project" / "hello.py").write_text(OLD)
        with recording(scripted.url) as recorder:
            place = Place(recorder.url, api_keys["sdks"], scripted_model, homes[name])
            agent(place, protocol, first + asked(name))
        assert (place.folder / "hello.py").read_text() == NEW
        assert recorder.problems() == ""
        # A title of the session is another request, which offers no tools.
        asks = recorder.generated()
        sessions.append([each for each in asks if b'"tools"' in each.body or requests == 1])
        turns = [turn for each in sessions[-1] if (turn := each.turn())]
        assert_read_from_cache(turns, requests=requests)
    first_turn = sessions[1][0].turn()
    assert first_turn
    assert first_turn.cached_tokens >= _SHARED.get(client, 0.9) * first_turn.prompt_tokens
    table.note(client, protocol, first_turn, requests=requests, set=settings)
