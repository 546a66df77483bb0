"""Two requests share exactly the hashes of their common prefix, whatever form it is written in."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.segments import (
    CUT_BYTES,
    Chain,
    longest_of,
    read_batch,
    read_chain,
    with_sorted_schemas,
    with_sorted_tools,
)

MESSAGES = "/v1/messages"
TOOLS = [
    {"name": "Read", "description": "reads", "input_schema": {"type": "object", "required": []}},
    {"name": "Bash", "description": "runs", "input_schema": {"type": "object"}},
]
BODY: dict[str, Any] = {
    "model": "m",
    "tools": TOOLS,
    "system": [{"type": "text", "text": "You help."}, {"type": "text", "text": "Folder: /a"}],
    "messages": [
        {"role": "user", "content": "Find the bug."},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Looking."},
                {"type": "tool_use", "id": "t1", "name": "Read", "input": {"path": "a", "id": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "def f(): ..."}],
        },
    ],
}

texts = st.text(max_size=40)
blocks = texts.map(lambda text: {"type": "text", "text": text})
contents = st.one_of(texts, st.lists(blocks, min_size=1, max_size=3))
turns = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant"]),
    contents,
)
bodies = st.fixed_dictionaries(
    {"model": st.just("m"), "messages": st.lists(turns, min_size=1, max_size=6)},
    optional={"system": contents, "tools": st.just(TOOLS)},
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "id", "tools", "function", "name"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)
PATHS = [
    "/v1/messages",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/completions",
    "/generate",
    "/api/chat",
    "/api/generate",
]


def chain(body: Any, path: str = MESSAGES, **options: Any) -> Chain:
    return read_chain(of_path(path), body, **options)


def shared_hashes(left: Chain, right: Chain) -> int:
    count = 0
    for a, b in zip(left.hashes, right.hashes, strict=False):
        if a != b:
            break
        count += 1
    return count


def shuffled(value: Any, order: random.Random) -> Any:
    if isinstance(value, dict):
        items = [(key, shuffled(inner, order)) for key, inner in value.items()]
        order.shuffle(items)
        return dict(items)
    return [shuffled(item, order) for item in value] if isinstance(value, list) else value


def test_a_request_is_cut_after_tools_system_blocks_and_messages() -> None:
    found = chain(BODY)
    assert len(found.hashes) == len(found.ends) == 1 + 2 + 3
    assert list(found.ends) == sorted(set(found.ends))
    assert found.session == found.hashes[3]
    assert found.tools == 2


@given(bodies, st.integers())
def test_key_order_and_white_space_make_no_difference(body: dict[str, Any], seed: int) -> None:
    other = orjson.loads(
        orjson.dumps(shuffled(body, random.Random(seed)), option=orjson.OPT_INDENT_2)
    )
    assert chain(other) == chain(body)


@given(bodies)
def test_a_text_equals_a_list_of_one_text_block(body: dict[str, Any]) -> None:
    other = copy.deepcopy(body)
    for message in other["messages"]:
        if isinstance(message["content"], str) and message["content"]:
            message["content"] = [{"type": "text", "text": message["content"]}]
    if isinstance(other.get("system"), str) and other["system"]:
        other["system"] = [{"type": "text", "text": other["system"]}]
    assert chain(other) == chain(body)


@pytest.mark.parametrize("text", ["a", "é", "日本", "\ud800"])
@pytest.mark.parametrize("length", [1, CUT_BYTES // 2, CUT_BYTES, 3 * CUT_BYTES])
def test_a_later_text_of_any_length_equals_a_list_of_one_text_block(text: str, length: int) -> None:
    def body(content: Any) -> dict[str, Any]:
        turn = {"role": "assistant", "content": content}
        return {"messages": [{"role": "user", "content": "Hello"}, turn, turn]}

    for long in (text * length, text * length + "x"):
        assert chain(body(long)) == chain(body([{"type": "text", "text": long}]))


@pytest.mark.parametrize(
    ("path", "field", "key"),
    [
        ("/v1/chat/completions", "messages", "content"),
        ("/v1/responses", "input", "content"),
        ("/v1/responses", "input", "output"),
    ],
)
def test_a_breakpoint_that_moves_makes_no_difference(path: str, field: str, key: str) -> None:
    def chain(at: int | None) -> Chain:
        parts: list[dict[str, Any]] = [{"type": "input_image", "file_id": k} for k in "ab"]
        if at is not None:
            parts[at]["prompt_cache_breakpoint"] = {"mode": "explicit"}
        item = {"role": "user"} if key == "content" else {"type": "function_call_output"}
        return read_chain(of_path(path), {field: [item | {key: parts}]})

    assert chain(None).hashes
    assert chain(0) == chain(1) == chain(None)


def test_cache_control_and_ids_make_no_difference() -> None:
    other = copy.deepcopy(BODY)
    mark = {"type": "ephemeral", "ttl": "1h"}
    other["tools"][1]["cache_control"] = mark
    other["system"][1]["cache_control"] = mark
    other["messages"][1]["id"] = "msg_1"
    other["messages"][1]["content"][1]["id"] = "t2"
    result = other["messages"][2]["content"][0]
    result["tool_use_id"] = "t2"
    result["cache_control"] = mark
    result["content"] = [{"type": "text", "text": result["content"], "cache_control": mark}]
    assert chain(other) == chain(BODY)


def test_an_id_in_a_tools_input_is_part_of_the_prompt() -> None:
    other = copy.deepcopy(BODY)
    other["messages"][1]["content"][1]["input"]["id"] = 2
    assert shared_hashes(chain(other), chain(BODY)) == 4


@given(bodies, turns)
def test_a_longer_conversation_continues_the_same_chain(
    body: dict[str, Any], turn: dict[str, Any]
) -> None:
    before = chain(body)
    after = chain({**body, "messages": [*body["messages"], turn]})
    assert after.hashes[: len(before.hashes)] == before.hashes
    assert after.ends[: len(before.ends)] == before.ends
    assert before.session is None or after.session == before.session


@pytest.mark.parametrize("index", range(3))
def test_chains_diverge_at_the_first_message_that_differs(index: int) -> None:
    other = copy.deepcopy(BODY)
    other["messages"][index]["content"] = "Something else."
    assert shared_hashes(chain(other), chain(BODY)) == 3 + index


def test_a_role_is_part_of_the_prompt() -> None:
    other = copy.deepcopy(BODY)
    other["messages"][0]["role"] = "assistant"
    assert shared_hashes(chain(other), chain(BODY)) == 3


def test_two_blocks_differ_from_one_block_of_their_joined_text() -> None:
    def of(content: Any) -> Chain:
        return chain({"messages": [{"role": "user", "content": content}]})

    apart = of([{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}])
    assert apart != of("abc")
    assert apart != of([{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}])


def test_the_common_beginning_of_long_texts_counts() -> None:
    def of(text: str) -> Chain:
        return chain({"text": text}, "/generate")

    beginning = "x" * (3 * CUT_BYTES)
    assert shared_hashes(of(beginning + "a" * 9000), of(beginning + "b" * 70)) == 3 + 3
    assert len(of(beginning + "a" * 9000).hashes) == 3 + 6


def test_short_prompts_share_their_beginnings_too() -> None:
    def of(text: str) -> Chain:
        return chain({"messages": [{"role": "user", "content": text}]})

    assert shared_hashes(of("x" * 2500 + "a" * 99), of("x" * 2500 + "b" * 99)) == 2


def test_the_order_of_tools_counts_unless_it_is_canonical() -> None:
    turned = {**BODY, "tools": TOOLS[::-1]}
    assert shared_hashes(chain(turned), chain(BODY)) == 0
    assert chain(with_sorted_tools(turned)) == chain(with_sorted_tools(BODY))


@given(anything)
def test_sorting_tools_changes_nothing_else(value: Any) -> None:
    for body in (value, {"tools": value, "messages": [1]}):
        found = with_sorted_tools(body)
        if isinstance(body, dict):
            assert {**found, "tools": None} == {**body, "tools": None}
        else:
            assert found is body


def reordered(value: Any) -> Any:
    """The same JSON, with the keys of all objects in reverse order."""
    if isinstance(value, list):
        return [*map(reordered, value)]
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return value


schemas = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


@given(anything, st.dictionaries(texts, schemas, max_size=6))
def test_sorting_schemas_changes_the_order_of_their_keys_only(value: Any, schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "a", "parameters": schema}}
    flat = {"name": "b", "parameters": schema, "strict": value}
    tools = [tool, value, {"input_schema": schema, "name": "c"}, {"tools": [flat], "name": "d"}]
    body = {"tools": tools, "messages": value}
    found = with_sorted_schemas(body)
    assert found == body
    assert list(found) == list(body)
    assert found["messages"] is value
    for before, after in zip(tools, found["tools"], strict=True):
        if isinstance(before, dict):
            assert list(after) == list(before)
    other = [{**tool, "function": {"name": "a", "parameters": reordered(schema)}}]
    again = with_sorted_schemas({"tools": other})["tools"][0]
    assert json.dumps(again) == json.dumps(found["tools"][0])


def test_a_request_that_streams_its_tools_inputs_has_the_same_prefix() -> None:
    streamed = {**BODY, "tools": [{**tool, "eager_input_streaming": True} for tool in TOOLS]}
    protocol = of_path(MESSAGES)
    assert read_chain(protocol, streamed).hashes == read_chain(protocol, BODY).hashes


def test_tools_that_may_not_be_called_are_in_the_prompt() -> None:
    for choice in ("none", {"type": "none"}, {"type": "tool", "name": "a"}):
        assert chain({**BODY, "tool_choice": choice}) == chain(BODY)


@pytest.mark.parametrize("key", ["model", "lora_path", "cache_salt", "extra_key"])
def test_nothing_is_shared_across_models_adapters_and_salts(key: str) -> None:
    assert shared_hashes(chain({**BODY, key: "other"}), chain(BODY)) == 0


def test_nothing_is_shared_across_tenants() -> None:
    assert shared_hashes(chain(BODY, salt=b"tenant"), chain(BODY)) == 0


def test_the_first_user_message_identifies_a_session_of_responses_and_chat() -> None:
    chat = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function"}]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ]
    }
    found = chain(chat, "/v1/chat/completions")
    assert (len(found.hashes), found.session) == (4, found.hashes[1])
    responses = {
        "instructions": "s",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
        ],
    }
    found = chain(responses, "/v1/responses")
    assert (len(found.hashes), found.session) == (4, found.hashes[1])
    assert chain({"instructions": "s", "input": "u"}, "/v1/responses").hashes == found.hashes[:2]


def test_raw_prompts_and_token_ids_have_chains_and_batches_have_none() -> None:
    assert len(chain({"text": "x"}, "/generate").hashes) == 1
    assert chain({"text": ["x"]}, "/generate") == chain({"text": "x"}, "/generate")
    assert len(chain({"input_ids": list(range(2000))}, "/generate").hashes) == 3 + 4
    assert chain({"prompt": ["a", "b"]}, "/v1/completions") == Chain()


@given(anything, st.sampled_from(PATHS))
def test_no_body_makes_the_reader_raise(value: Any, path: str) -> None:
    for body in (value, dict.fromkeys(("messages", "input", "system", "tools", "prompt"), value)):
        found = chain(body, path)
        assert len(found.hashes) == len(found.ends)
        assert list(found.ends) == sorted(set(found.ends))


def test_a_path_that_generates_nothing_has_no_chain() -> None:
    assert chain(BODY, "/v1/messages/count_tokens") == Chain()


def test_a_batch_has_the_chains_of_its_prompts() -> None:
    completions, generate = of_path("/v1/completions"), of_path("/generate")
    texts = ["a" * 5000, "a" * 3000 + "b" * 9000, "c"]
    found = read_batch(completions, {"model": "m", "prompt": texts})
    assert found == tuple(chain({"model": "m", "prompt": t}, "/v1/completions") for t in texts)
    assert longest_of(found) == found[1]
    assert found[0].hashes[:2] == longest_of(found).hashes[:2], "what the prompts share"
    assert longest_of(found[::-1]) == found[1]
    ids = [[1, 2], [3]]
    assert read_batch(generate, {"input_ids": ids}) == tuple(
        chain({"input_ids": each}, "/generate") for each in ids
    )
    assert (read_batch(generate, {"text": ["a"]}), longest_of(())) == ((), Chain())
    assert read_batch(of_path("/v1/chat/completions"), BODY) == ()
