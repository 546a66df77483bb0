"""Bodies that clients send become bodies that SGLang accepts."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sgl_ext.protocols.registry import of_path
from sgl_ext.protocols.tools import allowed_names, namespaced_names
from sgl_ext.reading.protocol import Model
from sgl_ext.reading.rewriting import translate

TEXT_ONLY = Model(sees=False)
MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
READ = {"name": "read", "description": "Reads.", "input_schema": SCHEMA}
USER = {"role": "user", "content": "Go on."}


def messages(model: Model = TEXT_ONLY, **fields: Any) -> tuple[dict[str, Any], dict[str, int]]:
    body = {"model": "m", "max_tokens": 8, "messages": [USER], **fields}
    before = copy.deepcopy(body)
    translated = translate(of_path(MESSAGES), body, model)
    assert body == before, "what was sent is not changed"
    return translated.body, dict(translated.counts)


def history(*blocks: Any, role: str = "assistant", model: Model = TEXT_ONLY) -> Any:
    body, counts = messages(model, messages=[USER, {"role": role, "content": list(blocks)}])
    return body["messages"][1]["content"], counts


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize("path", [MESSAGES, CHAT, RESPONSES, "/generate"])
@pytest.mark.parametrize("body", [{}, {"tools": [], "messages": [], "input": []}, [1], "x", None])
def test_a_body_that_needs_no_translation_is_the_same_object(path: str, body: Any) -> None:
    translated = translate(of_path(path), body, TEXT_ONLY)
    assert translated.body is body
    assert not translated.counts


def test_thinking_is_left_out_only_if_the_engine_has_no_reasoning_parser() -> None:
    asked = {"type": "enabled", "budget_tokens": 2048}
    body, counts = messages(Model(thinks=False), thinking=asked)
    assert "thinking" not in body
    assert counts == {"thinking": 1}
    assert messages(Model(), thinking=asked)[0]["thinking"] is asked
    off = {"type": "disabled"}
    assert messages(Model(thinks=False), thinking=off) == (messages(thinking=off)[0], {})


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("web_search_20250305", "web_search_tool"),
        ("web_fetch_20250910", "web_fetch_tool"),
        ("code_execution_20250825", "code_execution_tool"),
        ("tool_search_tool_regex_20251119", "tool_search_tool"),
        ("mcp_toolset", "mcp_toolset"),
        ("soothsayer_20300101", "unknown_tool"),
    ],
)
def test_tools_that_run_at_anthropic_are_left_out(kind: str, what: str) -> None:
    body, counts = messages(tools=[READ, {"type": kind, "name": "x", "max_uses": 8}])
    assert body["tools"] == [READ]
    assert counts == {what: 1}


def test_deferred_tools_are_offered_because_no_server_searches_for_them() -> None:
    deferred = {**READ, "defer_loading": True}
    assert messages(tools=[deferred])[0]["tools"] == [deferred]
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    body, counts = messages(tools=[search, deferred])
    assert body["tools"] == [READ]
    assert counts == {"tool_search_tool": 1, "defer_loading": 1}


@pytest.mark.parametrize(
    ("tool", "properties"),
    [
        ({"type": "bash_20250124", "name": "bash"}, {"command", "restart"}),
        (
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
            {"command", "path", "view_range", "file_text", "old_str", "new_str"}
            | {"insert_line", "insert_text"},
        ),
        (
            {"type": "text_editor_20250124", "name": "str_replace_editor"},
            {"command", "path", "view_range", "file_text", "old_str", "new_str", "insert_line"},
        ),
        (
            {"type": "memory_20250818", "name": "memory"},
            {"command", "path", "view_range", "file_text", "old_str", "new_str"}
            | {"insert_line", "insert_text", "old_path", "new_path"},
        ),
        (
            {"type": "computer_20241022", "name": "computer", "display_width_px": 800},
            {"action", "coordinate", "text"},
        ),
        (
            {"type": "computer_20251124", "name": "computer", "enable_zoom": True},
            {"action", "coordinate", "text", "start_coordinate", "scroll_direction"}
            | {"scroll_amount", "duration", "region"},
        ),
    ],
)
def test_tools_that_the_client_runs_become_custom_tools(tool: Any, properties: set[str]) -> None:
    mark = {"type": "ephemeral"}
    body, counts = messages(tools=[{**tool, "cache_control": mark}])
    (plain,) = body["tools"]
    assert plain["name"] == tool["name"]
    assert plain["description"]
    assert plain["cache_control"] is mark
    assert "type" not in plain
    assert plain["input_schema"]["properties"].keys() == properties
    assert set(plain["input_schema"]["required"]) <= properties
    assert counts == {tool["type"].rsplit("_", 1)[0] + "_tool": 1}


@pytest.mark.parametrize(
    ("block", "words", "what"),
    [
        (
            {"type": "document", "title": "T", "source": {"type": "text", "data": "All of it."}},
            "T\nAll of it.",
            "document",
        ),
        (
            {"type": "document", "source": {"type": "content", "content": [text("A"), text("B")]}},
            "A\nB",
            "document",
        ),
        (
            {"type": "document", "title": "a.pdf", "source": {"type": "base64", "data": "AAAA"}},
            "[document 'a.pdf': not shown, this model reads text only]",
            "document",
        ),
        (
            {"type": "image", "source": {"type": "base64", "data": "AAAA"}},
            "[image: not shown, this model reads text only]",
            "image",
        ),
        (
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
            '[web_search was called with {"query":"q"}]',
            "server_tool_use",
        ),
        (
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s",
                "content": [{"title": "A", "url": "https://a", "encrypted_content": "zzz"}],
            },
            "[web_search gave]\nA\nhttps://a",
            "server_tool_result",
        ),
        (
            {
                "type": "bash_code_execution_tool_result",
                "content": {"stdout": "out", "stderr": "err", "return_code": 0},
            },
            "[bash_code_execution gave]\nout\nerr",
            "server_tool_result",
        ),
        ({"type": "compaction", "content": "So far."}, "So far.", "compaction"),
    ],
)
def test_unknown_blocks_are_replaced_by_texts(block: Any, words: str, what: str) -> None:
    content, counts = history(text("before"), block, text("behind"))
    assert content == [text("before"), text(words), text("behind")]
    assert counts == {what: 1}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    content, counts = history(result, role="user")
    assert content[0]["content"] == [text(words)]
    assert counts == {what: 1}


def test_an_image_stays_for_a_model_that_sees() -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
    assert history(image, model=Model())[0] == [image]
    stored = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    assert history(stored, model=Model())[1] == {"image": 1}


def test_encrypted_thinking_is_left_out_and_plain_thinking_stays() -> None:
    thought = {"type": "thinking", "thinking": "Well.", "signature": "s"}
    content, counts = history(thought, {"type": "redacted_thinking", "data": "x"}, text("a"))
    assert content == [thought, text("a")]
    assert counts == {"redacted_thinking": 1}


@pytest.mark.parametrize(
    ("given_input", "told_input"),
    [('{"a": 1}', {"a": 1}), ("", {}), ("[", {"input": "["}), (None, {}), ([1], {"input": [1]})],
)
def test_the_input_of_a_call_in_the_history_becomes_an_object(
    given_input: Any, told_input: Any
) -> None:
    content, counts = history({"type": "tool_use", "id": "t", "name": "n", "input": given_input})
    assert content[0]["input"] == told_input
    assert counts == {"tool_use_input": 1}


BROKEN = [
    ("", "{}"),
    (" ", "{}"),
    (None, "{}"),
    ("null", "{}"),
    ("[1, 2]", '{"input":[1,2]}'),
    ([1], '{"input":[1]}'),
    ("7", '{"input":7}'),
    ('"x"', '{"input":"x"}'),
    ('{"path": ', '{"input":"{\\"path\\": "}'),
    ('{"a": 1}}', '{"input":"{\\"a\\": 1}}"}'),
    ("rm -rf /", '{"input":"rm -rf /"}'),
    ('{"a": NaN, "b": -1e999}', '{"a":"NaN","b":"-1e999"}'),
]


@pytest.mark.parametrize(("written", "object_of"), BROKEN)
def test_arguments_that_a_model_broke_come_back_as_an_object(written: Any, object_of: str) -> None:
    function = {"name": "f", "arguments": written}
    call = {"id": "c", "type": "function", "function": function}
    chat = translate(
        of_path(CHAT), {"messages": [{"role": "assistant", "tool_calls": [call]}]}, TEXT_ONLY
    )
    (made,) = chat.body["messages"][0]["tool_calls"]
    assert made == {**call, "function": {**function, "arguments": object_of}}
    assert chat.counts == {"call_arguments": 1}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": written}
    response = translate(of_path("/v1/responses"), {"input": [item]}, TEXT_ONLY)
    assert response.body["input"] == [{**item, "arguments": object_of}]


def test_arguments_that_are_an_object_stay_as_they_were_written() -> None:
    for written in ('{ "a":1.0 }', {"a": [1]}):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": written}}
        body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
        assert translate(of_path(CHAT), body, TEXT_ONLY).body is body


def test_the_older_name_of_the_output_format_is_accepted() -> None:
    form = {"type": "json_schema", "schema": {"const": 1}}
    body, counts = messages(output_format=form, output_config={"effort": "low"})
    assert body["output_config"] == {"format": form, "effort": "low"}
    assert "output_format" not in body
    assert counts == {"output_format": 1}


def test_fields_for_anthropics_servers_are_counted() -> None:
    sent = {"context_management": {"edits": [1]}, "mcp_servers": [1], "container": "c"}
    assert messages(**sent)[1] == dict.fromkeys(sent, 1)
    assert messages(context_management={}, mcp_servers=[])[1] == {}


def responses(model: Model = TEXT_ONLY, **fields: Any) -> tuple[dict[str, Any], dict[str, int]]:
    body = {"model": "m", "input": "Hello.", **fields}
    before = copy.deepcopy(body)
    translated = translate(of_path(RESPONSES), body, model)
    assert body == before
    return translated.body, dict(translated.counts)


def test_a_phase_is_left_out_for_a_model_without_phases() -> None:
    said = {"role": "assistant", "phase": "commentary", "content": "I look."}
    body, counts = responses(input=[USER, said])
    assert body["input"] == [USER, {"role": "assistant", "content": "I look."}]
    assert counts == {"phase": 1}
    body, counts = responses(Model(has_phases=True), input=[USER, said])
    assert body["input"][1] is said
    assert not counts


SPAWN = {"type": "function", "name": "spawn", "description": "Spawns.", "parameters": SCHEMA}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [SPAWN, {"type": "web_search"}, {"type": "custom", "name": "tell"}],
}


def test_tools_of_a_namespace_become_flat_tools() -> None:
    body, counts = responses(tools=[AGENTS], tool_choice={**SPAWN, "namespace": "agents"})
    assert [(tool["type"], tool["name"]) for tool in body["tools"]] == [
        ("function", "agents__spawn"),
        ("custom", "agents__tell"),
    ]
    assert body["tools"][0]["description"] == "Namespace agents: Sub-agents.\n\nSpawns."
    assert body["tool_choice"]["name"] == "agents__spawn"
    assert counts == {"namespace_tool": 1}
    assert namespaced_names({"tools": [AGENTS]}) == {
        "agents__spawn": {"namespace": "agents", "name": "spawn"},
        "agents__tell": {"namespace": "agents", "name": "tell"},
    }
    call = {"type": "function_call", "call_id": "c", "name": "spawn", "namespace": "agents"}
    (item,) = responses(input=[call])[0]["input"]
    assert item == {"type": "function_call", "call_id": "c", "name": "agents__spawn"}


def test_namespaces_stay_if_the_engine_renders_them() -> None:
    body, counts = responses(Model(takes_namespaces=True), tools=[AGENTS])
    assert body["tools"] == [AGENTS]
    assert counts == {}


@pytest.mark.parametrize(
    ("tool", "what"),
    [
        ({"type": "web_search", "external_web_access": True}, "web_search_tool"),
        ({"type": "web_search_2025_08_26"}, "web_search_tool"),
        ({"type": "local_shell"}, "local_shell_tool"),
        ({"type": "shell"}, "shell_tool"),
        ({"type": "apply_patch"}, "apply_patch_tool"),
        ({"type": "tool_search", "execution": "client"}, "tool_search_tool"),
        ({"type": "computer_use_preview"}, "computer_tool"),
        ({"type": "soothsayer"}, "unknown_tool"),
    ],
)
def test_openais_other_tools_are_left_out(tool: Any, what: str) -> None:
    body, counts = responses(tools=[SPAWN, tool])
    assert body["tools"] == [SPAWN]
    assert counts == {what: 1}


@pytest.mark.parametrize("keeps_tools", [False, True])
def test_only_allowed_tools_are_offered(keeps_tools: bool) -> None:
    other = {**SPAWN, "name": "other"}
    named = {"type": "function", "name": "other"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    model = replace(TEXT_ONLY, keeps_tools=keeps_tools)
    asked = {"tools": [SPAWN, other], "tool_choice": choice}
    body, counts = translate(of_path(RESPONSES), asked, model)
    assert body["tools"] == ([SPAWN, other] if keeps_tools else [other])
    assert body["tool_choice"] == "required"
    assert allowed_names(asked, model) == {"other"}
    assert counts == {"allowed_tools": 1}
    unknown = {**choice, "tools": [{"type": "function", "name": "unknown"}]}
    body = translate(of_path(RESPONSES), {**asked, "tool_choice": unknown}, model).body
    assert body["tools"] == []
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
    allowed = {"mode": "auto", "tools": tools[1:]}
    body = translate(
        of_path(CHAT),
        {"tools": tools, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}},
        model,
    ).body
    assert body["tools"] == (tools if keeps_tools else tools[1:])
    assert body["tool_choice"] == "auto"


@pytest.mark.parametrize(
    ("item", "becomes", "what"),
    [
        (
            {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
            {
                "type": "function_call",
                "call_id": "c",
                "name": "local_shell",
                "arguments": '{"command":["ls"]}',
            },
            "local_shell_call",
        ),
        (
            {"type": "local_shell_call_output", "id": "c", "output": "x"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
            "local_shell_call_output",
        ),
        (
            {"type": "mcp_call", "name": "n", "arguments": "{}", "output": "x"},
            {"role": "assistant", "content": "[n was called with {}]\nn\nx"},
            "mcp_call",
        ),
        ({"type": "web_search_call", "action": {"query": "q"}}, None, "web_search_call"),
        ({"type": "compaction", "encrypted_content": "x"}, None, "compaction"),
        ({"type": "soothsayer_call"}, None, "unknown_item"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "input_text",
                        "text": "[image: not shown, this model reads text only]",
                    }
                ],
            },
            "image",
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "No."}]},
            "refusal",
        ),
        (
            {"role": "user", "content": [{"type": "input_file", "filename": "a"}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "input_text",
                        "text": "[file 'a': not shown, this model reads text only]",
                    }
                ],
            },
            "document",
        ),
    ],
)
def test_unknown_items_are_replaced_by_texts_or_left_out(
    item: Any, becomes: Any, what: str
) -> None:
    body, counts = responses(input=[USER, item, USER])
    assert body["input"] == [USER, *([] if becomes is None else [becomes]), USER]
    assert counts == {what: 1}


def test_a_display_of_thinking_that_sglang_does_not_know_is_left_out() -> None:
    body, counts = messages(thinking={"type": "adaptive", "display": "updates"})
    assert body["thinking"] == {"type": "adaptive"}
    assert counts == {"thinking_display": 1}
    known = {"type": "adaptive", "display": "omitted"}
    body, counts = messages(thinking=known)
    assert (body["thinking"], counts) == (known, {})


def test_values_that_sglang_does_not_know_are_left_out() -> None:
    body, counts = responses(
        include=["reasoning.encrypted_content", "web_search_call.action.sources"],
        service_tier="fast",
        reasoning={"effort": "low", "summary": "none"},
        tools=None,
        truncation=None,
    )
    assert body == {
        "model": "m",
        "input": "Hello.",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low"},
    }
    assert counts == {"include": 1, "service_tier": 1, "reasoning_summary": 1}


def test_chat_parts_and_tools_that_sglang_rejects_are_rewritten() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "file", "file": {"filename": "a.pdf"}},
        {"type": "refusal", "refusal": "No."},
    ]
    body = {
        "messages": [{"role": "user", "content": parts}],
        "tools": [{"type": "custom", "custom": {"name": "p"}}],
        "n": None,
    }
    translated = translate(of_path(CHAT), body, TEXT_ONLY)
    assert translated.body["messages"][0]["content"] == [
        text("[image: not shown, this model reads text only]"),
        text("[file 'a.pdf': not shown, this model reads text only]"),
        text("No."),
    ]
    assert translated.body["tools"] == []
    assert "n" not in translated.body
    assert translated.counts == {"image": 1, "document": 1, "refusal": 1, "custom_tool": 1}


@pytest.mark.parametrize(
    ("earlier", "now", "counted"),
    [
        (
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "call_f",
                        "type": "function",
                        "function": {"name": "f", "arguments": "{}"},
                    }
                ],
            },
            "function_call",
        ),
        (
            {"role": "function", "name": "f", "content": "3"},
            {"role": "tool", "name": "f", "tool_call_id": "call_f", "content": "3"},
            "function_call",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "c", "type": "custom", "custom": {"name": "p", "input": "*** Patch"}}
                ],
            },
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "p", "arguments": '{"input":"*** Patch"}'},
                    }
                ],
            },
            "custom_tool",
        ),
        (
            {"role": "assistant", "refusal": "No."},
            {"role": "assistant", "refusal": "No.", "content": "No."},
            "refusal",
        ),
        (
            {"role": "assistant", "audio": {"id": "a"}},
            {
                "role": "assistant",
                "audio": {"id": "a"},
                "content": "[audio: not shown, this model reads text only]",
            },
            "media",
        ),
    ],
)
def test_calls_and_answers_in_openai_s_former_words_reach_the_prompt(
    earlier: dict[str, Any], now: dict[str, Any], counted: str
) -> None:
    translated = translate(of_path(CHAT), {"messages": [earlier]}, TEXT_ONLY)
    assert translated.body["messages"] == [now]
    assert translated.counts == {counted: 1}
    assert translate(of_path(CHAT), translated.body, TEXT_ONLY).body is translated.body


def test_metadata_that_an_answer_repeats_are_texts() -> None:
    body = {"input": "a", "metadata": {"run": 3, "name": "n", "tags": ["a"]}}
    translated = translate(of_path("/v1/responses"), body, TEXT_ONLY)
    assert translated.body["metadata"] == {"run": "3", "name": "n", "tags": '["a"]'}
    assert translated.counts == {"metadata": 1}
    assert translate(of_path("/v1/responses"), translated.body, TEXT_ONLY).body is translated.body


def test_a_search_by_openai_is_left_out_and_counted() -> None:
    translated = translate(of_path(CHAT), {"messages": [], "web_search_options": {}}, TEXT_ONLY)
    assert translated.body == {"messages": []}
    assert translated.counts == {"web_search_tool": 1}


def test_examples_of_a_tool_s_input_are_part_of_its_description() -> None:
    tool = {"name": "f", "input_schema": {}, "input_examples": [{"a": 1}]}
    body, counts = messages(tools=[tool])
    assert body["tools"] == [
        {"name": "f", "input_schema": {}, "description": 'Examples of its input: [{"a":1}]'}
    ]
    assert counts == {"input_examples": 1}
    body, _ = messages(tools=[{**tool, "description": "Finds."}])
    about = body["tools"][0]["description"]
    assert about == 'Finds.\n\nExamples of its input: [{"a":1}]'


KINDS = st.sampled_from(
    [
        *("text", "image", "document", "tool_use", "tool_result", "redacted_thinking", "custom"),
        *("server_tool_use", "x_tool_result", "namespace", "function", "function_call", "message"),
        *("local_shell_call", "mcp_call", "allowed_tools", "input_image", "bash_20250124", "?"),
        *("web_search_20250305", "computer_20251124", "function_call_output", "refusal", "file"),
        *("tool_addition", "tool_removal", "tool_reference", "tool_definition", "compaction"),
        *("additional_tools", "tool_search_call", "tool_search_output", "tool_search"),
    ]
)
LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3) | KINDS
FIELDS = st.sampled_from(
    [
        *("type", "role", "content", "name", "input", "text", "source", "tools", "namespace"),
        *("tool_choice", "thinking", "messages", "output_format", "output_config", "reasoning"),
        *("include", "summary", "action", "call_id", "output", "strict", "description", "data"),
        *("function", "allowed_tools", "defer_loading", "service_tier", "refusal", "filename"),
        *("tool", "definition", "tool_name", "tool_changes", "tool_references", "arguments"),
    ]
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS, inner, max_size=5),
    max_leaves=25,
)
BODIES = st.dictionaries(FIELDS, VALUES, max_size=8)
MODELS = st.builds(Model, *[st.booleans()] * 7)


@given(st.sampled_from([MESSAGES, CHAT, RESPONSES]), BODIES, MODELS)
@example(
    MESSAGES, {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, Model()
)
def test_translation_is_idempotent_and_does_not_modify_the_body(
    path: str, body: dict[str, Any], model: Model
) -> None:
    sent = orjson.dumps(body)
    translated = translate(of_path(path), body, model)
    assert orjson.dumps(body) == sent
    again = translate(of_path(path), translated.body, model)
    assert again.body == translated.body
    assert namespaced_names(translated.body) == {} or path != RESPONSES or model.takes_namespaces


def test_deeply_nested_and_long_bodies_are_translated() -> None:
    deep: Any = orjson.loads(b"[" * 1000 + b"]" * 1000)
    call = {"type": "server_tool_use", "name": "n", "input": deep}
    blocks = [call, {"type": "web_search_tool_result", "content": deep}]
    said = [{"role": "assistant", "content": blocks}]
    tools = [{"type": "bash_20250124", "name": f"b{k}"} for k in range(10_000)]
    translated = translate(of_path(MESSAGES), {"messages": said, "tools": tools}, TEXT_ONLY)
    assert translated.body["messages"][0]["content"][0] == text("[n was called with {}]")
    assert translated.counts["bash_tool"] == 10_000
