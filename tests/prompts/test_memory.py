"""The memory of prompts: silent while conversations grow, exact where they part, and bounded."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.prompts.blocks import Block, read_blocks
from sgl_ext.prompts.memory import PromptMemory
from sgl_ext.prompts.prompt import Divergence, Prompt
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.client import session_key, thread_key
from sgl_ext.reading.segments import read_chain
from tests.prompts.examples import MESSAGES, SYSTEM, TOOLS, messages, system, turns


class Watch:
    """A memory that is shown bodies, and counts how often it reads one."""

    def __init__(self, **options: Any) -> None:
        self.reads = 0
        self.memory = PromptMemory(self._read, **options)

    def _read(self, path: str, raw: bytes | bytearray) -> list[Block]:
        self.reads += 1
        return read_blocks(of_path(path), orjson.loads(raw))

    def sees(
        self, body: Any, session: str | None = "s", group: str = "g", **facts: Any
    ) -> Divergence | None:
        chain = read_chain(of_path(MESSAGES), body)
        headers = {} if session is None else {"session-id": session}
        thread = thread_key(session_key(headers, body, chain), chain)
        raw = orjson.dumps(body)
        return self.memory.compare(Prompt(group, session, thread, MESSAGES, chain, raw, **facts))


def parts_at(found: Divergence | None) -> tuple[str, str, str]:
    assert found is not None
    return found.scope, found.difference.kind, found.difference.block


def clock(count: int, second: int) -> dict[str, Any]:
    """A prompt whose instructions begin with the time."""
    time = f"It is 2026-01-01 12:00:{second:02}."
    return messages(count, system=system("You are an agent.", f"{time}\n{SYSTEM}"))


@pytest.mark.parametrize("session", ["s", None])
def test_a_growing_conversation_is_never_parsed_again(session: str | None) -> None:
    watch = Watch()
    assert all(watch.sees(messages(count), session) is None for count in range(10))
    assert watch.reads == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30), st.booleans())
def test_interleaved_conversations_do_not_diverge(
    steps: list[tuple[int, bool]], stated: bool
) -> None:
    """Each grows, or repeats its last prompt."""
    watch, counts = Watch(), [0] * 4
    for which, grows in steps:
        counts[which] += grows
        body = messages(messages=turns(counts[which], f"Task {which}", f"{which}"))
        assert watch.sees(body, f"s{which % 2}" if stated else None) is None


def test_a_clock_in_the_instructions_is_reported_in_every_turn() -> None:
    watch = Watch()
    assert watch.sees(clock(0, 0)) is None
    for count in range(1, 6):
        assert parts_at(watch.sees(clock(count, count))) == ("session", "clock", "system[1]")


def test_a_clock_is_reported_without_a_session_too() -> None:
    watch = Watch()
    assert watch.sees(clock(1, 0), None) is None
    assert parts_at(watch.sees(clock(2, 1), None)) == ("session", "clock", "system[1]")


def test_sessions_of_a_fleet_that_begin_differently_are_reported() -> None:
    watch = Watch()
    assert watch.sees(messages(), "a") is None
    shuffled = messages(tools=TOOLS[::-1])
    assert parts_at(watch.sees(shuffled, "b")) == ("fleet", "tool_order", "tools[0]")
    assert watch.sees(messages(), "c") is None
    assert watch.sees(shuffled, "d") is None, "what begins so again shares with that"
    assert watch.sees(clock(0, 1), "e", group="other tenant") is None


def test_another_agent_of_the_session_is_another_prompt() -> None:
    watch = Watch()
    assert watch.sees(messages(3)) is None
    namer = messages(system=system("You name conversations. " * 40), tools=[])
    assert watch.sees(namer) is None
    explorer = messages(system=system("You explore and report. " * 90), tools=TOOLS[:4])
    assert watch.sees(explorer) is None
    assert watch.sees(messages(messages=turns(0, first="Another task"))) is None
    assert watch.sees(messages(4)) is None


def test_changed_history_is_reported_and_a_branch_is_not() -> None:
    watch = Watch()
    for count in range(4):
        assert watch.sees(messages(count)) is None
    branch = messages(3)
    branch["messages"][-2]["content"][0]["text"] = "I do something else."
    assert watch.sees(branch) is None, "the same turn, answered again"
    rewritten = messages(5)
    rewritten["messages"][1]["content"][0]["text"] = "I looked at something else. " * 5
    expected = ("session", "rewritten", "messages[1].content[0]")
    assert parts_at(watch.sees(rewritten)) == expected
    grown = messages(6)
    grown["messages"][1] = rewritten["messages"][1]
    assert watch.sees(grown) is None, "told once"
    assert watch.sees(messages(2)) is None, "went back to where it was"


def test_a_clock_in_the_first_message_is_reported() -> None:
    watch = Watch()
    bodies = [messages(messages=turns(n, first=f"It is 12:00:0{n}. Find it.")) for n in range(4)]
    assert watch.sees(bodies[0]) is None
    watch.sees(bodies[1])
    for body in bodies[2:]:
        assert parts_at(watch.sees(body)) == ("session", "clock", "messages[0].content")


def test_the_oldest_conversations_are_forgotten_within_the_bound() -> None:
    size = len(orjson.dumps(messages(3)))
    watch = Watch(limit_bytes=5 * size)
    for number in range(40):
        watch.sees(messages(messages=turns(3, f"Task {number}", f"{number}")), f"s{number}")
        assert 0 <= watch.memory.size_bytes <= 5 * size
    assert watch.memory.size_bytes > 2 * size
    for _ in range(3):
        watch.sees(messages(messages=turns(80, "One that is too long for it", "a")), "long")
    assert watch.memory.size_bytes <= 5 * size
