"""Without texts: where heads diverge, what a new version of a client moves, and that little is
looked at."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest

from sgl_ext.prompts import heads
from sgl_ext.prompts.blocks import Block, read_blocks
from sgl_ext.prompts.heads import NEW_VERSION, PIECE_BYTES, VERSION, Found, Heads
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.segments import Chain, read_chain
from tests.prompts.examples import MESSAGES, SYSTEM, TOOLS, messages, system, turns

PROTOCOL = of_path(MESSAGES)


class Doctor:
    """reads: how often a prompt was looked at."""

    def __init__(self) -> None:
        self.heads = Heads()
        self.reads = 0

    def see(self, body: Any, session: str = "s1", version: str = "1.0") -> Found | None:
        chain = read_chain(PROTOCOL, body)
        conversation = (session, chain.opening)
        if self.heads.is_usual(conversation, chain):
            return None

        def read() -> Sequence[Block]:
            self.reads += 1
            return read_blocks(PROTOCOL, body)

        return self.heads.find(conversation, "group", chain, version, read)


@pytest.fixture
def doctor() -> Doctor:
    return Doctor()


def test_a_conversation_that_grows_is_looked_at_once(doctor: Doctor) -> None:
    assert [doctor.see(messages(count)) for count in range(9)] == [None] * 9
    assert [doctor.see(messages(count), "s2") for count in range(9)] == [None] * 9
    assert doctor.reads == 1, "the first head"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("The time is 12:00:0{}.\n", "clock"),
        ("Run {}a8f03c1e52d7b649 of it.\n", "id"),
        ("In the folder {} of it.\n", "unknown"),
    ],
)
def test_a_head_that_changes_between_turns_is_found(doctor: Doctor, line: str, kind: str) -> None:
    before = "Be kind.\n" * 20
    for turn in range(3):
        text = before + line.format(turn) + SYSTEM
        found = doctor.see(messages(turn, system=system("You are an agent.", text)))
    assert found is not None
    assert (found.scope, found.kind, found.place.block) == ("session", kind, "system[1]")
    at = len(before) + line.index("{")
    assert found.place.byte <= at < found.place.byte + PIECE_BYTES
    assert found.place.lost_bytes >= len(SYSTEM)


def test_a_line_that_is_longer_or_shorter_is_the_same_agent(doctor: Doctor) -> None:
    for turn, folder in enumerate(("/a", "/home/somebody/project", "/b/c")):
        found = doctor.see(messages(turn, system=system(f"In {folder}.\n{SYSTEM}")))
    assert found is not None
    assert found.place.lost_bytes >= len(SYSTEM)


def test_another_agent_is_no_divergence(doctor: Doctor) -> None:
    doctor.see(messages(2))
    other = {"model": "m", "messages": turns(0), "system": system("Name this conversation. " * 9)}
    assert doctor.see(other) is None


def test_messages_that_are_rewritten_or_cut_are_found(doctor: Doctor) -> None:
    for count in range(7):
        doctor.see(messages(count))
    history = turns(6)
    changed = [*history[:3], {**history[3], "content": "Another answer."}, *history[4:]]
    found = doctor.see(messages(messages=changed))
    assert found is not None
    assert (found.kind, found.place.block) == ("rewritten", "messages[3].content")
    cut = [*turns(6)[:1], *turns(6)[11:]]
    found = doctor.see(messages(messages=cut))
    assert found is not None
    assert found.kind == "truncated"


def test_a_prompt_that_is_sent_again_or_asked_otherwise_is_no_divergence(doctor: Doctor) -> None:
    for count in (3, 3, 4):
        assert doctor.see(messages(count)) is None
    edited = [*turns(3), {"role": "user", "content": "No, do this."}]
    assert doctor.see(messages(messages=edited)) is None


def body_of(version: int, folder: int, moved: str = "") -> dict[str, Any]:
    """What a version of a client sends, whose instructions end in a session's folder."""
    begin = "Be kind.\n" * 250 if version == 1 else "Be kind.\n" * 250 + "And brief.\n"
    return messages(system=system(f"{moved}{begin}{SYSTEM}\nIn /home/{folder}.\n"))


def test_a_version_whose_beginning_differs_is_named_at_its_first_request(doctor: Doctor) -> None:
    for session in range(5):
        found = doctor.see(body_of(1, session), f"a{session}", "2.1.332")
        assert found is None or found.scope != VERSION
    found = doctor.see(body_of(2, 9), "b", "2.1.333")
    assert found is not None
    assert (found.scope, found.kind, found.earlier_version) == (VERSION, NEW_VERSION, "2.1.332")
    byte = len("Be kind.\n" * 250)
    assert found.place.byte <= byte < found.place.byte + PIECE_BYTES
    again = [doctor.see(body_of(2, n), f"c{n}", "2.1.333") for n in range(10, 20)]
    assert not any(each is not None and each.scope == VERSION for each in again), "it is said once"


def test_a_version_that_moves_a_byte_in_each_prompt_is_named_within_ten(doctor: Doctor) -> None:
    for session in range(5):
        doctor.see(body_of(1, session), f"a{session}", "2.1.332")
    found = []
    for session in range(10):
        line = f"x-acme-billing-header: cch={session}f3a9;\n"
        found.append(doctor.see(body_of(1, session, line), f"b{session}", "2.1.333"))
    of_version = [each for each in found if each is not None and each.scope == VERSION]
    assert [each.kind for each in of_version] == [NEW_VERSION, "header"]
    assert of_version[1].place.byte < PIECE_BYTES
    assert of_version[1].place.block == "system[0]"


def test_a_version_that_changes_nothing_is_not_named(doctor: Doctor) -> None:
    for version in ("1.0", "1.1"):
        for session in range(12):
            found = doctor.see(body_of(1, session), f"{version} {session}", version)
            assert found is None or found.scope != VERSION


def test_the_memory_is_bounded(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "LIMIT_BYTES", 200_000)
    for session in range(60):
        doctor.see(body_of(1, session), f"s{session}", f"1.{session}")
        assert doctor.heads.size_bytes <= 200_000
    assert doctor.heads.size_bytes > 50_000


def test_no_text_is_remembered(doctor: Doctor) -> None:
    for count in range(4):
        doctor.see(messages(count))
    kept = pickle.dumps(vars(doctor.heads))
    assert len(kept) > 1000
    assert not any(word in kept for word in (b"coding", b"small steps", b"Bash", b"Find the bug"))


def test_the_order_of_tools_is_a_place_in_the_tools(doctor: Doctor) -> None:
    doctor.see(messages(0))
    found = doctor.see(messages(1, tools=TOOLS[1:] + TOOLS[:1]))
    assert found is not None
    assert (found.kind, found.place.part) == ("tools_changed", "tools")


def test_a_prompt_without_a_segment_is_usual_again_and_again() -> None:
    known = Heads()
    for _ in range(3):
        assert known.is_usual("conversation", Chain())
    known.find("conversation", "group", Chain(), "1.0", list)
    assert known.is_usual("conversation", Chain())
