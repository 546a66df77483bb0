"""What harnesses send and stock SGLang refuses, drops or answers wrongly, on real engines."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import orjson
import pytest
import requests
from sgl_ext_cpu.node import Node

from tests.waiting import HANG_S

USER = {"role": "user", "content": "Go on."}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string", "maxLength": 4}}}
SCHEMA["required"] = ["path"]
READ = {"name": "read", "description": "Reads a file.", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "name": "spawn", "parameters": SCHEMA}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "AA=="}
OFF = {"type": "disabled"}
COUNTED = "sgl_ext_translated_parts_total"


def message(node: Node, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 1, "messages": [USER], "thinking": OFF, **fields}
    answer = node.post("/v1/messages", body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def prompt(told: dict[str, Any]) -> int:
    usage = told["usage"]
    read, written = (usage.get(f"cache_{k}_input_tokens") or 0 for k in ("read", "creation"))
    return int(usage["input_tokens"] + read + written)


def said(*blocks: Any, role: str = "assistant") -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": list(blocks)}, USER]}


REQUESTS: list[dict[str, Any]] = [
    {"tools": [{"type": "web_search_20250305", "name": "web_search"}, READ]},
    {"tools": [{"type": "code_execution_20250825", "name": "code_execution"}]},
    {"tools": [{"type": "bash_20250124", "name": "bash"}]},
    {"tools": [{"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}]},
    {"tools": [{"type": "memory_20250818", "name": "memory"}]},
    {"tools": [{"type": "computer_20250124", "name": "computer", "display_width_px": 9}]},
    {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
    {"mcp_servers": [{"type": "url", "url": "https://host", "name": "n"}], "container": "c"},
    {"output_format": {"type": "json_schema", "schema": {"const": "a"}}},
    said({"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}),
    said({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}),
    said({"type": "web_search_tool_result", "tool_use_id": "s", "content": []}),
    said({"type": "tool_use", "id": "t", "name": "read", "input": "{"}),
    said(IMAGE, role="user"),
    said({"type": "document", "source": PDF}, role="user"),
    said({"type": "document", "source": {"type": "text", "data": "All of it."}}, role="user"),
    said({"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}, role="user"),
]
RESPONSES: list[dict[str, Any]] = [
    {"tools": [{"type": kind}]}
    for kind in ("web_search", "web_search_2025_08_26", "local_shell", "shell", "apply_patch")
] + [
    {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]},
    {"service_tier": "fast"},
    {"reasoning": {"effort": "none", "summary": "none"}},
]
ITEMS: list[dict[str, Any]] = [
    {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "call_id": "c", "output": "a"},
    {"type": "web_search_call", "id": "w", "status": "completed"},
    {"type": "compaction", "id": "c", "encrypted_content": "x"},
    {"type": "item_of_the_future", "id": "f"},
    {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]},
    {"role": "user", "content": [{"type": "input_file", "filename": "a.pdf", "file_data": "x"}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
]
CHATS: list[dict[str, Any]] = [
    {"tools": [{"type": "custom", "custom": {"name": "p"}}]},
    {"messages": [{"role": "user", "content": [{"type": "file", "file": {"filename": "a"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
]


def test_whatever_stock_refuses_is_answered_and_counted(node: Node, served_model: str) -> None:
    respond = {"model": served_model, "max_output_tokens": 1, "reasoning": {"effort": "none"}}
    chat = {"model": "m", "max_tokens": 1, "messages": [USER], "reasoning_effort": "none"}
    sent = [
        ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": [USER], **each})
        for each in REQUESTS
    ]
    sent += [("/v1/responses", {"input": "Go on.", **respond, **each}) for each in RESPONSES]
    sent += [("/v1/responses", {**respond, "input": [USER, item, USER]}) for item in ITEMS]
    sent += [("/v1/chat/completions", chat | each) for each in CHATS]
    for path, body in sent:
        before = node.metric(COUNTED)
        answer = node.post(path, body)
        assert answer.status_code == 200, (body, answer.text)
        assert node.metric(COUNTED) > before, body


def test_a_tool_that_the_client_runs_reaches_the_model(node: Node) -> None:
    bash = {"type": "bash_20250124", "name": "bash"}
    search = {"type": "web_search_20250305", "name": "web_search"}
    alone = prompt(message(node))
    assert prompt(message(node, tools=[search])) == alone
    assert prompt(message(node, tools=[bash])) > alone + 20


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "read"}])
def test_a_call_that_is_demanded_comes(claude: anthropic.Anthropic, choice: dict[str, Any]) -> None:
    events = claude.messages.create(
        model="m",
        max_tokens=256,
        messages=[USER],
        tools=[READ],
        tool_choice=choice,
        thinking=OFF,
        stream=True,
    )
    begun = [event.content_block for event in events if event.type == "content_block_start"]
    calls = [block for block in begun if isinstance(block, anthropic.types.ToolUseBlock)]
    assert begun[0] is calls[0]  # what is said behind it is up to the model
    assert {call.name for call in calls} == {"read"}


def test_a_named_tool_is_the_one_that_is_called(gpt: openai.OpenAI, node: Node) -> None:
    names = [f"tool_{letter}" for letter in "abcd"]
    functions = [{"name": name, "parameters": SCHEMA} for name in names]
    for name in names:
        answer = gpt.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": f"Go on with another than {name}."}],
            tools=[{"type": "function", "function": function} for function in functions],
            tool_choice={"type": "function", "function": {"name": name}},
            max_completion_tokens=128,
            temperature=0,
        )
        calls = answer.choices[0].message.tool_calls or []
        assert {call.function.name for call in calls} <= {name}
        assert calls or answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "modalities", ["text", "audio"]),
        ("/v1/chat/completions", "audio", {"voice": "v", "format": "wav"}),
        ("/v1/chat/completions", "moderation", {"model": "m"}),
        ("/v1/responses", "prompt", {"id": "p"}),
        ("/v1/chat/completions", "functions", [{"name": "f", "parameters": {}}]),
        ("/v1/chat/completions", "function_call", {"name": "f"}),
        ("/v1/responses", "conversation", "conv_1"),
        ("/v1/responses", "background", True),
    ],
)
def test_a_field_that_nobody_acts_on_is_refused_by_name(
    node: Node, served_model: str, path: str, field: str, value: Any
) -> None:
    body = {"model": served_model, "messages": [USER], "input": "Go on.", field: value}
    answer = node.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert error["message"].startswith(f"{field}: is not supported")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "You help."},
        {"system": [{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}]},
        {"tools": [READ, {"type": "bash_20250124", "name": "bash"}]},
        {"tools": [READ], "tool_choice": {"type": "any"}},
        {"tools": [READ], "tool_choice": {"type": "none"}},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "tools": [READ]},
        {"messages": [USER, {"role": "assistant", "content": "a"}, {**USER, "role": "system"}]},
        said({"type": "thinking", "thinking": "Well.", "signature": ""}, IMAGE),
        {"output_config": {"format": {"type": "json_schema", "schema": {"const": "a"}}}},
    ],
)
def test_tokens_are_counted_as_they_are_used(node: Node, fields: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [USER], "thinking": OFF, **fields}
    counted = node.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    assert counted == prompt(message(node, **fields))


def test_later_instructions_are_in_their_place(node: Node) -> None:
    late = {"role": "system", "content": "And mind the gap."}
    body = message(node, messages=[USER, late])
    longer = message(node, messages=[USER, late, {"role": "assistant", "content": "Yes."}, USER])
    assert prompt(longer) > prompt(body)
    assert longer["usage"]["cache_read_input_tokens"] >= prompt(body) - 8


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_that_ended_an_answer_is_named(
    claude: anthropic.Anthropic, stream: bool
) -> None:
    letters = [*"etaoinsr"]
    asked: dict[str, Any] = {
        "model": "m",
        "max_tokens": 512,
        "messages": [USER],
        "stop_sequences": letters,
        "thinking": OFF,
    }
    if stream:
        with claude.messages.stream(**asked) as events:
            answer = events.get_final_message()
    else:
        answer = claude.messages.create(**asked)
    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence in letters


def test_a_tool_of_a_namespace_is_called_by_its_own_name(
    gpt: openai.OpenAI, served_model: str
) -> None:
    namespace = {"type": "namespace", "name": "agents", "description": "", "tools": [FUNCTION]}
    asked: dict[str, Any] = {
        "model": served_model,
        "tools": [namespace],
        "reasoning": {"effort": "none"},
    }
    events = gpt.responses.create(
        **asked, input="Go on.", tool_choice="required", max_output_tokens=256, stream=True
    )
    items = [event.item for event in events if event.type == "response.output_item.done"]
    # An answer of so many tokens may end within one more call, which is none then.
    calls = [item for item in items if item.type == "function_call"]
    assert {(item.namespace, item.name) for item in calls} == {("agents", "spawn")}
    call = calls[0].model_dump(exclude_none=True)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
    turn = [{"role": "user", "content": "Go on."}, call, result]
    again = gpt.responses.create(**asked, input=turn, max_output_tokens=1)
    assert again.status == "incomplete"


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_response_has_as_many_tokens_as_it_may(
    gpt: openai.OpenAI, served_model: str, tokens: int
) -> None:
    answer = gpt.responses.create(
        model=served_model,
        input="Say hello.",
        max_output_tokens=tokens,
        reasoning={"effort": "none"},
    )
    assert answer.usage.output_tokens == tokens
    assert answer.max_output_tokens == tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_context_is_told_as_harnesses_look_for_it(
    claude: anthropic.Anthropic, gpt: openai.OpenAI, served_model: str, stream: bool
) -> None:
    most = 10**7
    with pytest.raises(anthropic.BadRequestError) as told:
        claude.post(
            "/v1/messages",
            body={"model": "m", "max_tokens": most, "messages": [USER], "stream": stream},
            cast_to=object,
        )
    assert "input length and `max_tokens` exceed context limit: " in str(told.value)
    assert told.value.request_id == told.value.body["request_id"]
    with pytest.raises(openai.BadRequestError) as refused:
        gpt.chat.completions.create(model="m", max_tokens=most, messages=[USER], stream=stream)
    assert refused.value.code == "context_length_exceeded"
    answer = gpt.post(
        "/responses",
        body={"model": served_model, "input": "a", "max_output_tokens": most, "stream": True},
        cast_to=str,
    )
    failed = [line for line in str(answer).splitlines() if '"response.failed"' in line]
    told_code = orjson.loads(failed[0].removeprefix("data: "))["response"]["error"]["code"]
    assert told_code == "context_length_exceeded"


def test_answers_and_errors_name_their_request(
    claude: anthropic.Anthropic, gpt: openai.OpenAI, node: Node
) -> None:
    answer = claude.messages.create(model="m", max_tokens=1, messages=[USER])
    assert answer._request_id.startswith("req_")
    chat = gpt.chat.completions.create(model="m", max_tokens=1, messages=[USER])
    assert chat._request_id.startswith("req_")
    with pytest.raises(openai.BadRequestError) as refused:
        gpt.chat.completions.create(model="m", messages=[USER], temperature="hot")  # type: ignore
    error = refused.value
    assert error.request_id.startswith("req_")
    assert (error.param, error.code, error.type) == ("temperature", None, "invalid_request_error")
    assert "site-packages" not in str(error)
    native = requests.post(f"{node.url}/generate", json={"text": 5}, timeout=HANG_S)
    assert native.status_code == 400
