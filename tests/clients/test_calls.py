"""What a model says and calls is the same whether it is streamed or whole, in every protocol.

A tool that nobody declared is called like any other: it is for the client to say so, and for the
model to do better.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from sgl_ext_cpu.node import Node

from tests.clients.scripts import LATE_CALL, LATE_PROMPT, ODD_CALLS, ODD_PROMPT, ODD_WORD

_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
_DECLARED = ("read_file", "search")
_SAID_AND_CALLED = [ODD_WORD, *ODD_CALLS]


@pytest.fixture
def key(api_keys: dict[str, str]) -> str:
    return api_keys["sdks"]


def whole(node: Node, key: str, path: str, body: dict[str, Any]) -> Any:
    answer = node.post(path, body, headers={"x-api-key": key})
    answer.raise_for_status()
    return answer.json()


def events(node: Node, key: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a stream."""
    body = {**body, "stream": True}
    with node.post(path, body, headers={"x-api-key": key}, stream=True) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def of_messages(content: list[dict[str, Any]]) -> list[Any]:
    """What is said, and called, in order."""
    return [
        (block["name"], block["input"]) if block["type"] == "tool_use" else block["text"].lstrip()
        for block in content
        if block["type"] != "thinking"
    ]


@pytest.mark.parametrize("one", [False, True])
def test_messages(scripted: Node, key: str, one: bool) -> None:
    expected = _SAID_AND_CALLED[: 2 if one else None]
    body = {
        "model": "tiny",
        "max_tokens": 300,
        "thinking": {"type": "adaptive"},
        "tools": [{"name": name, "input_schema": _SCHEMA} for name in _DECLARED],
        "messages": [{"role": "user", "content": ODD_PROMPT}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": one},
    }
    answer = whole(scripted, key, "/v1/messages", body)
    assert of_messages(answer["content"]) == expected
    assert answer["stop_reason"] == "tool_use"

    content: list[dict[str, Any]] = []
    for event in events(scripted, key, "/v1/messages", body):
        if event["type"] == "content_block_start":
            content.append(event["content_block"] | {"partial_json": ""})
        elif event["type"] == "content_block_delta":
            (field,) = event["delta"].keys() - {"type"}
            content[-1][field] += event["delta"][field]
        elif event["type"] == "message_delta":
            assert event["delta"]["stop_reason"] == "tool_use"
    for block in content:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["partial_json"])
    assert of_messages(content) == expected


@pytest.mark.parametrize("one", [False, True])
def test_chat_completions(scripted: Node, key: str, one: bool) -> None:
    expected = ODD_CALLS[: 1 if one else None]
    functions = [{"name": name, "parameters": _SCHEMA} for name in _DECLARED]
    body = {
        "model": "tiny",
        "max_tokens": 300,
        "tools": [{"type": "function", "function": function} for function in functions],
        "messages": [{"role": "user", "content": ODD_PROMPT}],
        "parallel_tool_calls": not one,
    }
    (choice,) = whole(scripted, key, "/v1/chat/completions", body)["choices"]
    assert choice["message"]["content"].lstrip() == ODD_WORD
    made = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in made] == expected

    said, names, arguments = "", dict[int, str](), dict[int, str]()
    for event in events(scripted, key, "/v1/chat/completions", body):
        delta = event["choices"][0]["delta"]
        said += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            part, index = call["function"], call["index"]
            names[index] = names.get(index) or part["name"]
            arguments[index] = arguments.get(index, "") + part["arguments"]
    assert said == choice["message"]["content"]
    assert [(names[n], json.loads(arguments[n])) for n in sorted(names)] == expected


def test_a_tool_that_is_added_is_called_and_leaves_the_prompt_before_it_in_the_cache(
    scripted: Node, key: str
) -> None:
    schema = {"type": "object", "properties": {"colour": {"type": "string"}}}
    definition = {"name": LATE_CALL[0], "input_schema": schema}
    added = {"type": "tool_definition", "definition": definition}
    conversation = [
        {"role": "user", "content": LATE_PROMPT},
        {"role": "assistant", "content": ODD_WORD},
        {"role": "user", "content": "Now."},
        {"role": "system", "content": [{"type": "tool_addition", "tool": added}]},
    ]
    body = {
        "model": "tiny",
        "max_tokens": 100,
        "thinking": {"type": "disabled"},
        "tools": [{"name": name, "input_schema": _SCHEMA} for name in _DECLARED],
    }
    first = whole(scripted, key, "/v1/messages", {**body, "messages": conversation[:1]})
    second = whole(scripted, key, "/v1/messages", {**body, "messages": conversation})
    assert of_messages(second["content"]) == [LATE_CALL]
    prompt = sum(first["usage"].get(f"{kind}input_tokens", 0) for kind in ("", "cache_read_"))
    # The last tokens only begin the answer, for which thinking is off.
    assert second["usage"]["cache_read_input_tokens"] >= prompt - 16


def of_response(output: list[dict[str, Any]]) -> list[Any]:
    """What is said, and called, in order."""
    return [
        (item["name"], json.loads(item["arguments"]))
        if item["type"] == "function_call"
        else item["content"][0]["text"].lstrip()
        for item in output
        if item["type"] != "reasoning"
    ]


@pytest.mark.parametrize("one", [False, True])
def test_responses(scripted: Node, scripted_model: str, key: str, one: bool) -> None:
    expected = _SAID_AND_CALLED[: 2 if one else None]
    body = {
        "model": scripted_model,
        "max_output_tokens": 300,
        "tools": [{"type": "function", "name": n, "parameters": _SCHEMA} for n in _DECLARED],
        "input": ODD_PROMPT,
        "store": False,
        "parallel_tool_calls": not one,
    }
    answer = whole(scripted, key, "/v1/responses", body)
    assert of_response(answer["output"]) == expected
    *_, last = events(scripted, key, "/v1/responses", body)
    assert of_response(last["response"]["output"]) == expected
