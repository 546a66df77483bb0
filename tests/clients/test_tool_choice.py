"""What an answer may hold does not change its prompt, and a schema leaves calls possible."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from sgl_ext_cpu.node import Node

from tests.clients.scripts import CHOICE_ANSWER, CHOICE_PROMPT, CHOICE_SCHEMA, READ

_PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
    "additionalProperties": False,
}
_NAMES = ("read_file", "search")
_FUNCTIONS = [{"name": name, "parameters": _PARAMETERS} for name in _NAMES]
_TOOLS = [{"type": "function", "function": function} for function in _FUNCTIONS]
_FLAT_TOOLS = [{"type": "function", **function} for function in _FUNCTIONS]
_STRICT = [{**tool, "strict": True} for tool in _FLAT_TOOLS]
_INPUT_TOOLS = [{"name": name, "input_schema": _PARAMETERS} for name in _NAMES]
_NAMED = {"name": "answer", "schema": CHOICE_SCHEMA}


@pytest.fixture
def told(scripted: Node, api_keys: dict[str, str]) -> Iterator[Any]:
    def tell(path: str, body: dict[str, Any]) -> Any:
        answer = scripted.post(path, body, headers={"x-api-key": api_keys["sdks"]})
        assert answer.status_code == 200, answer.text
        return answer.json()

    return tell


def test_a_schema_on_chat_completions_allows_calls(told: Any) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": CHOICE_PROMPT}]
    form = {"type": "json_schema", "json_schema": _NAMED}
    body = {"model": "tiny", "max_tokens": 200, "tools": _TOOLS, "response_format": form}
    message = told("/v1/chat/completions", {**body, "messages": messages})["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == READ
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "port = 30000"}]
    choice = told("/v1/chat/completions", {**body, "messages": messages})["choices"][0]
    assert json.loads(choice["message"]["content"]) == CHOICE_ANSWER


@pytest.mark.parametrize("tools", [_FLAT_TOOLS, _STRICT])
def test_a_schema_on_responses_allows_calls(
    told: Any, scripted_model: str, tools: list[dict[str, Any]]
) -> None:
    text = {"format": {"type": "json_schema", **_NAMED}}
    body = {"model": scripted_model, "max_output_tokens": 200, "tools": tools, "text": text}
    answer = told("/v1/responses", {**body, "input": CHOICE_PROMPT})
    (call,) = (item for item in answer["output"] if item["type"] == "function_call")
    assert (call["name"], json.loads(call["arguments"])) == READ
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "port = 30000"}
    body |= {"previous_response_id": answer["id"], "input": [output]}
    answer = told("/v1/responses", body)
    (said,) = (item for item in answer["output"] if item["type"] == "message")
    assert json.loads(said["content"][0]["text"]) == CHOICE_ANSWER


def test_a_schema_on_messages_allows_calls(told: Any) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": CHOICE_PROMPT}]
    body = {
        "model": "tiny",
        "max_tokens": 200,
        "tools": _INPUT_TOOLS,
        "thinking": {"type": "adaptive"},
        "output_config": {"format": {"type": "json_schema", "schema": CHOICE_SCHEMA}},
    }
    content = told("/v1/messages", {**body, "messages": messages})["content"]
    (call,) = (block for block in content if block["type"] == "tool_use")
    assert (call["name"], call["input"]) == READ
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "port = 30000"}
    messages += [
        {"role": "assistant", "content": content},
        {"role": "user", "content": [result]},
    ]
    content = told("/v1/messages", {**body, "messages": messages})["content"]
    (said,) = (block for block in content if block["type"] == "text")
    assert json.loads(said["text"]) == CHOICE_ANSWER


_ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "search"}}]}
_CHOICES: list[Any] = [
    "auto",
    "none",
    {"type": "function", "function": {"name": "search"}},
    {"type": "allowed_tools", "allowed_tools": _ALLOWED},
    {"type": "allowed_tools", "allowed_tools": {**_ALLOWED, "mode": "required"}},
]


def test_no_choice_of_tools_changes_the_prompt(node: Node) -> None:
    body = {
        "model": "tiny",
        "max_tokens": 8,
        "tools": _TOOLS,
        "messages": [{"role": "user", "content": "Which port is it, if it is one? " * 8}],
        "return_prompt_token_ids": True,
    }
    answers = []
    for choice in _CHOICES:
        answer = node.post("/v1/chat/completions", {**body, "tool_choice": choice})
        assert answer.status_code == 200, answer.text
        answers.append(answer.json())
    prompts = {tuple(answer["choices"][0]["prompt_token_ids"]) for answer in answers}
    (prompt,) = prompts
    for answer in answers[1:]:
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= len(prompt) - 1


def test_a_grammar_excludes_calls_that_the_choice_forbids(node: Node) -> None:
    """The model is made to begin a call whenever it may, and goes on as it likes."""
    tokens = _told(node, "/v1/tokenize", {"prompt": "<tool_call>"})["tokens"]
    body = {
        "max_tokens": 24,
        "tools": _TOOLS,
        "messages": [{"role": "user", "content": "Which port is it?"}],
        "logit_bias": {str(token): 100 for token in tokens},
        "return_token_ids": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    for choice in _CHOICES:
        (made,) = _told(node, "/v1/chat/completions", {**body, "tool_choice": choice})["choices"]
        text = _told(node, "/v1/detokenize", {"tokens": made["response_token_ids"]})["text"]
        assert text.startswith("<tool_call>") is (choice != "none")
        assert ("search" in text) is (choice not in ("auto", "none"))
        assert "read_file" not in text


def _told(node: Node, path: str, body: dict[str, Any]) -> Any:
    answer = node.post(path, {"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()
