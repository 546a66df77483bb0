"""Who sends a request: its conversation and tenant, and what its client says about itself."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.client import (
    HARNESSES,
    REQUEST_CLASSES,
    SESSION_HEADERS,
    ClientFacts,
    harness_of,
    hints_of,
    is_final,
    read_client,
    session_key,
    shown_name,
    stated_lease_s,
    stated_name,
    stated_session,
    thread_key,
)
from sgl_ext.reading.hints import read_importance
from sgl_ext.reading.segments import Chain, read_chain, salt_of

# A session is what its client states, within one cache group and one tenant.

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


# What clients say about themselves is read from headers as they send them.

CLAUDE = {
    "user-agent": "claude-cli/2.1.330 (external, sdk-cli)",
    "x-claude-code-session-id": "5b3fffc7-d17d-4450-96ba-0da0eed12ca5",
}
BILLING = {"cc_version": "2.1.330.f8c", "cc_entrypoint": "sdk-cli"}
TURN = {"thread_id": "t-2", "turn_id": "u-2", "root_turn_id": "u-1", "request_kind": "turn"}


def facts_of(headers: dict[str, str], billing: dict[str, str] | None = None) -> ClientFacts:
    raw = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    return read_client(raw, billing or {})


def codex(**turn: object) -> ClientFacts:
    agent = "codex_exec/0.169.0 (Debian 12.0.0; x86_64) unknown (codex_exec; 0.169.0)"
    return facts_of({"user-agent": agent, "x-codex-turn-metadata": json.dumps({**TURN, **turn})})


def test_all_hints_of_claude_code_are_read() -> None:
    hints = {
        "request-class": "subagent",
        "agent-id": "ade62ab62342e45e8",
        "agent-type": "Explore",
        "parent-agent-id": "a1",
        "prompt-id": "f7e99fc8-929a-4393-9f26-739713a2eb15",
        "prev-tool-durations": "Read=30;Bash=113",
        "compaction": "manual",
        "context-compacted": "auto",
    }
    stated = {f"x-claude-code-{name}": value for name, value in hints.items()}
    billing = {**BILLING, "cc_is_subagent": "true", "cc_workload": "cron"}
    assert facts_of({**CLAUDE, **stated}, billing) == ClientFacts(
        harness="claude-code",
        program="claude-cli",
        version="2.1.330",
        request_class="subagent",
        agent_id="ade62ab62342e45e8",
        agent_type="Explore",
        parent_agent_id="a1",
        prompt_id="f7e99fc8-929a-4393-9f26-739713a2eb15",
        prev_tool_durations_ms=(("Read", 30), ("Bash", 113)),
        compaction="manual",
        context_compacted="auto",
        is_subagent=True,
        workload="cron",
        entrypoint="sdk-cli",
    )


def test_without_the_hints_the_stripped_line_tells_a_subagent_and_the_version() -> None:
    behind_a_proxy = {"x-claude-code-session-id": "s"}
    facts = facts_of(behind_a_proxy, {**BILLING, "cc_is_subagent": "true"})
    assert (facts.version, facts.request_class, facts.is_subagent) == ("2.1.330", "subagent", True)
    assert facts_of(CLAUDE, BILLING).request_class == ""


def test_the_stripped_line_alone_tells_claude_code() -> None:
    facts = facts_of({"user-agent": "node"}, BILLING)
    assert (facts.harness, facts.version, facts.entrypoint) == ("claude-code", "2.1.330", "sdk-cli")


@pytest.mark.parametrize(
    ("agent", "program", "version"),
    [
        ("claude-cli/2.1.330 (external, sdk-cli)", "claude-cli", "2.1.330"),
        ("opencode/1.18.33", "opencode", "1.18.33"),
        ("ai-sdk/provider-utils/3.0.1 opencode/1.18.33", "opencode", "1.18.33"),
        ("QwenCode/0.24.4 (linux; x64)", "QwenCode", "0.24.4"),
        ("Anthropic/Python 2.12.0", "Anthropic/Python", "2.12.0"),
        ("AsyncOpenAI/Python 3.3.0", "AsyncOpenAI/Python", "3.3.0"),
        ("OpenAI/JS 6.3.0", "OpenAI/JS", "6.3.0"),
        ("curl/8.1.2", "curl", "8.1.2"),
        ("node", "", ""),
        ("", "", ""),
        ("\xff\xfe/1.0", "", ""),
        ("x" * 100 + "/1.0", "", ""),
    ],
)
def test_the_user_agent_names_the_program_and_its_version(
    agent: str, program: str, version: str
) -> None:
    facts = facts_of({"user-agent": agent})
    assert (facts.program, facts.version) == (program, version)


def test_codex_states_its_turn_and_whose_thread_it_is() -> None:
    mine = codex(thread_source="user")
    assert (mine.version, mine.request_class, mine.prompt_id) == ("0.169.0", "main", "u-1")
    assert not mine.is_subagent
    theirs = codex(thread_source="subagent", subagent_kind="thread_spawn", parent_thread_id="t-1")
    assert theirs.is_subagent
    assert (theirs.agent_id, theirs.parent_agent_id) == ("t-2", "t-1")
    assert (theirs.request_class, theirs.agent_type) == ("subagent", "thread_spawn")
    assert codex(thread_source="user", request_kind="compaction").request_class == "compaction"


def test_a_session_of_opencode_with_a_parent_is_a_subagents() -> None:
    own = {"user-agent": "opencode/1.18.33", "x-session-id": "ses_2"}
    assert not facts_of(own).is_subagent
    facts = facts_of({**own, "x-parent-session-id": "ses_1"})
    assert (facts.request_class, facts.agent_id, facts.parent_agent_id) == (
        "subagent",
        "ses_2",
        "ses_1",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("agent-id", "a" * 65),
        ("agent-id", "a b"),
        ("agent-type", 'x"} 1\n'),
        ("agent-type", "\xe4"),
        ("request-class", "boss"),
        ("prompt-id", "<script>"),
        ("prev-tool-durations", "Bash"),
        ("prev-tool-durations", "Bash=-1"),
        ("prev-tool-durations", "Bash=1;;"),
        ("prev-tool-durations", "Bash=999999999"),
        ("prev-tool-durations", ";".join(["Bash=1"] * 33)),
        ("prev-tool-durations", "B" * 5000 + "=1"),
    ],
)
def test_a_malformed_hint_is_named_and_changes_nothing(name: str, value: str) -> None:
    header = f"x-claude-code-{name}"
    plain = facts_of(CLAUDE)
    assert facts_of({**CLAUDE, header: value}) == plain._replace(ignored=(header,))


@pytest.mark.parametrize("value", ["", "[]", "{", "1", "\xff", '{"a":' * 500, "[" * 9000])
def test_malformed_metadata_of_codex_is_named(value: str) -> None:
    facts = facts_of({"user-agent": "codex_exec/0.169.0", "x-codex-turn-metadata": value})
    assert facts.ignored == ("x-codex-turn-metadata",)
    assert facts.prompt_id == facts.request_class == ""


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "user-agent",
                "x-claude-code-session-id",
                "x-codex-turn-metadata",
                "anthropic-beta",
                "x-agent-hint",
                "x-codex-parent-thread-id",
                "x-dynamo-parent-session-id",
                "x-dynamo-session-id",
                "x-parent-session-id",
                "x-session-id",
                *(
                    f"x-claude-code-{name}"
                    for name in ("request-class", "agent-id", "agent-type", "prev-tool-durations")
                ),
            ]
        ),
        st.text(st.characters(max_codepoint=255)),
    ),
    st.dictionaries(
        st.sampled_from(["cc_version", "cc_workload", "cc_entrypoint", "cc_is_subagent"]),
        st.text(),
    ),
)
@example({"x-codex-turn-metadata": '{"thread_id": 1, "subagent_kind": []}'}, {})
def test_whatever_is_sent_the_facts_are_short_and_printable(
    headers: dict[str, str], billing: dict[str, str]
) -> None:
    facts = facts_of(headers, billing)
    assert facts.harness in HARNESSES
    assert facts.request_class in ("", *REQUEST_CLASSES)
    texts = [value for value in facts if isinstance(value, str)]
    texts += [tool for tool, _ in facts.prev_tool_durations_ms]
    assert all(text.isascii() and text.isprintable() and len(text) <= 128 for text in texts)


@pytest.mark.parametrize(
    ("stated", "request_class", "is_subagent"),
    [
        (b"main", "main", False),
        (b"blocking-subagent", "subagent", True),
        (b"background-subagent", "subagent", True),
        (b"title", "", False),
    ],
)
def test_what_claude_code_calls_a_request_for_its_vendor_is_read(
    stated: bytes, request_class: str, is_subagent: bool
) -> None:
    facts = read_client({b"x-claude-1p-request-class": stated}, {})
    assert (facts.harness, facts.own_class) == ("claude-code", stated.decode())
    assert (facts.request_class, facts.is_subagent) == (request_class, is_subagent)
    assert facts.known()["own_class"] == stated.decode()


def test_its_class_for_a_gateway_counts_first() -> None:
    headers = {
        b"x-claude-1p-request-class": b"main",
        b"x-claude-code-request-class": b"compaction",
    }
    assert read_client(headers, {}).request_class == "compaction"
    facts = read_client({b"x-claude-1p-request-class": b"a b" * 40}, {})
    assert (facts.own_class, facts.ignored) == ("", ("x-claude-1p-request-class",))


# Which agent sent a request, by heads as the agents send them.


@pytest.mark.parametrize(
    ("headers", "billing", "harness"),
    [
        ({"user-agent": "claude-cli/2.1.197 (external, sdk-cli)"}, {}, "claude-code"),
        ({"x-claude-code-session-id": "1", "user-agent": "proxy"}, {}, "claude-code"),
        ({}, {"cc_version": "2.1"}, "claude-code"),
        ({"user-agent": "codex_exec/0.169.0 (Debian 12.0.0; x86_64)"}, {}, "codex"),
        ({"originator": "codex_cli_rs"}, {}, "codex"),
        ({"user-agent": "opencode/1.0.3"}, {}, "opencode"),
        ({"user-agent": "ai-sdk/provider-utils/3.0 opencode/1.0"}, {}, "opencode"),
        ({"user-agent": "QwenCode/0.24.4 (linux; x64)"}, {}, "qwen-code"),
        ({"user-agent": "Anthropic/Python 0.70.0"}, {}, "sdk"),
        ({"user-agent": "AsyncOpenAI/Python 2.1.0"}, {}, "sdk"),
        ({"x-stainless-lang": "js"}, {}, "sdk"),
        ({"user-agent": "curl/8.1"}, {}, "unknown"),
        ({}, {}, "unknown"),
    ],
)
def test_a_harness_is_recognized_by_its_headers(
    headers: dict[str, str], billing: dict[str, str], harness: str
) -> None:
    raw = {name.encode(): value.encode() for name, value in headers.items()}
    assert harness_of(raw, billing) == harness


# Hints that mean the same in several dialects.


@pytest.mark.parametrize(
    ("parent", "own"),
    [
        ("x-parent-session-id", "x-session-id"),
        ("x-dynamo-parent-session-id", "x-dynamo-session-id"),
        ("x-codex-parent-thread-id", "thread-id"),
    ],
)
def test_a_session_with_a_parent_is_a_sub_agents(parent: str, own: str) -> None:
    facts = facts_of({parent: "lead", own: "child"})
    assert (facts.agent_id, facts.parent_agent_id) == ("child", "lead")
    assert facts.is_subagent
    assert facts.request_class == "subagent"
    assert not facts_of({parent: "lead", own: "lead"}).is_subagent
    assert facts_of({parent: "le ad", own: "child"}).ignored == (parent,)


def test_codex_metadata_wins_over_the_header_of_its_parent() -> None:
    turn = {"thread_source": "subagent", "thread_id": "t-2", "parent_thread_id": "t-1"}
    stated = {"x-codex-turn-metadata": json.dumps(turn), "x-codex-parent-thread-id": "t-0"}
    assert facts_of({**stated, "thread-id": "t-9"}).parent_agent_id == "t-1"


def test_a_side_query_is_named_by_its_beta() -> None:
    own = {"user-agent": "claude-cli/2.1.332"}
    stated = own | {"anthropic-beta": "interleaved-thinking,claude-code-side-query-2026-09-29"}
    assert facts_of(stated).request_class == "side_query"
    assert facts_of(stated | {"x-claude-code-request-class": "main"}).request_class == "main"
    assert facts_of(own).request_class == ""
    assert facts_of(stated | {"user-agent": "curl/8"}).request_class == ""


def agent_hint(**fields: Any) -> dict[bytes, bytes]:
    text = base64.urlsafe_b64encode(json.dumps(fields).encode()).rstrip(b"=")
    return {b"x-agent-hint": text}


def test_an_agent_hint_acts_as_the_headers_that_mean_the_same() -> None:
    stated = agent_hint(session="run-7", soft_priority=-3, state="finished", call_index=4)
    hints = hints_of(stated)
    assert stated_session(hints, {}) == "run-7"
    assert read_importance(hints, {}).priority == -3
    assert is_final(hints)
    assert read_client(stated, {}).ignored == ()


def test_a_header_wins_over_an_agent_hint() -> None:
    stated = agent_hint(session_id="run-7", soft_priority=-3, lifecycle_state="running")
    own = {b"session-id": b"s", b"x-sgl-ext-priority": b"5"}
    hints = hints_of(stated | own)
    assert stated_session(hints, {}) == "s"
    assert read_importance(hints, {}).priority == 5
    assert not is_final(hints)


@pytest.mark.parametrize(
    ("fields", "lease_s"),
    [
        ({}, 0.0),
        ({"pin": "yes"}, 0.0),
        ({"interval_ms": 9000}, 0.0),
        ({"pin": True}, None),
        ({"pin": True, "interval_ms": 90_000}, 90.0),
        ({"pin": True, "interval_ms": -1}, None),
    ],
)
def test_an_agent_hint_leases_its_prompt(fields: dict[str, Any], lease_s: float | None) -> None:
    assert stated_lease_s(hints_of(agent_hint(**fields))) == lease_s
    assert stated_lease_s({}) == 0.0


@pytest.mark.parametrize("raw", [b"", b"{}", b"!!", b"W10", b"A" * 5000, b"\xff", b"AAAAA"])
def test_a_malformed_agent_hint_is_named_and_ignored(raw: bytes) -> None:
    fields = {b"x-agent-hint": raw}
    hints = hints_of(fields)
    assert stated_session(hints, {}) is None
    assert read_importance(hints, {}).priority == 0
    assert not is_final(hints)
    assert stated_lease_s(hints) == 0.0
    assert read_client(fields, {}).ignored == ("x-agent-hint",)
