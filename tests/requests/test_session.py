"""A session belongs to one cache group."""

from __future__ import annotations

import pytest

from sgl_ext.protocols.registry import of_path
from sgl_ext.requests.segments import Chain, read_chain
from sgl_ext.requests.session import hints_of, salt_of, session_hash, session_key

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "prompt_cache_key": "k"}
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
    assert len({session_hash(stated | agent, BODY) for agent in agents}) == 1
    assert session_hash({**stated, GROUP: "a"}, BODY) != session_hash(stated, BODY)
    assert session_hash({}, {}) == ""


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
