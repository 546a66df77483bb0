"""Bodies with a field of a wrong type, in every protocol, through the balancer and real engines.

Whatever is sent, the answer is one of the protocol's, tells nothing of the server, and the node
serves on. What is tried is the same every time.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import requests
from sgl_ext_cpu.node import Node

from sgl_ext.compat.errors import is_shaped
from tests.waiting import HANG_S

pytestmark = pytest.mark.wrong_requests
_TRIES = 130
_WRONG: list[Any] = [
    *(None, True, 0, -1, 2**63, 1e300, "", "x", [], {}, [[]], [None], {"type": 5}, [{"type": []}]),
    *({"type": "x", "x": {}}, "\u0000\ud7ff", [{"role": "user"}], [{"type": "text"}]),
]
_INSIDE = re.compile(r"Traceback|site-packages|File \"|/(work|usr|home|root|project|tmp)/|\.py\b")
_CALL = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_TOOL: dict[str, Any] = {"name": "f", "description": "d"}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "model": "m",
        "max_tokens": 1,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text"}]}
                ],
            },
        ],
        "tools": [{**_TOOL, "input_schema": _SCHEMA}, {"type": "bash_20250124", "name": "bash"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "low", "format": None},
        "context_management": {},
        "stop_sequences": ["a"],
        "temperature": 1.0,
        "top_p": 0.5,
        "top_k": 2,
        "stream": False,
    },
    "/v1/chat/completions": {
        "model": "m",
        "max_tokens": 1,
        "messages": [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "t", "content": "r"},
        ],
        "tools": [{"type": "function", "function": {**_TOOL, "parameters": _SCHEMA}}],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "j", "schema": {}}},
        "stop": ["a"],
        "temperature": 1.0,
        "top_p": 0.5,
        "n": 1,
        "seed": 1,
        "logit_bias": {"5": 1},
        "logprobs": True,
        "top_logprobs": 1,
        "presence_penalty": 0.5,
        "reasoning_effort": "low",
        "service_tier": "auto",
        "stream_options": {"include_usage": True},
        "parallel_tool_calls": True,
        "user": "u",
        "stream": False,
    },
    "/v1/responses": {
        "model": "",
        "max_output_tokens": 1,
        "instructions": "i",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}]},
            {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "t", "output": "r"},
        ],
        "tools": [
            {"type": "function", **_TOOL, "parameters": _SCHEMA},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", **_TOOL}]},
            {"type": "custom", "name": "c", "format": {"type": "text"}},
        ],
        "tool_choice": "auto",
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        "temperature": 1.0,
        "top_p": 0.5,
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "store": False,
        "truncation": "auto",
        "stream": False,
    },
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value stands in a body."""
    steps = value.items() if isinstance(value, dict) else enumerate(value)
    for step, inner in steps:
        yield (*path, step)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, step))


def with_value(body: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy of a body with another value at a place."""
    copy: Any = orjson.loads(orjson.dumps(body))
    holder = copy
    for step in place[:-1]:
        holder = holder[step]
    holder[place[-1]] = value
    return copy


@pytest.mark.parametrize("path", _BODIES)
def test_no_wrong_type_is_an_error_of_the_server(node: Node, served_model: str, path: str) -> None:
    chance = random.Random(path)
    body = {**_BODIES[path], "model": served_model}
    everywhere = [(place, wrong) for place in places(body) for wrong in _WRONG]
    failed = []
    with requests.Session() as session:
        for place, wrong in chance.sample(everywhere, _TRIES):
            if place in (("max_tokens",), ("max_output_tokens",)):
                continue  # without them an answer has no end
            sent = with_value(body, place, wrong)
            answer = session.post(node.url + path, json=sent, timeout=HANG_S)
            if told := problem(path, answer):
                failed.append((place, wrong, told))
    assert not failed


_RAW = {
    "deep": b'{"model": "m", "messages": ' + b"[" * 1020 + b"]" * 1020 + b"}",
    "too deep": b'{"messages": ' + b"[" * 100_000,
    "twice": b'{"model": "m", "max_tokens": 1, "messages": 5, "messages": []}',
    "not utf-8": b'{"model": "\xff\xfe", "messages": []}',
    "surrogate": rb'{"model": "m", "messages": [{"role": "user", "content": "\ud800"}]}',
    "number": b'{"model": "m", "max_tokens": ' + b"9" * 400 + b', "messages": []}',
    "nan": b'{"model": "m", "temperature": NaN, "messages": []}',
    "infinity": b'{"model": "m", "top_p": -Infinity, "messages": []}',
    "byte order mark": b'\xef\xbb\xbf{"model": "m", "messages": []}',
    "two documents": b'{"model": "m", "messages": []}{}',
    "deep model": b'{"model": ' + b"[" * 1010 + b"]" * 1010 + b', "messages": []}',
    "deep salt": b'{"cache_salt": ' + b"[" * 600 + b"]" * 600 + b', "messages": []}',
    "deep hint": b'{"nvext": {"agent_hints": {"osl": ' + b"[" * 990 + b"]" * 990 + b"}}}",
    "list": b"[1]",
    "null": b"null",
    "nothing": b"",
}


@pytest.mark.parametrize("path", _BODIES)
def test_no_malformed_json_is_an_error_of_the_server(node: Node, path: str) -> None:
    headers = {"content-type": "application/json"}
    for name, data in _RAW.items():
        answer = requests.post(node.url + path, data=data, headers=headers, timeout=HANG_S)
        assert 400 <= answer.status_code < 500, (name, answer.text)
        assert not problem(path, answer), name


def test_of_a_field_given_twice_the_node_takes_the_last(node: Node, served_model: str) -> None:
    message = '{"role": "user", "content": "a"}'
    body = (
        f'{{"model": "other", "model": "{served_model}", "stream": true, "stream": false,'
        f'"max_tokens": 50, "max_tokens": 3, "ignore_eos": true, "messages": [{message}],'
        f'"temperature": 5, "temperature": 0}}'
    )
    headers = {"content-type": "application/json"}
    answer = requests.post(
        f"{node.url}/v1/chat/completions", data=body, headers=headers, timeout=HANG_S
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_results_inside_results_are_no_error_of_the_server(node: Node, served_model: str) -> None:
    result: Any = "x"
    for _ in range(430):
        result = [{"type": "tool_result", "tool_use_id": "t", "content": result}]
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]}
    messages = [{"role": "user", "content": "a"}, call, {"role": "user", "content": result}]
    body = {"model": served_model, "max_tokens": 1, "messages": messages}
    answer = node.post("/v1/messages", body)
    assert answer.status_code < 500, answer.text
    assert not problem("/v1/messages", answer)


def test_lists_of_different_lengths_are_no_error_of_the_server(node: Node) -> None:
    answer = node.post("/generate", {"text": ["a", "b"], "sampling_params": [{}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(("count", "status"), [(2_000, 200), (10_000, 400)])
def test_many_tools_are_counted_up_to_the_limit(node: Node, count: int, status: int) -> None:
    tools = [{"name": f"f{k}", "input_schema": {"type": "object"}} for k in range(count)]
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": tools}
    answer = node.post("/v1/messages/count_tokens", body)
    assert answer.status_code == status, answer.text
    if status == 200:
        assert answer.json()["input_tokens"] > 10 * count
    else:
        assert "tools" in answer.json()["error"]["message"]


def problem(path: str, answer: requests.Response) -> str:
    """What is wrong with an answer; nothing of what is said for its request."""
    text = answer.text
    if answer.status_code >= 500:
        return text[:300]
    if answer.status_code == 200:
        return ""
    if inside := _INSIDE.search(text):
        return f"tells {inside[0]!r}: {text[:300]}"
    if not is_shaped(path):
        return ""
    error = answer.json()["error"]
    told = (
        {"type", "message"}
        if path.startswith("/v1/messages")
        else {"message", "type", "param", "code"}
    )
    return "" if set(error) == told and error["message"] else text[:300]
