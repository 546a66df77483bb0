"""Claude Code through the balancer: its sessions share what they have in common.

Random weights do not know when to stop, so each request asks for an answer that
a grammar holds to one word. All else is what Claude Code sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from sgl_ext_cpu.node import Node

from tests.clients import table
from tests.clients.agents import Project, Turn, prompt_tokens, read_tokens
from tests.waiting import HANG_S

pytestmark = pytest.mark.installs

_ONE_WORD = {
    "thinking": {"type": "disabled"},
    "tool_choice": {"type": "none"},
    "output_config": {"format": {"type": "json_schema", "schema": {"const": "hello"}}},
}
_STRIPPED = "sgl_ext_headers_stripped_total"


@dataclass(frozen=True)
class Sessions:
    """What two sessions of one project answered, and the headers each engine stripped."""

    project: Project
    first: dict[str, Any]
    second: dict[str, Any]
    stripped: tuple[float, ...]


@pytest.fixture(scope="module")
def sessions(node: Node, claude_code: Path, tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    """Two sessions with different prompts, one after the other, on empty caches."""
    home, folder = (tmp_path_factory.mktemp(name) for name in ("home", "project"))
    project = Project(claude_code, node.url, home, folder, _ONE_WORD)
    node.flush()
    before = node.metric_by_engine(_STRIPPED)
    first, second = project.ask("Say hello."), project.ask("What is two and two?")
    grown = tuple(
        now - then for now, then in zip(node.metric_by_engine(_STRIPPED), before, strict=True)
    )
    return Sessions(project, first, second, grown)


def test_each_session_ends_with_an_answer(sessions: Sessions) -> None:
    assert sessions.first["result"] == sessions.second["result"] == '"hello"'
    assert sessions.first["session_id"] != sessions.second["session_id"]


def test_a_second_session_reads_tools_and_system_prompt_from_the_cache(sessions: Sessions) -> None:
    # Everything in front of the prompt is 81 % of the whole. Behind it Claude Code puts
    # one more system message, which no prefix can share between prompts. With the header
    # in place the sessions share a few dozen tokens.
    assert _read(sessions.first) == 0
    assert _read(sessions.second) >= 0.75 * _prompt(sessions.second)
    assert _prompt(sessions.second) > 10_000
    turn = Turn(_prompt(sessions.second), _read(sessions.second))
    table.note("Claude Code", "messages", turn)


def test_the_header_is_stripped_and_one_engine_gets_both_sessions(sessions: Sessions) -> None:
    grown = [count for count in sessions.stripped if count]
    assert len(sessions.stripped) == 2
    assert len(grown) == 1
    assert grown[0] >= 2


def test_the_balancer_knows_the_client(sessions: Sessions, node: Node) -> None:
    found = requests.get(f"{node.url}/sgl_ext/state", timeout=HANG_S).json()["sessions"]
    mine = [each for each in found if each["harness"] == "claude-code"]
    assert "main" in {each["class"] for each in mine}
    assert len({each["harness_session"] for each in mine} - {None}) >= 2


def test_the_next_turn_reads_the_conversation_so_far_from_the_cache(sessions: Sessions) -> None:
    turn = sessions.project.ask("And why?", "--continue")
    assert turn["session_id"] == sessions.second["session_id"]
    assert _prompt(turn) > _prompt(sessions.second)
    assert _read(turn) >= 0.99 * _prompt(turn)


def test_what_claude_code_marks_is_pinned_and_counted(sessions: Sessions, node: Node) -> None:
    usage = sessions.first["usage"]
    assert usage["cache_creation_input_tokens"] >= 0.9 * _prompt(sessions.first)
    kept = requests.get(f"{node.url}/v1/pins", timeout=HANG_S).json()["pins"]
    mine = {sessions.first["session_id"], sessions.second["session_id"]}
    assert mine & {pin["session"] for pin in kept}
    longest = max(pin["tokens"] for pin in kept)
    assert longest >= 0.9 * _prompt(sessions.first)


def _prompt(answer: dict[str, Any]) -> int:
    return prompt_tokens(answer["usage"])


def _read(answer: dict[str, Any]) -> int:
    return read_tokens(answer["usage"])
