"""Bodies that no client means: an error that names the field, from an engine and its balancer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from sgl_ext_cpu.node import Node

from tests.sglang_versions import needs_newest
from tests.waiting import HANG_S

HI = '[{"role": "user", "content": "hi"}]'
HIS = json.loads(HI)
FUNCTION = {"type": "function", "name": "f", "strict": True}
CALL = (
    '{"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function", '
    '"function": {"name": "f", "arguments": %s}}]}, '
    '{"role": "tool", "tool_call_id": "c", "content": "ok"}'
)


def lists(levels: int) -> str:
    return "[" * levels + "]" * levels


def objects(levels: int) -> str:
    return '{"a": ' * levels + "1" + "}" * levels


def messages(more: str, turns: str = HI) -> str:
    return f'{{"model": "m", "max_tokens": 2, "messages": {turns}, {more}}}'


def responses(more: str) -> str:
    return f'{{"model": "m", "max_output_tokens": 2, "input": "hi", {more}}}'


def called(arguments: str) -> str:
    turns = f"{HI[:-1]}, {CALL % arguments}]"
    return f'{{"model": "m", "max_tokens": 2, "messages": {turns}}}'


CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TOOL = '"tools": [{"type": "function", "name": "f", "parameters": %s}]'
CASES = {
    "metadata": (RESPONSES, responses(f'"metadata": {{"a": {lists(300)}}}'), "metadata"),
    "metadata of objects": (RESPONSES, responses(f'"metadata": {objects(900)}'), "metadata"),
    "a tool": (RESPONSES, responses(TOOL % objects(300)), "tools"),
    "a streamed answer": (RESPONSES, responses(f'"stream": true, {TOOL % objects(300)}'), "tools"),
    "an unknown field": (RESPONSES, responses(f'"other": {lists(900)}'), "other"),
    "a tool for chat": (
        CHAT,
        messages(
            f'"tools": [{{"type": "function", "function": {{"name": "f", '
            f'"parameters": {lists(900)}}}}}]'
        ),
        "tools",
    ),
    "a tool for messages": (
        MESSAGES,
        messages(f'"tools": [{{"name": "f", "input_schema": {objects(900)}}}]'),
        "tools",
    ),
    **{
        f"a model for {path}": (path, f'{{"model": {lists(1010)}, {rest}}}', "model")
        for path, rest in (
            (CHAT, f'"messages": {HI}'),
            (MESSAGES, f'"max_tokens": 2, "messages": {HI}'),
            (RESPONSES, '"input": "hi"'),
            ("/v1/completions", '"prompt": "hi"'),
        )
    },
    "more levels than a parser takes": (CHAT, f'{{"model": {lists(100_000)}}}', "body"),
}


@pytest.fixture(autouse=True, scope="module")
def _no_tracebacks(node: Node) -> Iterator[None]:
    def count() -> int:
        logs = node.log_dir.glob("*.log")
        return sum(log.read_text(errors="replace").count("Traceback") for log in logs)

    before = count()
    yield
    assert count() == before, "an error of a client is none of the server"


def error_of(path: str, answer: requests.Response) -> dict[str, Any]:
    document: dict[str, Any] = answer.json()
    if path == MESSAGES:
        assert document["type"] == "error"
    error: dict[str, Any] = document["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("is_balancer", [False, True], ids=["engine", "balancer"])
@pytest.mark.parametrize("case", CASES)
def test_a_hostile_body_is_refused_by_the_field(node: Node, case: str, is_balancer: bool) -> None:
    path, body, field = CASES[case]
    url = node.url if is_balancer else node.engines[0]
    headers = {"content-type": "application/json"}
    answer = requests.post(url + path, data=body, headers=headers, timeout=HANG_S)
    assert answer.status_code == 400, answer.text[-300:]
    assert field in error_of(path, answer)["message"]


BAD = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
_NAMED = {"type": "json_schema", "name": "x", "schema": BAD}
SCHEMAS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        CHAT,
        {"messages": HIS, "response_format": {"type": "json_schema", "json_schema": _NAMED}},
        "response_format",
    ),
    "responses": (RESPONSES, {"input": "hi", "text": {"format": _NAMED}}, "text.format"),
    "messages": (
        MESSAGES,
        {"messages": HIS, "max_tokens": 2, "output_config": {"format": _NAMED}},
        "output_config.format",
    ),
    "a tool": (
        RESPONSES,
        {"input": "hi", "tool_choice": "required", "tools": [{**FUNCTION, "parameters": BAD}]},
        "tools",
    ),
}


_UNKNOWN = needs_newest("/v1/messages has no output_config.format")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=_UNKNOWN if one == "messages" else ()) for one in SCHEMAS]
)
def test_a_schema_without_a_grammar_is_refused_by_its_field_before_a_stream_begins(
    node: Node, case: str, stream: bool
) -> None:
    path, body, field = SCHEMAS[case]
    answer = requests.post(
        node.url + path, json={"model": "tiny", **body, "stream": stream}, timeout=HANG_S
    )
    assert answer.status_code == 400, answer.text[-300:]
    error = error_of(path, answer)
    wanted = f"{field}: JSON Schema at #/properties/a/type is wrong: 'nonsense' is not valid"
    assert error["message"].startswith(wanted)
    assert error.get("param", field) == field


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_of_an_error_ends_with_its_reason(node: Node, stream: bool) -> None:
    body = {"model": "tiny", "input": [], "stream": stream}
    error = error_of(RESPONSES, requests.post(node.url + RESPONSES, json=body, timeout=HANG_S))
    assert error["message"].endswith("input: must not be empty")


@pytest.mark.parametrize(
    "arguments",
    ['"{\\"a\\": 1e999}"', '"{\\"a\\": NaN}"', '"1e999"', '"[1e999]"', '"{"', '""', "null"],
)
def test_arguments_that_are_no_finite_number_or_no_object_are_answered(
    node: Node, arguments: str
) -> None:
    headers = {"content-type": "application/json"}
    for url in (node.url, node.engines[0]):
        answer = requests.post(url + CHAT, data=called(arguments), headers=headers, timeout=HANG_S)
        assert answer.status_code == 200, answer.text
