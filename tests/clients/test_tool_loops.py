"""The agents use their own tools, through whole loops: a model by script, all else real.

Each of them is a tenant with a key, in a home with a file to be mended. Two let Claude Code
mend theirs at the same time, and two let Codex. Then Eve sends what Ann has sent, from her home,
while Bob sends once more what he has sent himself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
from sgl_ext_cpu.node import Node

from tests.clients import table
from tests.clients.agents import (
    Person,
    Project,
    Turn,
    answers,
    assert_read_from_cache,
    claude_turns,
    completed,
)
from tests.clients.recorder import recording
from tests.clients.scripts import NEW, OLD, asked, mended
from tests.waiting import HANG_S

pytestmark = pytest.mark.installs

_CLAUDE_CODE, _CODEX = ("Ann", "Bob"), ("Cleo", "Dan")
_OVER_WEBSOCKET = "Dan"
_Events = Sequence[dict[str, Any]]


class Session(NamedTuple):
    """What a client went through: its events, and its requests."""

    events: _Events
    turns: list[Turn]


@pytest.fixture(scope="module")
def fresh(scripted: Node, api_keys: dict[str, str]) -> Node:
    """The scripted node, with nothing in its caches."""
    headers = {"x-api-key": api_keys["root"]}
    requests.post(f"{scripted.url}/flush_cache", headers=headers, timeout=HANG_S).raise_for_status()
    return scripted


@pytest.fixture(scope="module")
def mend(
    fresh: Node, claude_code: Path, homes: dict[str, Path], api_keys: dict[str, str]
) -> Callable[[str, str], Session]:
    """Lets Claude Code mend the file in somebody's home, with a tenant's key."""

    def run(name: str, tenant: str) -> Session:
        home, key = homes[name], api_keys[tenant]
        folder = home / "project"
        (folder / "hello.py").write_text(OLD)
        with recording(fresh.url) as recorder:
            project = Project(claude_code, recorder.url, home, folder, output_tokens=400, key=key)
            events = project.run(asked(name), "--permission-mode", "acceptEdits")
        assert recorder.problems() == ""
        assert (folder / "hello.py").read_text() == NEW
        return Session(events, claude_turns(events))

    return run


@pytest.fixture(scope="module")
def sessions(mend: Callable[[str, str], Session]) -> dict[str, Session]:
    """Two tenants at once."""
    with ThreadPoolExecutor() as threads:
        return dict(zip(_CLAUDE_CODE, threads.map(mend, _CLAUDE_CODE, _CLAUDE_CODE), strict=True))


@pytest.fixture(scope="module")
def codex_sessions(
    fresh: Node,
    codex: Path,
    scripted_model: str,
    homes: dict[str, Path],
    api_keys: dict[str, str],
) -> dict[str, Session]:
    """Two tenants at once, one of them over a WebSocket."""
    # A sandbox of its own is more than a container may have.
    settings = 'sandbox_mode = "danger-full-access"'

    def run(name: str) -> Session:
        home, key = homes[name], api_keys[name]
        websockets = name == _OVER_WEBSOCKET
        with recording(fresh.url) as recorder:
            # The recorder passes no WebSocket on.
            url = fresh.url if websockets else recorder.url
            person = Person(codex, url, scripted_model, home, settings, key, websockets=websockets)
            events = person.run("project", asked(name))
        assert recorder.problems() == ""
        return Session(events, person.turns())

    with ThreadPoolExecutor() as threads:
        return dict(zip(_CODEX, threads.map(run, _CODEX), strict=True))


@pytest.mark.parametrize("name", _CLAUDE_CODE)
def test_claude_code_mends_each_tenants_own_file(sessions: dict[str, Session], name: str) -> None:
    result = sessions[name].events[-1]
    assert result["result"].strip() == mended(name)
    assert result["num_turns"] == 3
    assert result["stop_reason"] == "end_turn"


@pytest.mark.parametrize("name", _CLAUDE_CODE)
def test_claude_code_is_told_thoughts_and_calls(
    sessions: dict[str, Session], homes: dict[str, Path], name: str
) -> None:
    blocks = answers(sessions[name].events)
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


@pytest.mark.parametrize("name", _CLAUDE_CODE)
def test_each_turn_of_claude_code_reads_the_one_before_it_from_the_cache(
    sessions: dict[str, Session], name: str
) -> None:
    turns = sessions[name].turns
    assert_read_from_cache(turns, requests=3)
    assert turns[0].prompt_tokens > 10_000
    table.note("Claude Code", "messages", requests=3, set="`ANTHROPIC_BASE_URL`")
    assert turns[0].cached_tokens == 0


def test_a_tenant_reads_what_it_has_sent_and_nothing_that_another_has(
    sessions: dict[str, Session], mend: Callable[[str, str], Session]
) -> None:
    with ThreadPoolExecutor() as threads:
        eve, bob = threads.map(mend, _CLAUDE_CODE, ("Eve", "Bob"))
    for again, name in ((eve, "Ann"), (bob, "Bob")):
        assert_read_from_cache(again.turns, requests=3)
        assert again.turns[0].prompt_tokens == sessions[name].turns[0].prompt_tokens
    assert eve.turns[0].cached_tokens == 0
    assert bob.turns[0].cached_tokens >= 0.9 * bob.turns[0].prompt_tokens


@pytest.mark.parametrize("name", _CODEX)
def test_codex_mends_each_tenants_own_file(
    codex_sessions: dict[str, Session], homes: dict[str, Path], name: str
) -> None:
    assert (homes[name] / "project" / "hello.py").read_text() == NEW
    events = codex_sessions[name].events
    (command,) = completed(events, "command_execution")
    assert (command["aggregated_output"], command["exit_code"]) == (OLD, 0)
    (change,) = completed(events, "file_change")
    assert change["status"] == "completed"
    assert completed(events, "reasoning")[0]["text"].strip() == "The file comes first."
    assert completed(events, "agent_message")[-1]["text"].strip() == mended(name)


@pytest.mark.parametrize("name", _CODEX)
def test_each_turn_of_codex_reads_its_own_tenants_cache_alone(
    codex_sessions: dict[str, Session], name: str
) -> None:
    """Codex names the home behind its instructions and tools: those are the same for both."""
    turns = codex_sessions[name].turns
    assert_read_from_cache(turns, requests=3)
    assert turns[0].prompt_tokens > 5_000
    table.note("Codex", "responses", requests=3, set="a provider in `config.toml`")
    # Over a WebSocket its instructions and tools may have been prefilled.
    assert turns[0].cached_tokens == 0 or name == _OVER_WEBSOCKET


def test_codex_used_one_connection_for_its_loop(
    fresh: Node, codex_sessions: dict[str, Session], api_keys: dict[str, str]
) -> None:
    headers = {"x-api-key": api_keys["root"]}
    page = requests.get(f"{fresh.url}/metrics", headers=headers, timeout=HANG_S).text
    assert 'sgl_ext_requests_total{path="/v1/responses",status="101"} 1.0' in page
