"""The command-line agents as their users run them: one prompt, to its end."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple


class Turn(NamedTuple):
    """One request of a session, as the client counts it: its prompt, and how much was cached."""

    prompt_tokens: int
    cached_tokens: int


def assert_read_from_cache(turns: Sequence[Turn], *, requests: int) -> None:
    """Each turn read at least 90 % of the one before it from the cache."""
    assert len(turns) == requests
    for before, after in pairwise(turns):
        assert after.prompt_tokens > before.prompt_tokens
        assert after.cached_tokens >= 0.9 * before.prompt_tokens, turns


@dataclass(frozen=True)
class Project:
    """A folder that Claude Code works in, and the home of the person who works there.

    `extra` is laid over the body of every request, and `key` is sent as Anthropic's. `variables`
    are set besides the usual ones.
    """

    claude: Path
    url: str
    home: Path
    folder: Path
    extra: Mapping[str, Any] = field(default_factory=dict)
    output_tokens: int = 64
    key: str = "any"
    variables: Mapping[str, str] = field(default_factory=dict)

    def run(self, prompt: str, *flags: str, **extra: Any) -> list[dict[str, Any]]:
        """Runs `claude -p`, and returns the events of its session; the last one is the result."""
        command = [str(self.claude), "-p", prompt, "--model", "tiny", "--verbose"]
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "DISABLE_TELEMETRY": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(self.output_tokens),
            **self.variables,
        }
        if body := extra or self.extra:
            environment["CLAUDE_CODE_EXTRA_BODY"] = json.dumps(body)
        output = _run(
            [*command, "--output-format", "stream-json", *flags], environment, self.folder
        )
        events = [json.loads(line) for line in output.splitlines()]
        assert events[-1]["type"] == "result"
        assert not events[-1]["is_error"], events[-1]
        return events

    def ask(self, prompt: str, *flags: str, **extra: Any) -> dict[str, Any]:
        """Runs `claude -p`, and returns what it says of its session."""
        return self.run(prompt, *flags, **extra)[-1]


def answers(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content blocks that Claude Code was answered with, in order."""
    messages = [event["message"] for event in events if event["type"] == "assistant"]
    return [block for message in messages for block in message["content"]]


def claude_turns(events: Sequence[dict[str, Any]]) -> list[Turn]:
    """The requests of a session. Claude Code has an event for each block of an answer."""
    messages = [event["message"] for event in events if event["type"] == "assistant"]
    usages = {message["id"]: message["usage"] for message in messages}
    return [Turn(prompt_tokens(usage), read_tokens(usage)) for usage in usages.values()]


def prompt_tokens(usage: Mapping[str, int]) -> int:
    """The whole prompt: Anthropic counts what was not cached, what was put there, and the rest."""
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + read_tokens(usage)


def read_tokens(usage: Mapping[str, int]) -> int:
    return usage["cache_read_input_tokens"]


_CODEX_CONFIG = """
model = {model}
model_provider = "sgl_ext"
check_for_update_on_startup = false
{settings}

[model_providers.sgl_ext]
name = "sgl-ext"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "SGL_EXT_KEY"
supports_websockets = {websockets}

[analytics]
enabled = false
"""


class Person:
    """Someone with a home, where Codex's configuration is, and a folder for each project.

    `settings` are lines of that configuration; `key` is sent as OpenAI's; `websockets` is whether
    one connection has all requests.
    """

    def __init__(
        self,
        codex: Path,
        url: str,
        model: str,
        home: Path,
        settings: str = "",
        key: str = "any",
        *,
        websockets: bool = False,
    ) -> None:
        self._codex = codex
        self._key = key
        self.home = home
        (home / ".codex").mkdir()
        about = {"model": json.dumps(model), "websockets": json.dumps(websockets)}
        config = _CODEX_CONFIG.format(**about, url=url, settings=settings)
        (home / ".codex" / "config.toml").write_text(config)

    def run(self, project: str, *words: str) -> list[dict[str, Any]]:
        """Runs `codex exec` in a project's folder, and returns its events."""
        folder = self.home / project
        folder.mkdir(exist_ok=True)
        flags = ["--strict-config", "--skip-git-repo-check", "--json"]
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "SGL_EXT_KEY": self._key,
        }
        output = _run([str(self._codex), "exec", *flags, *words], environment, folder)
        return [json.loads(line) for line in output.splitlines()]

    def turns(self) -> list[Turn]:
        """The requests of this person's only session, from Codex's own record of it."""
        (record,) = (self.home / ".codex" / "sessions").rglob("*.jsonl")
        payloads = [json.loads(line)["payload"] for line in record.read_text().splitlines()]
        usages = [
            payload["info"]["last_token_usage"]
            for payload in payloads
            if payload.get("type") == "token_count"
        ]
        return [Turn(usage["input_tokens"], usage["cached_input_tokens"]) for usage in usages]


def completed(events: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Codex's items of a type: `agent_message`, `reasoning`, `command_execution`, ..."""
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in items if item["type"] == kind]


def _run(command: list[str], environment: Mapping[str, str], folder: Path) -> str:
    done = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
