"""Codex through the balancer, over `/v1/responses` and streaming, with answers by script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sgl_ext_cpu.node import Node

from tests.clients import table
from tests.clients.agents import Person, Turn, completed
from tests.clients.scripts import GREETING, SUM

pytestmark = pytest.mark.installs


@dataclass(frozen=True)
class Answer:
    """What Codex said, and what it counted since its session began."""

    texts: list[str]
    usage: dict[str, Any]

    @property
    def prompt(self) -> int:
        return int(self.usage["input_tokens"])

    @property
    def read(self) -> int:
        return int(self.usage["cached_input_tokens"])


@dataclass(frozen=True)
class Sessions:
    """A session in each of two projects of one person, one after the other."""

    person: Person
    first: Answer
    second: Answer


def _ask(person: Person, project: str, *words: str) -> Answer:
    events = person.run(project, *words)
    texts = [item["text"].strip() for item in completed(events, "agent_message")]
    (ended,) = [event for event in events if event["type"] == "turn.completed"]
    return Answer(texts, ended["usage"])


@pytest.fixture(scope="module")
def sessions(
    scripted: Node,
    codex: Path,
    scripted_model: str,
    api_keys: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Sessions:
    """Two sessions with different prompts, of a tenant that has nothing in the caches."""
    home = tmp_path_factory.mktemp("home")
    settings = 'model_reasoning_effort = "none"'
    person = Person(codex, scripted.url, scripted_model, home, settings, api_keys["Fay"])
    first = _ask(person, "one", GREETING)
    return Sessions(person, first, _ask(person, "other", SUM))


def test_each_session_ends_with_an_answer(sessions: Sessions) -> None:
    assert (sessions.first.texts, sessions.second.texts) == (["Hello."], ["Four."])


def test_a_second_session_reads_tools_and_instructions_from_the_cache(sessions: Sessions) -> None:
    # What the two do not share is the message that names the working directory, and
    # the prompt behind it: about 2 % of the whole.
    assert sessions.first.read == 0
    assert sessions.second.read >= 0.95 * sessions.second.prompt
    assert sessions.second.prompt > 5_000
    turn = Turn(sessions.second.prompt, sessions.second.read)
    table.note("Codex", "responses", turn)


def test_the_next_turn_reads_the_conversation_so_far_from_the_cache(sessions: Sessions) -> None:
    before = sessions.second
    after = _ask(sessions.person, "other", "resume", "--last", "And why?")
    assert after.texts == ["Because."]
    assert after.read - before.read >= 0.99 * (after.prompt - before.prompt)


def test_tools_in_a_namespace_reach_the_model(node: Node, served_model: str) -> None:
    spawn = {"type": "function", "name": "spawn", "parameters": {"type": "object"}}
    namespace = {"type": "namespace", "name": "agents", "description": "", "tools": [spawn]}
    body = {"model": served_model, "input": "Hello.", "max_output_tokens": 4, "store": False}
    answers = [node.post("/v1/responses", {**body, "tools": tools}) for tools in ([], [namespace])]
    without, with_tools = (answer.json()["usage"]["input_tokens"] for answer in answers)
    assert with_tools > without
