"""What clients say about themselves is read from headers as they send them."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sgl_ext.reading.client import (
    HARNESSES,
    REQUEST_CLASSES,
    ClientFacts,
    read_client,
)

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
