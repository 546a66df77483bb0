"""A request with a made-up last turn begins like the request that its client will send."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.next_turn import Turn, next_turn, partial_turn, tool_names
from sgl_ext.reading.segments import read_chain

MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
PATHS = (MESSAGES, CHAT, RESPONSES)
NONCE = "zq7f"
Json = dict[str, Any]

USER = {"role": "user", "content": "Read it."}
MARK = {"cache_control": {"type": "ephemeral"}}


def assistant(content: Any, **others: Any) -> Json:
    return {"role": "assistant", "content": content, **others}


def used(call: str) -> Json:
    return {"type": "tool_use", "id": call, "name": "read", "input": {}}


def gave(call: str, content: str = "result") -> Json:
    return {"type": "tool_result", "tool_use_id": call, "content": content}


def called(call: str) -> Json:
    return {"id": call, "type": "function", "function": {"name": "read", "arguments": "{}"}}


def result(call: str, content: str = "result") -> Json:
    return {"role": "tool", "tool_call_id": call, "content": content}


def function(call: str, kind: str = "function_call") -> Json:
    return {"type": kind, "call_id": call, "name": "read", "arguments": "{}"}


def put_out(call: str, output: str = "result", kind: str = "function_call_output") -> Json:
    return {"type": kind, "call_id": call, "output": output}


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


THINKING = {"type": "thinking", "thinking": "Hm."}
REASONING = {"type": "reasoning", "summary": [], "content": []}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]}
TEXT = {"type": "text", "text": "Hi."}
FIRST, SECOND = f"{NONCE}n0z", f"{NONCE}n1z"

# (path, the answer's items, its calls, the items that are added to the request)
ANSWERED: list[tuple[str, list[Json], tuple[str, ...], list[Json]]] = [
    (MESSAGES, [assistant([TEXT])], (), [assistant([TEXT]), user(FIRST)]),
    (MESSAGES, [assistant([THINKING, TEXT])], (), [assistant([THINKING, TEXT]), user(FIRST)]),
    (
        MESSAGES,
        [assistant([THINKING, used("a")])],
        ("a",),
        [assistant([THINKING, used("a")]), user([gave("a", FIRST)])],
    ),
    (
        MESSAGES,
        [assistant([used("b"), used("a")])],
        ("b", "a"),
        [assistant([used("b"), used("a")]), user([gave("b", FIRST), gave("a", SECOND)])],
    ),
    (CHAT, [assistant("Hi.")], (), [assistant("Hi."), user(FIRST)]),
    (
        CHAT,
        [assistant("Hi.", reasoning_content="Hm.")],
        (),
        [assistant("Hi.", reasoning_content="Hm."), user(FIRST)],
    ),
    (
        CHAT,
        [assistant("", reasoning_content="Hm.", tool_calls=[called("a")])],
        ("a",),
        [
            assistant("", reasoning_content="Hm.", tool_calls=[called("a")]),
            result("a", FIRST),
        ],
    ),
    (
        CHAT,
        [assistant("", tool_calls=[called("b"), called("a")])],
        ("b", "a"),
        [
            assistant("", tool_calls=[called("b"), called("a")]),
            result("b", FIRST),
            result("a", SECOND),
        ],
    ),
    (RESPONSES, [SAID], (), [SAID, user(FIRST)]),
    (RESPONSES, [REASONING, SAID], (), [REASONING, SAID, user(FIRST)]),
    (
        RESPONSES,
        [REASONING, function("a")],
        ("a",),
        [REASONING, function("a"), put_out("a", FIRST)],
    ),
    (
        RESPONSES,
        [SAID, function("b"), function("a", "custom_tool_call")],
        ("b", "a"),
        [
            SAID,
            function("b"),
            function("a", "custom_tool_call"),
            put_out("b", FIRST),
            put_out("a", SECOND, "custom_tool_call_output"),
        ],
    ),
]


def asked(path: str, *items: Json, **others: Any) -> Json:
    return {"model": "m", "input" if path == RESPONSES else "messages": list(items), **others}


def items_of(turn: Turn) -> list[Json]:
    found: list[Json] = turn.body["input"] if "input" in turn.body else turn.body["messages"]
    return found


@pytest.mark.parametrize(("path", "items", "calls", "wanted"), ANSWERED)
def test_the_answer_and_a_made_up_turn_are_appended(
    path: str, items: list[Json], calls: tuple[str, ...], wanted: list[Json]
) -> None:
    turn = next_turn(of_path(path), asked(path, USER), items, NONCE)
    assert turn is not None
    assert items_of(turn) == [USER, *wanted]
    assert len(turn.nonces) == max(1, len(calls))


CONVERSATIONS = {
    MESSAGES: [user([{"type": "text", "text": "Go.", **MARK}]), assistant([used("x")])],
    CHAT: [
        {"role": "system", "content": "Be."},
        user("Go."),
        assistant("", tool_calls=[called("x")]),
    ],
    RESPONSES: [{"role": "developer", "content": "Be."}, user("Go."), function("x")],
}
RESULT = {MESSAGES: user([gave("x")]), CHAT: result("x"), RESPONSES: put_out("x")}
settings = st.fixed_dictionaries(
    {},
    optional={
        "stream": st.booleans(),
        "stream_options": st.just({"include_usage": True}),
        "store": st.booleans(),
        "background": st.booleans(),
        "max_tokens": st.integers(1, 9),
        "tools": st.just([{"name": "read", **MARK}]),
        "temperature": st.floats(0, 1),
    },
)


@given(st.sampled_from(ANSWERED), settings, st.integers(1, 12))
def test_no_body_is_modified_and_each_nonce_occurs_once(
    case: tuple[str, list[Json], tuple[str, ...], list[Json]], others: Json, count: int
) -> None:
    path, answer, _, _ = case
    body = asked(path, *CONVERSATIONS[path], RESULT[path], **others)
    many = {
        MESSAGES: [assistant([used(f"c{k}") for k in range(count)])],
        CHAT: [assistant("", tool_calls=[called(f"c{k}") for k in range(count)])],
        RESPONSES: [function(f"c{k}") for k in range(count)],
    }[path]
    partial = asked(path, *CONVERSATIONS[path], **others)
    none_yet = asked(path, *CONVERSATIONS[path][:-1], *many, **others)
    given_to = copy.deepcopy((body, answer, many, partial, none_yet))
    turns = [
        next_turn(of_path(path), body, answer, NONCE),
        next_turn(of_path(path), body, many, NONCE),
        partial_turn(of_path(path), partial, NONCE),
        partial_turn(of_path(path), none_yet, NONCE),
    ]
    assert (body, answer, many, partial, none_yet) == given_to
    before = body["input" if path == RESPONSES else "messages"]
    for turn, shared in zip(turns, (len(before), len(before), len(before) - 1, 1), strict=True):
        assert turn is not None
        assert items_of(turn)[:shared] == before[:shared]
        written = json.dumps(turn.body)
        assert [written.count(nonce) for nonce in turn.nonces] == [1] * len(turn.nonces)
        assert sorted(turn.nonces, key=written.index) == list(turn.nonces)
        assert turn.nonces
        assert all(nonce.startswith(NONCE) and nonce.isalnum() for nonce in turn.nonces)
    assert turns[1] is not None
    assert len(turns[1].nonces) == count


@pytest.mark.parametrize("path", PATHS)
def test_a_made_up_request_neither_streams_nor_stores(path: str) -> None:
    asking = {"stream": True, "stream_options": {}, "background": True, "store": True, "n": 2}
    body = asked(path, USER, tools=[{"name": "read"}], **asking)
    for turn in (
        partial_turn(of_path(path), body, NONCE),
        next_turn(of_path(path), body, [SAID], NONCE),
    ):
        assert turn is not None
        assert turn.body["stream"] is False
        assert turn.body["tools"] is body["tools"]
        assert turn.body.keys().isdisjoint({"stream_options", "background"})
        assert turn.body["store"] is (path != RESPONSES)
        assert turn.body.get("max_tokens") == (1 if path == MESSAGES else None)
    for asked_for, found in ((7, 7), (None, 1 if path == MESSAGES else None)):
        kept = partial_turn(of_path(path), asked(path, USER, max_tokens=asked_for), NONCE)
        assert kept is not None
        assert kept.body["max_tokens"] == found


@pytest.mark.parametrize(
    ("path", "history", "is_kept"),
    [
        (MESSAGES, [assistant([TEXT]), USER], True),
        (CHAT, [], True),
        (CHAT, [assistant("Hi."), USER], False),
        (CHAT, [assistant("Hi.", reasoning_content=None), USER], False),
        (CHAT, [assistant("Hi."), USER, assistant("Hi.", reasoning_content="Hm."), USER], True),
        (RESPONSES, [], True),
        (RESPONSES, [SAID, USER], False),
        (RESPONSES, [function("x"), put_out("x")], False),
        (RESPONSES, [REASONING, SAID, USER], True),
    ],
)
def test_thinking_is_sent_back_if_the_client_did_so_before(
    path: str, history: list[Json], is_kept: bool
) -> None:
    items = {
        MESSAGES: [assistant([THINKING, TEXT])],
        CHAT: [assistant("Hi.", reasoning_content="Hm.")],
        RESPONSES: [REASONING, SAID],
    }[path]
    without = {MESSAGES: [assistant([TEXT])], CHAT: [assistant("Hi.")], RESPONSES: [SAID]}[path]
    turn = next_turn(of_path(path), asked(path, USER, *history), items, NONCE)
    assert turn is not None
    assert items_of(turn) == [USER, *history, *(items if is_kept else without), user(FIRST)]


def test_an_input_text_is_a_users_turn() -> None:
    turn = next_turn(of_path(RESPONSES), {"input": "Go."}, [SAID], NONCE)
    assert turn is not None
    assert items_of(turn) == [user("Go."), SAID, user(FIRST)]


UNREADABLE: list[tuple[str, Any]] = [
    (RESPONSES, {"input": "Go.", "previous_response_id": "resp_1"}),
    (RESPONSES, {"input": "Go.", "conversation": "conv_1"}),
    (RESPONSES, {"messages": [USER]}),
    (CHAT, {"input": [USER]}),
    (CHAT, {"messages": "Go."}),
    (MESSAGES, {}),
    (MESSAGES, []),
    (MESSAGES, None),
    ("/v1/completions", {"prompt": "Go.", "messages": [USER]}),
]


@pytest.mark.parametrize(("path", "body"), UNREADABLE)
def test_a_body_that_refers_to_stored_turns_has_no_next_turn(path: str, body: Any) -> None:
    assert next_turn(of_path(path), body, [SAID], NONCE) is None
    assert partial_turn(of_path(path), body, NONCE) is None


@pytest.mark.parametrize(
    ("path", "items"),
    [
        (CHAT, [USER, "Go."]),
        (MESSAGES, [user(["Go."])]),
        (CHAT, [assistant("", tool_calls=[{**called("a"), "id": ["a"]}]), result("a")]),
        (CHAT, [assistant("", tool_calls=[{"function": {}}])]),
        (RESPONSES, [{"type": "function_call"}]),
    ],
)
def test_a_body_with_malformed_turns_has_no_next_turn(path: str, items: list[Any]) -> None:
    assert partial_turn(of_path(path), asked(path, *items), NONCE) is None


@pytest.mark.parametrize("path", PATHS)
def test_a_request_that_ends_with_its_assistant_has_no_next_turn(path: str) -> None:
    answer = [SAID]
    for begun in (assistant("I", prefix=True), SAID):
        assert next_turn(of_path(path), asked(path, USER, begun), answer, NONCE) is None
        assert partial_turn(of_path(path), asked(path, USER, begun), NONCE) is not None


SYSTEM = {"role": "system", "content": "Mind the gap."}
# (path, the request's items, the items appended to them; None if the request stays unchanged)
PARTIAL: list[tuple[str, list[Json], list[Json] | None]] = [
    (MESSAGES, [USER], None),
    (MESSAGES, [USER, SYSTEM], None),
    (MESSAGES, [], [user(FIRST)]),
    (MESSAGES, [USER, assistant("Hi.")], [user(FIRST)]),
    (MESSAGES, [USER, assistant([TEXT])], [user(FIRST)]),
    (MESSAGES, [USER, assistant([used("a")])], [user([gave("a", FIRST)])]),
    (MESSAGES, [USER, assistant([used("a")]), user([gave("a")])], None),
    (
        MESSAGES,
        [USER, assistant([used("a")]), user([gave("a")]), assistant([used("b"), used("c")])],
        [user([gave("b", FIRST), gave("c", SECOND)])],
    ),
    (MESSAGES, [USER, assistant([used("a"), used("b")]), user([gave("a"), TEXT])], None),
    (CHAT, [user("Go.")], None),
    (CHAT, [SYSTEM], [user(FIRST)]),
    (CHAT, [USER, assistant("Hi.")], [user(FIRST)]),
    (CHAT, [USER, assistant("Hi.", tool_calls=None)], [user(FIRST)]),
    (CHAT, [USER, assistant(None, tool_calls=[called("a")])], [result("a", FIRST)]),
    (CHAT, [USER, assistant(None, tool_calls=[called("a")]), result("a")], None),
    (
        CHAT,
        [
            USER,
            assistant("", tool_calls=[called("a"), called("b"), called("c")]),
            result("b"),
        ],
        [result("a", FIRST), result("c", SECOND)],
    ),
    (CHAT, [USER, assistant("", tool_calls=[called("a")]), user("Stop.")], None),
    (RESPONSES, [USER], None),
    (RESPONSES, [{"role": "developer", "content": "Be."}], [user(FIRST)]),
    (RESPONSES, [USER, SAID], [user(FIRST)]),
    (RESPONSES, [USER, REASONING], [user(FIRST)]),
    (RESPONSES, [USER, REASONING, function("a")], [put_out("a", FIRST)]),
    (RESPONSES, [USER, REASONING, function("a"), put_out("a")], None),
    (
        RESPONSES,
        [USER, function("a"), function("b"), put_out("a")],
        [put_out("b", FIRST)],
    ),
    (
        RESPONSES,
        [USER, function("a"), put_out("a"), SAID, function("p", "custom_tool_call")],
        [put_out("p", FIRST, "custom_tool_call_output")],
    ),
]


@pytest.mark.parametrize(("path", "items", "added"), PARTIAL)
def test_an_incomplete_request_is_completed(
    path: str, items: list[Json], added: list[Json] | None
) -> None:
    turn = partial_turn(of_path(path), asked(path, *items), NONCE)
    assert turn is not None
    assert items_of(turn) == items + (added or [])
    assert bool(turn.nonces) == (added is not None)


def test_a_missing_result_joins_the_existing_results() -> None:
    there = {**gave("b"), **MARK}
    calls = assistant([used("a"), used("b"), used("c")])
    body = asked(MESSAGES, USER, calls, user([there]))
    turn = partial_turn(of_path(MESSAGES), body, NONCE)
    assert turn is not None
    assert items_of(turn) == [USER, calls, user([there, gave("a", FIRST), gave("c", SECOND)])]
    assert body["messages"][-1] == user([there])


def test_the_guess_for_codex_equals_what_it_sends_up_to_the_result() -> None:
    heard = {"type": "message", "id": "msg_1", **user([{"type": "input_text", "text": "Go."}])}
    sent_back = [
        {**REASONING, "id": "rs_0", "encrypted_content": None},
        {**SAID, "id": "msg_2", "status": "completed", "phase": "commentary"},
        {**function("a"), "id": "fc_1", "status": "completed"},
        {**put_out("a", "hi\n"), "id": "fco_1"},
    ]
    items = [REASONING, {**SAID, "phase": "commentary"}, function("a")]
    turn = next_turn(of_path(RESPONSES), {"input": [heard]}, items, NONCE)
    assert turn is not None
    guessed = read_chain(of_path(RESPONSES), turn.body)
    real = read_chain(of_path(RESPONSES), {"input": [heard, *sent_back]})
    assert guessed.hashes[:-1] == real.hashes[:-1]
    assert guessed.hashes[-1] != real.hashes[-1]


keys = st.sampled_from(
    ["role", "content", "type", "id", "call_id", "tool_call_id", "tool_use_id", "tool_calls"]
)
words = st.sampled_from(
    ["user", "assistant", "tool", "system", "tool_use", "tool_result", "function_call", "thinking"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=15,
)
bodies = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("messages", "input", "nvext", "tools", "system"), values)
)


@given(
    st.sampled_from(PATHS), bodies | values, st.lists(values, max_size=4), st.sampled_from(ANSWERED)
)
def test_no_body_breaks_it(path: str, body: Any, items: list[Any], case: Any) -> None:
    answer = case[1]
    for each in (body, {"messages": items, "input": items}):
        before = copy.deepcopy(each)
        for turn in (
            next_turn(of_path(path), each, answer, NONCE),
            partial_turn(of_path(path), each, NONCE),
        ):
            assert turn is None or len(turn.nonces) == len(set(turn.nonces))
        assert each == before


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ([assistant([THINKING, used("a"), used("b") | {"name": "Bash"}])], ("read", "Bash")),
        ([assistant("", tool_calls=[called("a"), called("b")])], ("read",)),
        ([REASONING, SAID, function("a"), function("b", "custom_tool_call")], ("read",)),
        ([assistant("Done.")], ()),
        ([SAID], ()),
        ([], ()),
        ([assistant([{"type": "tool_use"}], tool_calls=[{"function": {"name": 5}}])], ()),
    ],
)
def test_the_tools_of_an_answer_are_known(answer: list[Json], names: tuple[str, ...]) -> None:
    assert tool_names(answer) == names
