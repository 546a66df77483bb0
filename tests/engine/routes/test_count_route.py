"""The count of a prompt is that of the same request, on a real engine without a balancer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from sgl_ext_cpu.nursery import Nursery

from tests.engine.scheduler.test_event_publisher import Engine, running_engine

COUNT = "/v1/responses/input_tokens"
TOOL = {"type": "function", "name": "look_up", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "alpha"}


@pytest.fixture(scope="module")
def engine(
    nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("counts") / "engine.log"
    with running_engine(nursery, tiny_model, log, "--tool-call-parser", "qwen25") as started:
        yield started


@pytest.mark.parametrize(
    "body",
    [
        {"input": "Say hello."},
        {"input": "Say hello.", "instructions": "Be brief.", "stream": True},
        {"input": [{"role": "user", "content": "a"}, CALL, RESULT], "tools": [TOOL]},
    ],
    ids=["text", "instructions", "tools"],
)
def test_a_count_is_that_of_the_same_request(engine: Engine, body: dict[str, Any]) -> None:
    counted = engine.post(COUNT, {**body, "stream": False})
    whole = {**body, "model": "tiny", "max_output_tokens": 1, "store": False, "stream": False}
    usage = engine.post("/v1/responses", whole)["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "tools": "none"}, "tools"),
        ({"input": "a", "conversation": "x"}, "conversation"),
    ],
)
def test_a_body_that_the_same_request_would_be_refused_for_is_refused(
    engine: Engine, body: dict[str, Any], param: str
) -> None:
    refused = requests.post(engine.url + COUNT, json=body, timeout=60)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


def test_what_is_no_json_object_is_refused(engine: Engine) -> None:
    for data in (b"[]", b"{"):
        refused = requests.post(engine.url + COUNT, data=data, timeout=60)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("body: ")


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("POST", "/v1/responses/compact", 404, "POST /v1/responses/compact: Not Found"),
        ("POST", "/v1/v1/messages", 404, "/v1/messages is served"),
        ("POST", "//v1/chat/completions", 404, "/v1/chat/completions is served"),
        ("GET", "/v1/messages", 405, "GET /v1/messages: Method Not Allowed"),
        ("POST", "/v1/nothing", 404, "POST /v1/nothing: Not Found"),
    ],
)
def test_a_path_that_is_not_served_is_named(
    engine: Engine, method: str, path: str, status: int, said: str
) -> None:
    answer = requests.request(method, engine.url + path, json={}, timeout=60)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]
