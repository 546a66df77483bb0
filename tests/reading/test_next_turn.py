"""The turn that follows a request: what its client sends back of an answer, and a made-up turn."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, cycle
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.next_turn import (
    LIMIT_ANSWER_BYTES,
    Turn,
    next_turn,
    partial_turn,
    read_answer,
    tool_names,
)
from sgl_ext.reading.segments import read_chain

# A request with a made-up last turn begins like the request that its client will send.

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


# Answers, whole or streamed as SGLang streams them, are read as the turn that is sent back.


@dataclass(frozen=True)
class Said:
    """What a model says: the calls are ids, names and arguments, these as they were written."""

    text: str = ""
    thinking: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()


READ = ("call_1", "read", '{"path": "a.py", "lines": [1, 20]}')
LIST = ("call_2", "list", "{}")
KINDS = {
    "text": Said("Hello. "),
    "thinking and text": Said("Hello.", "Greet them."),
    "thinking and calls": Said("", "Look first.", (READ,)),
    "parallel calls": Said("\n\nI look.", "", (READ, LIST)),
}


def whole(path: str, said: Said) -> Json:
    """The answer as one object, with the fields that SGLang 0.5.23 gives it."""
    if path == MESSAGES:
        return {
            "id": "msg_7f",
            "type": "message",
            "role": "assistant",
            "content": [block for block, _, _ in blocks(said)] or [{"type": "text", "text": ""}],
            "model": "tiny",
            "stop_reason": "tool_use" if said.calls else "end_turn",
            "usage": {"input_tokens": 9, "output_tokens": 5},
        }
    if path == CHAT:
        message: Json = {
            "role": "assistant",
            "content": said.text,
            "reasoning_content": said.thinking or None,
        }
        if said.calls:
            message["tool_calls"] = [chat_call(*call, index=None) for call in said.calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": "tool_calls" if said.calls else "stop",
            "matched_stop": None if said.calls else 2,
        }
        return {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "tiny",
            "choices": [choice],
            "usage": {"prompt_tokens": 9, "total_tokens": 14, "completion_tokens": 5},
            "metadata": {"weight_version": "default"},
        }
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "tiny",
        "output": output(said),
        "status": "completed",
        "usage": {"input_tokens": 9, "output_tokens": 5},
        "error": None,
        "incomplete_details": None,
        "previous_response_id": None,
        "store": True,
    }


def blocks(said: Said) -> list[tuple[Json, str, str]]:
    """The blocks of /v1/messages; and of each the type of its deltas, and their text together."""
    made: list[tuple[Json, str, str]] = []
    if said.thinking:
        block = {"type": "thinking", "thinking": said.thinking}
        made.append((block, "thinking_delta", said.thinking))
    if said.text:
        made.append(({"type": "text", "text": said.text}, "text_delta", said.text))
    for call, name, arguments in said.calls:
        block = {"type": "tool_use", "id": call, "name": name, "input": json.loads(arguments)}
        made.append((block, "input_json_delta", "" if arguments == "{}" else arguments))
    return made


def chat_call(call: str | None, name: str | None, arguments: str, index: int | None) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"id": call, "index": index, "type": "function", "function": function}


def output(said: Said) -> list[Json]:
    items: list[Json] = []
    if said.thinking:
        items.append(
            {
                "id": "rs_1",
                "type": "reasoning",
                "summary": [],
                "content": [{"text": said.thinking, "type": "reasoning_text"}],
                "encrypted_content": None,
                "status": "completed",
            }
        )
    if said.text:
        text = {"type": "output_text", "text": said.text, "annotations": [], "logprobs": None}
        items.append(
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "phase": "commentary" if said.calls else "final_answer",
                "content": [text],
            }
        )
    for call, name, arguments in said.calls:
        items.append(
            {
                "arguments": arguments,
                "call_id": call,
                "name": name,
                "type": "function_call",
                "id": f"fc_{call}",
                "namespace": None,
                "status": "completed",
            }
        )
    return items


def streamed(path: str, said: Said, size: int = 4, end: str = "\n") -> bytes:
    """The answer as events; each text comes in pieces of `size` characters."""
    events = {MESSAGES: of_messages, CHAT: of_chat, RESPONSES: of_responses}[path](said, size)
    named = path != CHAT
    lines = [": a comment", ""]
    for event in events:
        if named:
            lines.append(f"event: {event['type']}")
        lines += ["data: " + json.dumps(event), ""]
    lines += ["data: [DONE]", ""] if path == CHAT else []
    return "".join(line + end for line in lines).encode()


def pieces(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def of_messages(said: Said, size: int) -> Iterator[Json]:
    answer = whole(MESSAGES, said)
    started = {**answer, "content": []}
    del started["stop_reason"]
    yield {"type": "message_start", "message": started}
    yield {"type": "ping"}
    for index, (block, kind, text) in enumerate(blocks(said)):
        empty = {key: "" if key in ("text", "thinking") else block[key] for key in block}
        if "input" in empty:
            empty["input"] = {}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        key = "partial_json" if kind == "input_json_delta" else block["type"]
        for piece in pieces(text, size):
            delta = {"type": kind, key: piece}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    stop = {"stop_reason": answer["stop_reason"]}
    yield {"type": "message_delta", "delta": stop, "usage": {"output_tokens": 5}}
    yield {"type": "message_stop"}


def of_chat(said: Said, size: int) -> Iterator[Json]:
    def chunk(finish: str | None = None, **delta: Any) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}

    yield chunk(reasoning_content=None, role="assistant", content="")
    for piece in pieces(said.thinking, size):
        yield chunk(reasoning_content=piece)
    for piece in pieces(said.text, size):
        yield chunk(reasoning_content=None, content=piece)
    for index, (call, name, arguments) in enumerate(said.calls):
        yield chunk(content=None, tool_calls=[chat_call(call, name, "", index)])
        for piece in pieces(arguments, size):
            yield chunk(content=None, tool_calls=[chat_call(None, None, piece, index)])
    yield chunk("tool_calls" if said.calls else "stop", reasoning_content=None)
    yield {"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": {"n": 1}}


def of_responses(said: Said, size: int) -> Iterator[Json]:
    answer = whole(RESPONSES, said)
    yield {"type": "response.created", "response": {**answer, "output": [], "status": "queued"}}
    for index, item in enumerate(answer["output"]):
        yield {"type": "response.output_item.added", "output_index": index, "item": {}}
        for piece in pieces(said.text, size):
            yield {"type": "response.output_text.delta", "delta": piece}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": "response.completed", "response": answer}


def both(path: str, said: Said) -> Iterator[list[Any] | None]:
    yield read_answer(of_path(path), json.dumps(whole(path, said)).encode(), False)
    yield read_answer(of_path(path), streamed(path, said), True)


def text_block(text: str) -> Json:
    return {"type": "text", "text": text}


THOUGHT = {"type": "thinking", "thinking": "Look first."}
USED = {
    "type": "tool_use",
    "id": "call_1",
    "name": "read",
    "input": {"path": "a.py", "lines": [1, 20]},
}
CALLED = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "read", "arguments": READ[2]},
}
REASONED = {"type": "reasoning", "summary": []}
SPOKEN = {"type": "message", "role": "assistant", "phase": "final_answer"}


def reasoned(text: str) -> Json:
    return {**REASONED, "content": [{"text": text, "type": "reasoning_text"}]}


def spoken(text: str, phase: str = "final_answer") -> Json:
    return {**SPOKEN, "phase": phase, "content": [{"type": "output_text", "text": text}]}


def function_call(call: str, name: str, arguments: str) -> Json:
    return {"arguments": arguments, "call_id": call, "name": name, "type": "function_call"}


WANTED: list[tuple[str, str, list[Json]]] = [
    (MESSAGES, "text", [{"role": "assistant", "content": [text_block("Hello. ")]}]),
    (
        MESSAGES,
        "thinking and text",
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Greet them."},
                    text_block("Hello."),
                ],
            }
        ],
    ),
    (MESSAGES, "thinking and calls", [{"role": "assistant", "content": [THOUGHT, USED]}]),
    (
        MESSAGES,
        "parallel calls",
        [
            {
                "role": "assistant",
                "content": [
                    text_block("\n\nI look."),
                    USED,
                    {"type": "tool_use", "id": "call_2", "name": "list", "input": {}},
                ],
            }
        ],
    ),
    (CHAT, "text", [{"role": "assistant", "content": "Hello. "}]),
    (
        CHAT,
        "thinking and text",
        [{"role": "assistant", "content": "Hello.", "reasoning_content": "Greet them."}],
    ),
    (
        CHAT,
        "thinking and calls",
        [
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "Look first.",
                "tool_calls": [CALLED],
            }
        ],
    ),
    (
        CHAT,
        "parallel calls",
        [
            {
                "role": "assistant",
                "content": "\n\nI look.",
                "tool_calls": [
                    CALLED,
                    {
                        "id": "call_2",
                        "type": "function",
                        "function": {"name": "list", "arguments": "{}"},
                    },
                ],
            }
        ],
    ),
    (RESPONSES, "text", [spoken("Hello. ")]),
    (RESPONSES, "thinking and text", [reasoned("Greet them."), spoken("Hello.")]),
    (RESPONSES, "thinking and calls", [reasoned("Look first."), function_call(*READ)]),
    (
        RESPONSES,
        "parallel calls",
        [spoken("\n\nI look.", "commentary"), function_call(*READ), function_call(*LIST)],
    ),
]


@pytest.mark.parametrize(("path", "kind", "items"), WANTED)
def test_an_answer_is_read_as_the_items_that_its_client_appends(
    path: str, kind: str, items: list[Json]
) -> None:
    said = KINDS[kind]
    for answer in both(path, said):
        assert answer == items


written_texts = st.text(max_size=30)
arguments = st.dictionaries(
    written_texts,
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | written_texts
    | st.lists(written_texts, max_size=3),
    max_size=3,
)


@st.composite
def sayings(draw: st.DrawFn) -> Said:
    named = draw(st.lists(st.tuples(st.text("ab_", min_size=1), arguments), max_size=3))
    calls = tuple((f"call_{k}", name, json.dumps(args)) for k, (name, args) in enumerate(named))
    said = Said(draw(written_texts), draw(written_texts), calls)
    assume(said.calls or said.text.strip())
    return said


@given(st.sampled_from(PATHS), sayings(), st.integers(1, 9), st.sampled_from(["\n", "\r\n"]))
def test_a_stream_gives_the_same_items_as_the_whole_answer(
    path: str, said: Said, size: int, end: str
) -> None:
    answer = read_answer(of_path(path), json.dumps(whole(path, said)).encode(), False)
    assert answer is not None
    assert all(f'"{call}"' in json.dumps(answer) for call, _, _ in said.calls)
    assert answer == read_answer(of_path(path), streamed(path, said, size, end), True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_answer_is_none_wherever_it_is_cut(path: str, kind: str) -> None:
    stream = streamed(path, KINDS[kind])
    full = json.dumps(whole(path, KINDS[kind])).encode()
    for data, is_stream in ((stream, True), (full, False)):
        assert read_answer(of_path(path), data, is_stream) is not None
        assert not any(
            read_answer(of_path(path), data[:end], is_stream) for end in range(len(data))
        )


@pytest.mark.parametrize("path", PATHS)
def test_data_after_the_end_of_a_stream_is_ignored(path: str) -> None:
    data = streamed(path, KINDS["text"])
    assert read_answer(of_path(path), data + b"data: {oops\n\n", True) == read_answer(
        of_path(path), data, True
    )


@pytest.mark.parametrize("path", PATHS)
def test_a_field_of_an_event_may_lack_its_space_and_the_data_have_several_lines(path: str) -> None:
    data = streamed(path, KINDS["parallel calls"])
    plain = read_answer(of_path(path), data, True)
    assert plain is not None
    assert read_answer(of_path(path), data.replace(b"data: ", b"data:"), True) == plain
    broken = data.replace(b'data: {"', b'data: {\nid: 7\ndata: "')
    assert broken != data
    assert read_answer(of_path(path), broken, True) == plain


Change = Callable[[Json], Any]


def of_first(**changes: Any) -> Change:
    return lambda answer: answer["choices"][0].update(changes)


def of_message(**changes: Any) -> Change:
    return lambda answer: answer["choices"][0]["message"].update(changes)


UNCERTAIN: list[tuple[str, str, Change]] = [
    *(
        (MESSAGES, "text", lambda answer, stop=stop: answer.update(stop_reason=stop))
        for stop in ("max_tokens", "refusal", "pause_turn", "tool_use", "future", None)
    ),
    (MESSAGES, "parallel calls", lambda answer: answer.update(stop_reason="end_turn")),
    (MESSAGES, "parallel calls", lambda answer: answer.update(stop_reason="max_tokens")),
    (MESSAGES, "parallel calls", lambda answer: answer["content"][1].update(input="x")),
    (MESSAGES, "parallel calls", lambda answer: answer["content"][1].update(id=None)),
    (MESSAGES, "text", lambda answer: answer["content"].append({"type": "server_tool_use"})),
    (MESSAGES, "text", lambda answer: answer["content"].append({"type": "redacted_thinking"})),
    (MESSAGES, "text", lambda answer: answer.update(content=[text_block("\n\n")])),
    (MESSAGES, "text", lambda answer: answer.update(content=[THOUGHT])),
    (MESSAGES, "text", lambda answer: answer.update(content=[])),
    (MESSAGES, "text", lambda answer: answer.update(content=None)),
    *(
        (CHAT, "text", of_first(finish_reason=finish))
        for finish in ("length", "content_filter", "abort", "tool_calls", "function_call", None)
    ),
    (CHAT, "parallel calls", of_first(finish_reason="stop")),
    (CHAT, "parallel calls", of_first(finish_reason="length")),
    (CHAT, "text", lambda answer: answer["choices"].append(answer["choices"][0])),
    (CHAT, "text", lambda answer: answer["choices"].clear()),
    (CHAT, "text", of_message(refusal="No.")),
    (CHAT, "text", of_message(function_call={"name": "read", "arguments": "{}"})),
    (CHAT, "text", of_message(content="")),
    (CHAT, "text", of_message(content=[text_block("Hello.")])),
    (CHAT, "parallel calls", of_message(tool_calls=[chat_call("c", "read", '{"a', 0)])),
    (CHAT, "parallel calls", of_message(tool_calls=[chat_call("c", "read", "[]", 0)])),
    (CHAT, "parallel calls", of_message(tool_calls=[chat_call(None, "read", "{}", 0)])),
    *(
        (RESPONSES, "text", lambda answer, status=status: answer.update(status=status))
        for status in ("incomplete", "failed", "queued", "in_progress", "cancelled", None)
    ),
    (RESPONSES, "text", lambda answer: answer.update(error={"code": "server_error"})),
    *(
        (RESPONSES, "text", lambda answer, kind=kind: answer["output"].append({"type": kind}))
        for kind in ("web_search_call", "code_interpreter_call", "mcp_call", "future")
    ),
    (RESPONSES, "parallel calls", lambda answer: answer["output"][1].update(status="incomplete")),
    (RESPONSES, "parallel calls", lambda answer: answer["output"][1].update(call_id=None)),
    (
        RESPONSES,
        "text",
        lambda answer: answer["output"][0].update(content=[{"type": "refusal", "refusal": "No."}]),
    ),
    (RESPONSES, "text", lambda answer: answer["output"][0]["content"][0].update(text="")),
    (RESPONSES, "thinking and text", lambda answer: answer["output"].pop()),
]


@pytest.mark.parametrize(("path", "kind", "change"), UNCERTAIN)
def test_an_answer_from_which_a_client_may_not_continue_is_none(
    path: str, kind: str, change: Change
) -> None:
    answer = whole(path, KINDS[kind])
    assert read_answer(of_path(path), json.dumps(answer).encode(), False) is not None
    change(answer)
    assert read_answer(of_path(path), json.dumps(answer).encode(), False) is None


def in_stream(path: str, kind: str, old: str, new: str) -> bytes:
    """A stream in which something stands in another's place."""
    data = streamed(path, KINDS[kind], size=99).decode()
    assert old in data
    assert read_answer(of_path(path), data.encode(), True) is not None
    return data.replace(old, new).encode()


ERROR = 'data: {"error": {"object": "error", "message": "out of memory", "code": 500}}\n\n'


@pytest.mark.parametrize(
    ("path", "kind", "old", "new"),
    [
        (MESSAGES, "text", '"end_turn"', '"max_tokens"'),
        (MESSAGES, "text", '{"type": "ping"}', '{"type": "error", "error": {}}'),
        (MESSAGES, "text", '"text_delta"', '"citations_delta"'),
        (MESSAGES, "parallel calls", '[1, 20]}"', '[1, 20]"'),
        (
            MESSAGES,
            "parallel calls",
            '"content_block_start", "index": 1',
            '"content_block_start", "index": 9',
        ),
        (CHAT, "text", '"stop"', '"length"'),
        (CHAT, "text", '"stop"', "null"),
        (CHAT, "text", "data: [DONE]", ERROR + "data: [DONE]"),
        (CHAT, "text", '{"index": 0', '{"index": 1'),
        (CHAT, "text", '"content": "Hello. "', '"content": "Hello. ", "refusal": "No."'),
        (CHAT, "thinking and calls", '{"id": null, "index": 0', '{"id": "call_9", "index": 0'),
        (CHAT, "parallel calls", '{"id": "call_2", "index": 1', '{"id": "call_2", "index": 0'),
        (CHAT, "parallel calls", '[1, 20]}"', '[1, 20]"'),
        (RESPONSES, "text", '"response.completed"', '"response.incomplete"'),
        (RESPONSES, "text", '"response.created"', '"error"'),
        (RESPONSES, "text", '"status": "completed", "usage"', '"status": "failed", "usage"'),
    ],
)
def test_a_stream_with_an_uncertain_continuation_is_none(
    path: str, kind: str, old: str, new: str
) -> None:
    assert read_answer(of_path(path), in_stream(path, kind, old, new), True) is None


def test_a_custom_tools_call_and_a_namespace_stay_unchanged() -> None:
    call = {
        "type": "custom_tool_call",
        "id": "ctc_1",
        "call_id": "c",
        "name": "patch",
        "input": "+",
    }
    inner = {**function_call(*READ), "namespace": "agents"}
    answer = {**whole(RESPONSES, Said()), "output": [call, inner]}
    found = read_answer(of_path(RESPONSES), json.dumps(answer).encode(), False)
    assert found is not None
    assert found == [{k: v for k, v in call.items() if k != "id"}, inner]


def test_a_blank_text_between_thinking_and_calls_is_not_sent_back() -> None:
    for answer in both(MESSAGES, replace(KINDS["thinking and calls"], text="\n\n")):
        assert answer is not None
        assert answer == [{"role": "assistant", "content": [THOUGHT, USED]}]


def test_the_text_at_the_start_of_a_block_is_part_of_it() -> None:
    empty, begun = '{"type": "text", "text": ""}', '{"type": "text", "text": "Oh. "}'
    answer = read_answer(of_path(MESSAGES), in_stream(MESSAGES, "text", empty, begun), True)
    assert answer is not None
    assert answer == [{"role": "assistant", "content": [text_block("Oh. Hello. ")]}]


def test_a_chunk_after_the_finish_reason_does_not_reset_it() -> None:
    later = 'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": null}]}\n\n'
    data = in_stream(CHAT, "text", "data: [DONE]", later + "data: [DONE]")
    assert read_answer(of_path(CHAT), data, True) == next(both(CHAT, KINDS["text"]))


def test_a_stop_sequence_ends_an_answer_too() -> None:
    data = in_stream(MESSAGES, "text", '"end_turn"', '"stop_sequence"')
    assert read_answer(of_path(MESSAGES), data, True) == next(both(MESSAGES, KINDS["text"]))


def test_a_signature_is_sent_back_and_an_empty_one_is_not() -> None:
    for signature, kept in (("c2ln", {"signature": "c2ln"}), ("", {})):
        delta = {"type": "signature_delta", "signature": signature}
        event = {"type": "content_block_delta", "index": 0, "delta": delta}
        stop = b'event: content_block_stop\ndata: {"type": "content_block_stop", "index": 0}'
        data = streamed(MESSAGES, KINDS["thinking and calls"])
        signed = data.replace(stop, b"data: " + json.dumps(event).encode() + b"\n\n" + stop)
        assert signed != data
        answer = read_answer(of_path(MESSAGES), signed, True)
        assert answer is not None
        assert answer[0]["content"][0] == THOUGHT | kept


def test_empty_reasoning_is_sent_back() -> None:
    answer = whole(CHAT, KINDS["text"])
    answer["choices"][0]["message"]["reasoning_content"] = ""
    found = read_answer(of_path(CHAT), json.dumps(answer).encode(), False)
    assert found is not None
    assert found[0]["reasoning_content"] == ""


def test_answers_of_other_paths_and_huge_answers_are_not_read() -> None:
    data = json.dumps(whole(CHAT, KINDS["text"])).encode()
    full = data + b" " * (LIMIT_ANSWER_BYTES - len(data))
    assert read_answer(of_path(CHAT), full, False) is not None
    assert read_answer(of_path(CHAT), full + b" ", False) is None
    assert read_answer(of_path("/v1/completions"), data, False) is None
    assert read_answer(of_path(MESSAGES), data, False) is None
    assert read_answer(of_path(CHAT), data, True) is None
    assert read_answer(of_path(CHAT), streamed(CHAT, KINDS["text"]), False) is None


names = st.sampled_from(
    [
        "type",
        "role",
        "content",
        "index",
        "delta",
        "choices",
        "message",
        "finish_reason",
        "tool_calls",
        "function",
        "id",
        "name",
        "arguments",
        "output",
        "item",
        "output_index",
        "response",
        "status",
        "stop_reason",
        "text",
        "thinking",
        "input",
    ]
)
kinds = st.sampled_from(
    [
        "text",
        "thinking",
        "tool_use",
        "message",
        "reasoning",
        "function_call",
        "content_block_start",
        "text_delta",
        "content_block_delta",
        "message_delta",
        "message_stop",
        "response.completed",
        "completed",
        "end_turn",
        "stop",
        "response.output_item.done",
        "tool_calls",
        "assistant",
    ]
)
written_values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | written_texts | kinds,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5),
    max_leaves=20,
)


def as_events(documents: list[Any]) -> bytes:
    data = chain((json.dumps(document) for document in documents), ["[DONE]"])
    return "".join(f"data: {each}\n\n" for each in data).encode()


@given(st.sampled_from(PATHS), st.lists(written_values, max_size=6), st.binary())
def test_no_bytes_make_the_reader_raise(path: str, documents: list[Any], data: bytes) -> None:
    for is_stream in (False, True):
        read_answer(of_path(path), data, is_stream)
        read_answer(of_path(path), b"data: " + data + b"\n\ndata: [DONE]\n\n", is_stream)
    for document in documents:
        read_answer(of_path(path), json.dumps(document).encode(), False)
    read_answer(of_path(path), as_events(documents), True)


@given(st.sampled_from(PATHS), st.sampled_from(sorted(KINDS)), st.data())
def test_no_damage_to_a_real_answer_makes_the_reader_raise(
    path: str, kind: str, data: st.DataObject
) -> None:
    for is_stream, good in ((True, streamed(path, KINDS[kind])), (False, b"")):
        good = good or json.dumps(whole(path, KINDS[kind])).encode()
        at = data.draw(st.lists(st.integers(0, len(good) - 1), min_size=1, max_size=4))
        damaged = bytearray(good)
        for position, byte in zip(at, cycle(b'"{}[]:,\n0nx'), strict=False):
            damaged[position] = byte
        read_answer(of_path(path), bytes(damaged), is_stream)
