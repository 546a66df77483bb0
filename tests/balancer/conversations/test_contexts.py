"""Contexts: which blocks are valid, and the requests that they expand to."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.balancer.conversations.contexts import (
    MAX_BLOCKS,
    Block,
    context_id,
    named,
    read_blocks,
)
from sgl_ext.balancer.conversations.expansion import insert_context
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.protocols.registry import PATHS, of_path
from sgl_ext.reading.cache_marks import TtlLimits, read_marks

TOOL = {"name": "read", "description": "Reads.", "input_schema": {"type": "object"}}
IN_CHAT = {
    "type": "function",
    "function": {"name": "read", "description": "Reads.", "parameters": {"type": "object"}},
}
IN_RESPONSES = {
    "type": "function",
    "name": "read",
    "description": "Reads.",
    "parameters": {"type": "object"},
}
FORMS = {
    "/v1/messages": TOOL,
    "/v1/messages/count_tokens": TOOL,
    "/v1/chat/completions": IN_CHAT,
    "/invocations": IN_CHAT,
    "/v1/responses": IN_RESPONSES,
    "/v1/responses/input_tokens": IN_RESPONSES,
}
BLOCKS = [
    {"id": "rules", "layer": "stable", "content": "Be brief."},
    {"id": "tools", "layer": "stable", "kind": "tools", "content": [TOOL]},
    {"id": "notes", "layer": "project", "kind": "document", "content": "# Notes"},
    {"id": "now", "layer": "runtime"},
]


def expand(path: str, body: Any, blocks: Any, texts: Any) -> tuple[Any, int]:
    return insert_context(of_path(path), body, blocks, texts)


def text(of: str, ttl: str | None = None) -> dict[str, Any]:
    mark = {"cache_control": {"type": "ephemeral", "ttl": ttl}} if ttl else {}
    return {"type": "text", "text": of, **mark}


def registered(*blocks: dict[str, Any]) -> tuple[Block, ...]:
    return read_blocks({"blocks": list(blocks or BLOCKS)})


def test_the_id_depends_on_every_part_of_the_content() -> None:
    id = context_id(registered())
    assert id == context_id(read_blocks(json.loads(json.dumps({"blocks": BLOCKS}))))
    others = []
    for k, key, value in (
        (0, "content", "Be brief!"),
        (0, "id", "rule"),
        (0, "kind", "document"),
        (2, "layer", "stable"),
        (1, "content", [{**TOOL, "name": "write"}]),
        (3, "id", "then"),
    ):
        changed = copy.deepcopy(BLOCKS)
        changed[k][key] = value
        others.append(context_id(registered(*changed)))
    assert len({id, *others}) == 7


def test_a_hash_is_of_the_text_or_of_the_tools_as_compact_json() -> None:
    rules = hashlib.sha256(b"Be brief.").hexdigest()
    tools = hashlib.sha256(json.dumps([TOOL], separators=(",", ":")).encode()).hexdigest()
    found = {block.id: block.hash for block in registered()}
    assert (found["rules"], found["tools"]) == (rules, tools)
    stated = {**BLOCKS[0], "hash": f"sha256:{rules}"}
    assert registered(stated)[0].hash == rules


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": ""}, "blocks.0.id: must be a string"),
        ({"id": "notes"}, "blocks.1.id: 'notes' is also the id of another"),
        ({"layer": "forever"}, "blocks.0.layer: must be one of stable, project, runtime"),
        ({"kind": "image"}, "blocks.0.kind: must be one of tools, system, document"),
        ({"content": ["x"]}, "blocks.0.content: must be a text"),
        ({"content": " \n"}, "blocks.0.content: must be a text"),
        ({"content": "x", "kind": "tools"}, "blocks.0.content: must be a list of tools"),
        ({"content": [1], "kind": "tools"}, "blocks.0.content: must be a list of tools"),
        ({"hash": "0" * 64}, "blocks.0.hash: differs from that of the content of block 'rules'"),
        ({"hash": 7}, "blocks.0.hash: differs from"),
        ({"layer": "runtime"}, "blocks.0.content: each request brings that of a 'runtime' block"),
        (
            {"layer": "runtime", "content": None},
            "blocks.1.layer: 'project' may not follow the 'runtime' of block 'rules'",
        ),
        ({"layer": "runtime", "kind": "tools"}, "blocks.0.layer: tools cannot be 'runtime'"),
    ],
)
def test_an_invalid_block_is_rejected_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BalancerError) as raised:
        registered({**BLOCKS[0], **changes}, BLOCKS[2])
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "blocks: must be a list"),
        ({"blocks": []}, "blocks: must be a list"),
        ({"blocks": ["x"]}, "blocks.0: must be an object"),
        ({"blocks": [BLOCKS[3]]}, "blocks: none of them has content"),
        ({"blocks": [{**BLOCKS[0], "id": str(k)} for k in range(MAX_BLOCKS + 1)]}, "blocks: more"),
        ({"blocks": [{**BLOCKS[0], "content": "x" * (17 << 20)}]}, "blocks: larger than"),
    ],
)
def test_an_invalid_or_oversized_registration_is_rejected(document: Any, message: str) -> None:
    with pytest.raises(BalancerError, match=message):
        read_blocks(document)


def test_tools_may_not_be_in_a_later_layer_than_texts() -> None:
    tools = {**BLOCKS[1], "layer": "project"}
    with pytest.raises(BalancerError, match=r"blocks\.0\.layer: 'stable' may not follow"):
        registered(BLOCKS[0], tools)
    assert [block.id for block in registered()] == ["tools", "rules", "notes", "now"]


def test_messages_get_the_content_in_tools_and_system() -> None:
    own = {"name": "write", "input_schema": {}}
    body = {"model": "m", "system": "Own.", "tools": [own], "messages": [], "context_id": "c"}
    found, left_out = expand("/v1/messages", body, registered(), {"now": "It is noon."})
    assert left_out == 0
    assert found == {
        "model": "m",
        "messages": [{"role": "user", "content": [text("It is noon.")]}],
        "tools": [{**TOOL, "cache_control": {"type": "ephemeral", "ttl": "1h"}}, own],
        "system": [text("Be brief.", "1h"), text("# Notes", "5m"), text("Own.")],
    }


def test_chat_completions_get_the_content_in_tools_and_the_first_message() -> None:
    user = {"role": "user", "content": "Hello"}
    parts = [text("Be brief.", "1h"), text("# Notes", "5m")]
    alone, _ = expand("/v1/chat/completions", {"messages": [user]}, registered(), None)
    tool = {**IN_CHAT, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    assert alone == {"messages": [{"role": "system", "content": parts}, user], "tools": [tool]}
    for role, content in (("system", "Own."), ("developer", [text("Own.")])):
        body = {"messages": [{"role": role, "content": content}, user]}
        found, _ = expand("/v1/chat/completions", body, registered(), None)
        assert found["messages"] == [{"role": role, "content": [*parts, text("Own.")]}, user]


def test_responses_get_the_content_in_tools_and_instructions() -> None:
    body = {"input": "Hello", "instructions": "Own.", "nvext": {"context_id": "c"}}
    found, _ = expand("/v1/responses", body, registered(), {"now": "Noon."})
    said = [{"type": "input_text", "text": each} for each in ("Noon.", "Hello")]
    assert found == {
        "input": [{"role": "user", "content": said}],
        "tools": [IN_RESPONSES],
        "instructions": "Be brief.\n\n# Notes\n\nOwn.",
        "nvext": {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
    }


@pytest.mark.parametrize("path", [path for path in PATHS if of_path(path).add_texts])
@pytest.mark.parametrize(
    ("own", "at"),
    [
        ([{"role": "user", "content": "Hello"}], 0),
        ([{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant"}], 0),
        ([{"role": "developer", "content": "Own."}, {"role": "user", "content": "Hello"}], 1),
        ([{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Hello"}], 0),
        ([{"type": "function_call_output", "output": "1"}], 0),
        ([], 0),
    ],
)
def test_runtime_texts_begin_the_first_user_message(
    path: str, own: list[dict[str, Any]], at: int
) -> None:
    blocks = registered(*BLOCKS[1:], {"id": "who", "layer": "runtime"})
    key = "input" if path.startswith("/v1/responses") else "messages"
    kind = "input_text" if path.startswith("/v1/responses") else "text"
    before = copy.deepcopy(own)
    plain, _ = expand(path, {key: own}, blocks, None)
    found, _ = expand(path, {key: own}, blocks, {"who": "Agent 7.", "now": "Noon."})
    assert own == before
    assert {**found, key: None} == {**plain, key: None}, "the tools and instructions are the same"
    at += len(plain[key]) - len(own)
    messages = found[key]
    assert messages[:at] == plain[key][:at]
    assert messages[at]["role"] == "user"
    runtime = [{"type": kind, "text": each} for each in ("Noon.", "Agent 7.")]
    assert messages[at]["content"][:2] == runtime
    rest = messages[at]["content"][2:]
    first = plain[key][at] if at < len(plain[key]) else {}
    if first.get("role") == "user":
        content = first["content"]
        if isinstance(content, str):
            content = [{"type": kind, "text": content}]
        assert rest == content
        assert messages[at + 1 :] == plain[key][at + 1 :]
    else:
        assert rest == []
        assert messages[at + 1 :] == plain[key][at:]


def test_a_runtime_text_is_left_out_where_the_engine_will_reject_the_messages() -> None:
    for messages in (None, 7, [{"role": "user", "content": 7}]):
        found, _ = expand("/v1/messages", {"messages": messages}, registered(), {"now": "Noon."})
        assert found["messages"] == messages


@pytest.mark.parametrize("form", [TOOL, IN_CHAT, IN_RESPONSES])
@pytest.mark.parametrize("path", [path for path in PATHS if of_path(path).add_texts])
def test_a_tool_takes_the_form_of_the_protocol(path: str, form: dict[str, Any]) -> None:
    blocks = registered({**BLOCKS[1], "content": [form]}, BLOCKS[2])
    (found,) = expand(path, {}, blocks, None)[0]["tools"]
    found.pop("cache_control", None)
    assert found == FORMS[path]


@pytest.mark.parametrize(
    ("marks", "wanted", "left_out"),
    [
        ([], ["1h", "1h", "5m"], 0),
        (["1m"], ["1h", "1h", "5m"], 0),
        (["5m"], ["1h", "1h", None], 0),
        (["1h"], [None, None, None], 0),
        (["2h", "1h"], [None, None, None], 0),
        (["1m"] * 2, [None, "1h", "5m"], 1),
        (["1m"] * 3, [None, "1h", None], 2),
        (["1m"] * 4, [None, None, None], 3),
        (["5m"] * 4, [None, None, None], 2),
    ],
)
def test_layers_are_marked_unless_the_requests_own_marks_hold_as_long(
    marks: list[str], wanted: list[str | None], left_out: int
) -> None:
    body = {
        "messages": [
            {"role": "user", "content": [text(f"{k}", ttl)]} for k, ttl in enumerate(marks)
        ]
    }
    found, missing = expand("/v1/messages", body, registered(), None)
    marked = [*found["tools"], *found["system"]]
    ttls = [block.get("cache_control", {}).get("ttl") for block in marked]
    assert (ttls, missing) == (wanted, left_out)
    assert not read_marks(of_path("/v1/messages"), found, TtlLimits(0, 1e9)).error


@pytest.mark.parametrize(
    ("ttl", "wanted", "left_out"),
    [
        ("1m", ["1h", "1m", None, None], 2),
        ("5m", ["1h", "5m", None, "5m"], 1),
        ("1h", [None, "1h", "1h", "5m"], 0),
    ],
)
def test_marks_on_the_requests_own_tools_limit_the_marks_on_texts(
    ttl: str, wanted: list[str | None], left_out: int
) -> None:
    own = {"name": "own", "input_schema": {}, "cache_control": {"type": "ephemeral", "ttl": ttl}}
    user = {"role": "user", "content": "Hello"}
    body = {"max_tokens": 1, "tools": [own], "messages": [user]}
    found, missing = expand("/v1/messages", body, registered(), None)
    marked = [*found["tools"], *found["system"]]
    ttls = [block.get("cache_control", {}).get("ttl") for block in marked]
    assert (ttls, missing) == (wanted, left_out)
    assert not read_marks(of_path("/v1/messages"), found, TtlLimits(0, 1e9)).error


def test_malformed_runtime_texts_are_rejected() -> None:
    for texts, message in (
        ([], "context_blocks: must be an object"),
        ({"rules": "x"}, "context_blocks.rules: the context has no such 'runtime' block"),
        ({"now": 1}, "context_blocks.now: must be a text"),
    ):
        with pytest.raises(BalancerError, match=message):
            expand("/v1/messages", {}, registered(), texts)


def test_a_request_may_name_a_context_in_nvext() -> None:
    assert named({"messages": []}) is None
    assert named({"nvext": {"context_id": "a", "context_blocks": {}}}) == ("a", {})
    assert named({"context_id": "b", "nvext": {"context_id": "a"}}) == ("b", None)
    assert named({"nvext": 7}) is None


texts = st.text(min_size=1, max_size=12).filter(str.strip)
tools = st.lists(
    st.fixed_dictionaries({"name": texts, "description": st.text(max_size=9)}),
    min_size=1,
    max_size=3,
)
contents = st.tuples(st.just("tools"), tools) | st.tuples(
    st.sampled_from(["system", "document"]), texts
)


@st.composite
def some_blocks(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Blocks in the order of a prompt, with layers that may be."""
    drawn = draw(st.lists(contents, min_size=1, max_size=5))
    drawn.sort(key=lambda each: each[0] != "tools")
    stable = draw(st.integers(0, len(drawn)))
    return [
        {
            "id": f"b{k}",
            "kind": kind,
            "layer": "stable" if k < stable else "project",
            "content": [{**tool, "input_schema": {}} for tool in content]
            if kind == "tools"
            else content,
        }
        for k, (kind, content) in enumerate(drawn)
    ]


def unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: unmarked(each) for key, each in value.items() if key != "cache_control"}
    return [unmarked(each) for each in value] if isinstance(value, list) else value


@given(some_blocks(), st.none() | texts | st.lists(texts, max_size=2), st.booleans())
def test_the_expanded_request_equals_one_with_the_content_in_place(
    blocks: list[dict[str, Any]], own: Any, has_tool: bool
) -> None:
    """Its marks are at the ends of the layers and on the last tool, in Anthropic's order."""
    said = [block["content"] for block in blocks if block["kind"] != "tools"]
    offered = [tool for block in blocks if block["kind"] == "tools" for tool in block["content"]]
    own_tools = [{"name": "own", "input_schema": {}}] if has_tool else []
    listed = [text(each) for each in ([own] if isinstance(own, str) else own or [])]
    rest = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
    body = {**rest, "context_id": "ctx"}
    if own is not None:
        body["system"] = own if isinstance(own, str) else listed
    if own_tools:
        body["tools"] = own_tools
    before = copy.deepcopy(body)
    found, left_out = expand("/v1/messages", body, read_blocks({"blocks": blocks}), None)
    assert body == before
    explicit = dict(rest)
    if offered or own_tools:
        explicit["tools"] = [*offered, *own_tools]
    if said or own is not None:
        explicit["system"] = [*map(text, said), *listed] if said else before["system"]
    assert unmarked(found) == explicit
    marked = [*found.get("tools", []), *(found["system"] if said else [])]
    ttls = [each["cache_control"]["ttl"] for each in marked if "cache_control" in each]
    layers = {block["layer"]: block["kind"] for block in blocks}
    tool_layers = [block["layer"] for block in blocks if block["kind"] == "tools"]
    marked_layers = [layer for layer, kind in layers.items() if kind == "tools"]
    if tool_layers and tool_layers[-1] not in marked_layers:
        marked_layers.append(tool_layers[-1])
    marked_layers += [layer for layer, kind in layers.items() if kind != "tools"]
    assert ttls == [{"stable": "1h", "project": "5m"}[layer] for layer in marked_layers]
    assert left_out == 0


@given(some_blocks(), st.none() | texts)
def test_the_expanded_request_equals_one_in_openais_protocols_too(
    blocks: list[dict[str, Any]], own: str | None
) -> None:
    said = [block["content"] for block in blocks if block["kind"] != "tools"]
    offered = [tool for block in blocks if block["kind"] == "tools" for tool in block["content"]]
    functions = [
        {"name": tool["name"], "description": tool["description"], "parameters": {}}
        for tool in offered
    ]
    registered = read_blocks({"blocks": blocks})
    user = {"role": "user", "content": "Hello"}
    first = [] if own is None else [{"role": "system", "content": own}]
    found, _ = expand("/v1/chat/completions", {"messages": [*first, user]}, registered, None)
    explicit: dict[str, Any] = {"messages": [*first, user]}
    if said:
        parts = [text(each) for each in ([*said, own] if own is not None else said)]
        explicit["messages"] = [{"role": "system", "content": parts}, user]
    if offered:
        explicit["tools"] = [{"type": "function", "function": each} for each in functions]
    assert unmarked(found) == explicit
    entered = {"input": "Hello"} if own is None else {"input": "Hello", "instructions": own}
    found, _ = expand("/v1/responses", entered, registered, None)
    explicit = dict(entered)
    if said:
        explicit["instructions"] = "\n\n".join([*said, own] if own is not None else said)
    if offered:
        explicit["tools"] = [{"type": "function", **each} for each in functions]
    assert found.pop("nvext")["cache_control"]["ttl"] in ("1h", "5m")
    assert found == explicit
