"""The agents use their own tools, through whole loops: a model by script, all else real.

Two people let Claude Code mend a file at the same time, each in a home of their own, and a
third one lets Codex do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench._node import Node
from tests.clients.agents import (
    Person,
    Project,
    answers,
    assert_read_from_cache,
    claude_turns,
    completed,
)
from tests.clients.scripts import NEW, asked, mended

pytestmark = [pytest.mark.engine, pytest.mark.npm]

_TWO = ("Ann", "Bob")
_Events = Sequence[dict[str, Any]]


@pytest.fixture(scope="module")
def sessions(scripted: Node, claude_code: Path, homes: dict[str, Path]) -> dict[str, _Events]:
    """What Claude Code went through for two people at once."""

    def mend(name: str) -> _Events:
        home = homes[name]
        project = Project(claude_code, scripted.url, home, home / "project", output_tokens=400)
        return project.run(asked(name), "--permission-mode", "acceptEdits")

    scripted.flush()
    with ThreadPoolExecutor() as threads:
        return dict(zip(_TWO, threads.map(mend, _TWO), strict=True))


@pytest.mark.parametrize("name", _TWO)
def test_claude_code_mends_each_persons_own_file(
    sessions: dict[str, _Events], homes: dict[str, Path], name: str
) -> None:
    assert (homes[name] / "project" / "hello.py").read_text() == NEW
    result = sessions[name][-1]
    assert result["result"].strip() == mended(name)
    assert result["num_turns"] == 3
    assert result["stop_reason"] == "end_turn"


@pytest.mark.parametrize("name", _TWO)
def test_claude_code_is_told_thoughts_and_calls(
    sessions: dict[str, _Events], homes: dict[str, Path], name: str
) -> None:
    blocks = answers(sessions[name])
    thoughts = [block["thinking"].strip() for block in blocks if block["type"] == "thinking"]
    assert thoughts[0] == "The file comes first."
    assert blocks[-1]["text"].strip() == mended(name)
    read, edit = (block for block in blocks if block["type"] == "tool_use")
    file = str(homes[name] / "project" / "hello.py")
    assert (read["name"], read["input"]) == ("Read", {"file_path": file})
    # Claude Code adds what was left open.
    change = {"file_path": file, "old_string": "hello", "new_string": "good day"}
    assert edit["name"] == "Edit"
    assert edit["input"].items() >= change.items()


@pytest.mark.parametrize("name", _TWO)
def test_each_turn_of_claude_code_reads_the_one_before_it_from_the_cache(
    sessions: dict[str, _Events], name: str
) -> None:
    turns = claude_turns(sessions[name])
    assert_read_from_cache(turns, requests=3)
    assert turns[0].prompt_tokens > 20_000


def test_codex_mends_a_file(
    scripted: Node, codex: Path, scripted_model: str, homes: dict[str, Path]
) -> None:
    home = homes["Cleo"]
    # A sandbox of its own is more than a container may have.
    settings = 'sandbox_mode = "danger-full-access"'
    person = Person(codex, scripted.url, scripted_model, home, settings)
    events = person.run("project", asked("Cleo"))

    assert (home / "project" / "hello.py").read_text() == NEW
    (command,) = completed(events, "command_execution")
    assert (command["aggregated_output"], command["exit_code"]) == ("print('hello')\n", 0)
    (change,) = completed(events, "file_change")
    assert change["status"] == "completed"
    assert completed(events, "reasoning")[0]["text"].strip() == "The file comes first."
    assert completed(events, "agent_message")[-1]["text"].strip() == mended("Cleo")
    turns = person.turns()
    assert_read_from_cache(turns, requests=3)
    assert turns[0].prompt_tokens > 5_000
