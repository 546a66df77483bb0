"""What a difference is about: each kind is found in a made-up conversation, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_ext.doctor.report import MEANINGS, advice
from sgl_ext.prompts.prompt import Divergence
from tests.prompts.examples import SYSTEM, messages, system, turns
from tests.prompts.test_compare import difference
from tests.prompts.test_memory import Watch, parts_at

SCHEMA = '{"type": "object", "properties": {"%s": {"type": "string"}}, "required": ["answer"]}'


def kind(old: str, new: str) -> str:
    """Of two prompts whose instructions contain these texts."""
    texts = (f"You are an agent.\n{text}\n{SYSTEM}" for text in (old, new))
    left, right = (messages(2, system=system(text)) for text in texts)
    return difference(left, right).kind


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Tenant: acme", "Tenant: globex"),
        ("user_id: 8f03c1e52d7b649a", "user_id: 1a52d7b649a8f03c"),
        ("- **Organization**: Acme, Inc.", "- **Organization**: Globex"),
        ('{"workspace_id": "w-12", "x": 1}', '{"workspace_id": "w-77", "x": 1}'),
        ("<customer>acme</customer>", "<customer>globex</customer>"),
        ("The user's email: anna@acme.io", "The user's email: bert@acme.io"),
        ("virtual key = sk-a", "virtual key = sk-b"),
    ],
)
def test_a_field_that_a_gateway_adds_is_named(old: str, new: str) -> None:
    assert kind(old, new) == "tenant_field"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Tasks:\n- [ ] write it\n- [ ] test it", "Tasks:\n- [x] write it\n- [ ] test it"),
        ("# Todo list\n1. write\n2. test", "# Todo list\n1. write\n2. test\n3. land"),
        ('[{"content": "a", "status": "pending"}]', '[{"content": "a", "status": "completed"}]'),
        ("<todos>\n- write\n</todos>", "<todos>\n- test\n</todos>"),
    ],
)
def test_a_task_list_is_named(old: str, new: str) -> None:
    assert kind(old, new) == "task_list"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"Answer in JSON:\n{SCHEMA % 'answer'}", f"Answer in JSON:\n{SCHEMA % 'verdict'}"),
        (
            f"Follow this JSON schema:\n\n```json\n{SCHEMA % 'a'}\n```",
            f"Follow this JSON schema:\n\n```json\n{SCHEMA % 'b'}\n```",
        ),
        ("Output format: markdown", "Output format: plain text"),
    ],
)
def test_an_output_format_is_named(old: str, new: str) -> None:
    assert kind(old, new) == "response_format"


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("Folder: /home/anna", "Folder: /home/bert", "unknown"),
        ("Session: 8f03c1e52d7b649a", "Session: 1a52d7b649a8f03c", "id"),
        ("The user is in /home/anna", "The user is in /home/bert", "unknown"),
        ("User messages come first, then yours", "User messages come first, and yours", "unknown"),
        (
            "Tasks are done in order.\nBranch: main",
            "Tasks are done in order.\nBranch: dev",
            "unknown",
        ),
        ("Respond in JSON.\n\nBranch: main", "Respond in JSON.\n\nBranch: dev", "unknown"),
        ("Output format: 2026-01-01", "Output format: 2026-01-02", "clock"),
    ],
)
def test_other_differences_keep_their_kinds(old: str, new: str, found: str) -> None:
    assert kind(old, new) == found


def test_a_task_list_that_is_updated_in_an_earlier_message_is_named() -> None:
    watch = Watch()
    changed = messages(4)
    changed["messages"][2]["content"][0]["content"] = "Tasks:\n- [ ] a\n- [ ] b\n" + "rest\n" * 60
    later = messages(5)
    later["messages"][2]["content"][0]["content"] = "Tasks:\n- [x] a\n- [ ] b\n" + "rest\n" * 60
    assert watch.sees(changed) is None
    found = watch.sees(later)
    assert parts_at(found) == ("session", "task_list", "messages[2].content[0]")
    assert found is not None
    assert advice("task_list", found.difference.part).startswith("keep the task list out of")


SUMMARY = "This session is being continued from a previous conversation. Summary: it was found. "


def compacted(count: int = 0, text: str = SUMMARY) -> dict[str, Any]:
    return messages(messages=turns(count, first=text + "Now go on.", task="the rest"))


def test_a_summary_in_place_of_the_messages_is_a_compaction() -> None:
    watch = Watch()
    for count in range(12):
        assert watch.sees(messages(count)) is None
    assert parts_at(watch.sees(compacted())) == ("session", "compaction", "messages[0].content")
    for count in range(1, 4):
        assert watch.sees(compacted(count)) is None, "told once"


def test_a_compaction_that_keeps_the_first_message_is_one() -> None:
    watch = Watch()
    assert watch.sees(messages(12)) is None
    body = messages(1)
    body["messages"][1:] = [
        {"role": "assistant", "content": [{"type": "text", "text": SUMMARY}]},
        {"role": "user", "content": "Go on."},
    ]
    assert parts_at(watch.sees(body))[1] == "compaction"


def test_a_summary_without_the_usual_words_is_known_by_what_it_replaces() -> None:
    watch = Watch()
    assert watch.sees(messages(12)) is None
    body = messages(1)
    text = "So far: the parser was read, and its tests fail in one place. " * 3
    body["messages"][1:] = [
        {"role": "assistant", "content": [{"type": "text", "text": text}]},
        {"role": "user", "content": "Go on."},
    ]
    assert parts_at(watch.sees(body))[1] == "compaction"


def test_a_history_of_which_the_older_part_is_left_out_is_truncated() -> None:
    watch = Watch()
    old = messages(12)
    assert watch.sees(old) is None
    gap = {"role": "user", "content": "(Earlier messages are left out.)"}
    body = {**old, "messages": [old["messages"][0], gap, *old["messages"][-6:]]}
    assert parts_at(watch.sees(body))[1] == "truncated"


def test_a_client_that_says_that_it_compacted_is_believed() -> None:
    watch = Watch()
    assert watch.sees(messages(12)) is None
    short = compacted(text="What matters of before: nothing. ")
    assert parts_at(watch.sees(short, is_compacted=True))[:2] == ("session", "compaction")


def test_a_new_conversation_of_a_session_is_no_compaction() -> None:
    watch = Watch()
    assert watch.sees(messages(12)) is None
    assert watch.sees(compacted(text="Another thing. ")) is None
    other = Watch()
    assert other.sees(messages(12), "one") is None
    assert other.sees(compacted(), "another session") is None
    assert other.sees(messages(1), "a third", is_compacted=True) is None


def test_a_clock_stays_a_clock_when_the_client_compacts() -> None:
    watch = Watch()
    old = messages(6, system=system(f"It is 12:00:01.\n{SYSTEM}"))
    new = messages(7, system=system(f"It is 12:00:02.\n{SYSTEM}"))
    assert watch.sees(old) is None
    assert parts_at(watch.sees(new, is_compacted=True))[1] == "clock"


def test_the_earlier_version_of_the_client_is_named() -> None:
    watch = Watch()
    assert watch.sees(messages(1), version="2.1.197") is None
    found = watch.sees(messages(2, tools=[]), version="2.1.330")
    assert found is not None
    assert (found.difference.kind, found.version) == ("tools_changed", "2.1.197")


@pytest.mark.parametrize("kind", sorted(MEANINGS))
def test_each_kind_has_a_cure(kind: str) -> None:
    for part in ("tools", "system", "messages", "cache"):
        assert "{" not in advice(kind, part)
    assert advice(kind, "system") != advice("no such kind", "system")


def test_another_cache_salt_in_one_session_is_a_tenants_field() -> None:
    def salted(salt: str, count: int, session: str = "s") -> Divergence | None:
        body = messages(count, cache_salt=salt)
        return watch.sees(body, session, salts=(("cache_salt", salt),))

    watch = Watch()
    assert salted("team-a", 1) is None
    assert salted("team-a", 2) is None
    assert salted("team-b", 1, "another session") is None, "caches may be separate"
    found = salted("gateway-7", 3)
    assert parts_at(found) == ("session", "tenant_field", "cache_salt")
    assert found is not None
    assert found.difference.lost_bytes > 5000
    assert salted("gateway-7", 4) is None
