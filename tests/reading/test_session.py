"""A session is what its client states, within one cache group and one tenant."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.client import (
    SESSION_HEADERS,
    hints_of,
    salt_of,
    session_key,
    shown_name,
    stated_name,
    stated_session,
    thread_key,
)
from sgl_ext.reading.segments import Chain, read_chain

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "prompt_cache_key": "k"}
GROUP = "x-sgl-ext-cache-group"


def test_cache_groups_share_no_segment() -> None:
    chains = [
        read_chain(of_path(CHAT), BODY, salt=salt_of(headers))
        for headers in ({}, {GROUP: ""}, {GROUP: "a"}, {GROUP: "b"}, {GROUP: "a"})
    ]
    assert chains[2] == chains[4]
    hashes = [segment for chain in chains[:4] for segment in chain.hashes]
    assert len(set(hashes)) == len(hashes)
    assert len({chain.ends for chain in chains}) == 1


@pytest.mark.parametrize("chain", [Chain(), read_chain(of_path(CHAT), BODY)])
def test_equal_session_ids_of_different_groups_are_different_sessions(chain: Chain) -> None:
    stated = {"x-session-id": "s"}
    keys = [
        session_key(stated | headers, BODY, chain)
        for headers in ({}, {GROUP: ""}, {GROUP: "a"}, {GROUP: "b"}, {GROUP: "a"})
    ]
    assert keys[2] == keys[4]
    assert len(set(keys)) == 4
    assert len({session_key({GROUP: g}, BODY, Chain()) for g in ("a", "b")}) == 2
    # A name that looks like another group's name and session.
    assert session_key({GROUP: "a", "x-session-id": "b"}, {}, Chain()) != session_key(
        {GROUP: "ab", "x-session-id": ""}, {"prompt_cache_key": ""}, Chain()
    )


def test_each_sub_agent_is_a_session_of_its_own_in_the_harness_s_session() -> None:
    chain, stated = read_chain(of_path(CHAT), BODY), {"x-claude-code-session-id": "s"}
    agents = [{}, {"x-claude-code-agent-id": "a"}, {"x-claude-code-agent-id": "b"}]
    assert len({session_key(stated | agent, BODY, chain) for agent in agents}) == 3
    assert len({stated_session(stated | agent, BODY) for agent in agents}) == 1
    assert [stated_name(stated | agent, BODY) for agent in agents] == ["s", "s/a", "s/b"]
    assert stated_name({}, {}) == ""


def key_of(headers: dict[str, str], system: str, first: str, **more: Any) -> int | None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": first}]
    body = {"messages": messages, **more}
    return session_key(headers, body, read_chain(of_path(CHAT), body, salt=salt_of(headers)))


@pytest.mark.parametrize("header", [*SESSION_HEADERS, "prompt_cache_key"])
def test_a_stated_session_stays_one_when_its_system_text_changes(header: str) -> None:
    headers, body = ({}, {header: "s"}) if "cache" in header else ({header: "s"}, {})
    keys = {key_of(headers, f"It is 12:0{turn}.", "Hello", **body) for turn in range(6)}
    assert len(keys) == 1
    assert len({key_of({}, f"It is 12:0{turn}.", "Hello") for turn in range(6)}) == 6


def test_agents_that_state_no_id_are_told_apart_by_their_first_message() -> None:
    stated = {"x-session-id": "s"}
    keys = {key_of(stated, "You are an agent.", f"Find bug {number}.") for number in range(4)}
    assert len(keys) == 4
    assert len({stated_name(stated, {}) for _ in keys}) == 1


def test_a_stated_agent_stays_one_when_its_first_message_changes() -> None:
    session = {"x-claude-code-session-id": "s"}
    for stated in (
        {"x-claude-code-agent-id": "a"},
        {"x-claude-code-request-class": "main"},
        {"thread-id": "t"},
    ):
        keys = {key_of(session | stated, "You are an agent.", text) for text in ("A", "Summary: A")}
        assert len(keys) == 1
    title = {"x-claude-code-request-class": "auxiliary"}
    assert key_of(session | title, "Name it.", "A") != key_of(session | title, "Name it.", "B")


def test_one_id_of_two_tenants_is_two_sessions() -> None:
    tenants: list[dict[str, str]] = [{}, {"x-tenant-id": "a"}, {"x-tenant-id": "b"}]
    assert len({key_of({"x-session-id": "s", **each}, "S", "Hello") for each in tenants}) == 3
    assert len({key_of(each, "S", "Hello") for each in tenants}) == 3
    assert len({shown_name("s", each, hashes=True) for each in ("", "a", "b")}) == 3


def test_a_name_is_shown_as_its_client_prints_it() -> None:
    assert shown_name("0d5f-11", "a", hashes=False) == "0d5f-11"
    for odd in ("x" * 129, "a\nb", "<\x1b[31m", "\u202e", "\ud800"):
        assert re.fullmatch("[0-9a-f]{16}", shown_name(odd, "a", hashes=False))
    assert shown_name("", "a", hashes=True) == ""


def test_another_system_text_is_another_thread_of_the_session() -> None:
    bodies = [
        {"messages": [{"role": "system", "content": text}, *BODY["messages"]]} for text in "ab"
    ]
    chains = [read_chain(of_path(CHAT), body) for body in bodies]
    keys = [session_key({"x-session-id": "s"}, {}, chain) for chain in chains]
    assert keys[0] == keys[1]
    assert thread_key(keys[0], chains[0]) != thread_key(keys[1], chains[1])
    assert thread_key(chains[0].session, chains[0]) == chains[0].session
    assert thread_key(None, chains[0]) is None


def test_a_thread_that_is_the_session_is_no_sub_agent() -> None:
    chain, stated = read_chain(of_path(CHAT), BODY), {"session-id": "s"}
    keys = [session_key(stated | {"thread-id": id}, BODY, chain) for id in ("s", "t")]
    assert keys[0] == session_key(stated, BODY, chain) != keys[1]


def test_the_headers_that_tell_a_session_are_hints() -> None:
    raw = {b"x-claude-code-agent-id": b"a", b"thread-id": b"t"}
    assert hints_of(raw) == {"x-claude-code-agent-id": "a", "thread-id": "t"}


def test_an_empty_cache_group_is_a_group() -> None:
    assert hints_of({b"x-sgl-ext-cache-group": b""}) == {GROUP: ""}
    assert salt_of({GROUP: ""}) != salt_of({})
