"""Which requests ask for a summary, and what their prompts keep of the turn before."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.client import NO_FACTS, ClientFacts, read_client
from sgl_ext.reading.compaction import appended, asks_for_summary, leaves_room, with_tools

MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
CODEX = (
    "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary for another LLM"
    " that will resume the task."
)
CLAUDE = (
    "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\n- You already have the context."
    "\n\nYour task is to create a detailed summary of the conversation so far."
)
QWEN = "First, scan all. Then produce the <state_snapshot> XML. Do NOT call any tools."
OPENCODE = (
    "Provide a detailed summary of our conversation above.\n"
    "Do not mention the summary process or that context was compacted."
)
PERSON = (
    "Please summarize the file README.md.",
    "Write a summary of this session's design, and use the Read tool where you need it.",
    "Do not call any tools, answer from memory: what is a snapshot?",
    "What did the conversation say about CONTEXT?",
    "",
)


def body_of(path: str, text: str, **fields: Any) -> dict[str, Any]:
    key = "input" if path == RESPONSES else "messages"
    kind = "input_text" if path == RESPONSES else "text"
    earlier = [{"role": "user", "content": "Begin."}, {"role": "assistant", "content": "I do."}]
    blocks = [{"type": kind, "text": text}]
    return {"model": "m", key: [*earlier, {"role": "user", "content": blocks}], **fields}


def asks(path: str, body: Any, *, facts: ClientFacts = NO_FACTS, had_tools: bool = False) -> bool:
    return asks_for_summary(facts, of_path(path), body, had_tools=had_tools)


@pytest.mark.parametrize(
    ("path", "text", "had_tools"),
    [
        (MESSAGES, CLAUDE, False),
        (RESPONSES, CODEX, True),
        (CHAT, QWEN, False),
        (CHAT, OPENCODE, True),
    ],
)
def test_the_words_of_clients_ask_for_a_summary(path: str, text: str, had_tools: bool) -> None:
    assert asks(path, body_of(path, text), had_tools=had_tools)


@pytest.mark.parametrize("path", [MESSAGES, CHAT, RESPONSES])
@pytest.mark.parametrize("text", PERSON)
def test_a_person_who_wants_something_else_does_not(path: str, text: str) -> None:
    tools = [{"name": "look"}]
    assert not asks(path, body_of(path, text, tools=tools), had_tools=True)
    assert not asks(path, body_of(path, text))


@pytest.mark.parametrize("text", [CLAUDE, CODEX, QWEN, OPENCODE])
def test_words_in_a_tools_result_do_not(text: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": text}
    body = body_of(MESSAGES, "")
    body["messages"][-1]["content"] = [result]
    assert not asks(MESSAGES, body, had_tools=True)
    body["messages"][-1] = {"role": "assistant", "content": text}
    assert not asks(MESSAGES, body, had_tools=True)


def test_what_the_client_says_decides() -> None:
    header = {b"user-agent": b"claude-cli/2.1", b"x-claude-code-request-class": b"compaction"}
    assert asks(MESSAGES, body_of(MESSAGES, "Hello."), facts=read_client(header, {}))
    header[b"x-claude-code-request-class"] = b"main"
    assert not asks(MESSAGES, body_of(MESSAGES, CLAUDE), facts=read_client(header, {}))
    turn = {b"x-codex-turn-metadata": b'{"request_kind": "compaction", "thread_source": "user"}'}
    assert asks(RESPONSES, body_of(RESPONSES, "Hello."), facts=read_client(turn, {}))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(_JSON | st.dictionaries(st.sampled_from(["messages", "input", "tools", "role"]), _JSON))
def test_any_body_can_be_looked_at(body: Any) -> None:
    for path in (MESSAGES, CHAT, RESPONSES):
        assert asks(path, body) in (True, False)


_LINES = st.text("abc <>\n", max_size=40)


def rendered(turns: list[tuple[str, str, str]], *, begins_answer: bool) -> str:
    """Like a template that drops the thinking before the last user's turn."""
    last = max((n for n, turn in enumerate(turns) if turn[0] == "user"), default=-1)
    shown = [
        f"<|im_start|>{role}\n{f'<think>{thought}</think>' if thought and n > last else ''}"
        f"{text}<|im_end|>\n"
        for n, (role, thought, text) in enumerate(turns)
    ]
    return "".join(shown) + ("<|im_start|>assistant\n" if begins_answer else "")


_TURNS = st.lists(
    st.tuples(st.sampled_from(["assistant", "tool"]), _LINES, _LINES).map(
        lambda turn: (turn[0], turn[1] if turn[0] == "assistant" else "", turn[2])
    ),
    min_size=1,
    max_size=6,
)


@given(_TURNS, st.text("xyz ", min_size=1).filter(str.strip))
def test_a_summary_follows_the_prompt_of_the_turn_before(
    turns: list[tuple[str, str, str]], text: str
) -> None:
    earlier = [("user", "", "Begin."), *turns]
    before = rendered(earlier, begins_answer=False)
    whole = rendered([*earlier, ("user", "", text)], begins_answer=True)
    header, ends = f"<|im_start|>user\n{text}<|im_end|>\n", "<|im_start|>assistant\n"
    loses = any(thought for _, thought, _ in turns)
    assert appended(before, whole, text) == (before + header + ends if loses else None)


def test_a_last_message_that_is_not_found_changes_nothing() -> None:
    assert appended("a<end>", "b<end>u: SUM UP<end>", "sum up") is None
    assert appended("", "b<end>u: sum up<end>", "sum up") is None
    assert appended("a<1234567>", "b<end>u: sum up<end>", "sum up") is None
    assert appended("a<end_of_it>", "b<end_of_it>" + "u" * 300 + "sum up", "sum up") is None


def test_tools_are_shown_and_not_called() -> None:
    body = body_of(RESPONSES, CODEX, tools=[], tool_choice="auto")
    kept = with_tools(body, [{"name": "look"}])
    assert (kept["tools"], kept["tool_choice"]) == ([{"name": "look"}], "none")
    assert (kept["input"], body["tools"]) == (body["input"], [])


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_a_summary_has_room(prompt: int, window: int) -> None:
    assert leaves_room(prompt, window) == (window - prompt >= min(8192, window // 16))
