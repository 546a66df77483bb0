"""The count of a prompt is that of the same request, on a real engine without a balancer.

`GET /v1/models` for clients of both vendors, in the application as SGLang builds it.

An engine says that a process of it is stopped, and for how long.

The signs of work that a silent engine shows.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import requests
from starlette.applications import Starlette
from starlette.testclient import TestClient

from scheduler.silence import WORKING_FAULTS
from sgl_ext.compat.errors import ErrorMiddleware
from sgl_ext.engine import sglang_api
from sgl_ext.engine.http import routes
from sgl_ext.engine.http.routes import (
    STOPPED_S,
    Readiness,
    count_faults,
    faults_by_process,
    model_routes,
)
from tests.engine.scheduler.test_event_publisher import Engine
from tests.waiting import HANG_S, until

COUNT = "/v1/responses/input_tokens"
TOOL = {"type": "function", "name": "look_up", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "alpha"}


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
    refused = requests.post(engine.url + COUNT, json=body, timeout=HANG_S)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


def test_what_is_no_json_object_is_refused(engine: Engine) -> None:
    for data in (b"[]", b"{"):
        refused = requests.post(engine.url + COUNT, data=data, timeout=HANG_S)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("body: ")


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("POST", "/v1/responses/compact", 404, "POST /v1/responses/compact: Not Found"),
        ("POST", "/v1/messages/cache_touch", 404, "/v1/messages/cache_touch: Not Found"),
        ("POST", "/v1/v1/messages", 404, "/v1/messages is served"),
        ("POST", "//v1/chat/completions", 404, "/v1/chat/completions is served"),
        ("GET", "/v1/messages", 405, "GET /v1/messages: Method Not Allowed"),
        ("POST", "/v1/nothing", 404, "POST /v1/nothing: Not Found"),
    ],
)
def test_a_path_that_is_not_served_is_named(
    engine: Engine, method: str, path: str, status: int, said: str
) -> None:
    answer = requests.request(method, engine.url + path, json={}, timeout=HANG_S)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]


ANTHROPIC = {"anthropic-version": "2023-06-01"}


class Card:
    def __init__(self, name: str) -> None:
        self.name = name

    def model_dump(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "max_model_len": None}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    async def available_models() -> Any:
        return SimpleNamespace(data=[Card("org/m"), Card("adapter")])

    manager = SimpleNamespace(model_config=SimpleNamespace(context_len=4096))
    state = SimpleNamespace(tokenizer_manager=manager)
    # Not `setattr`, which would import SGLang to restore what was there.
    monkeypatch.setitem(vars(sglang_api), "available_models", available_models)
    monkeypatch.setitem(vars(sglang_api), "get_global_state", lambda: state)
    application = Starlette(routes=model_routes())
    application.add_middleware(ErrorMiddleware)
    return TestClient(application)


def test_the_list_has_the_shape_of_the_client_that_asks(client: TestClient) -> None:
    models = client.get("/v1/models").json()
    assert models["object"] == "list"
    assert [(each["id"], each["max_model_len"]) for each in models["data"]] == [
        ("org/m", 4096),
        ("adapter", 4096),
    ]
    models = client.get("/v1/models?limit=1", headers=ANTHROPIC).json()
    assert (models["has_more"], models["data"][0]["type"]) == (True, "model")


def test_a_model_was_created_when_its_engine_was_started(client: TestClient) -> None:
    shown = client.get("/v1/models/adapter", headers=ANTHROPIC).json()
    assert not shown["created_at"].startswith("1970")
    created = [client.get("/v1/models/adapter").json()["created"] for _ in range(2)]
    assert created[0] == created[1]
    day = datetime.fromtimestamp(created[0], UTC).isoformat().replace("+00:00", "Z")
    assert shown["created_at"] == day


def test_one_model_is_found_by_its_name(client: TestClient) -> None:
    assert client.get("/v1/models/org/m").json()["context_length"] == 4096
    shown = client.get("/v1/models/adapter", headers=ANTHROPIC).json()
    assert (shown["display_name"], shown["max_input_tokens"]) == ("adapter", 4096)


def test_errors_have_the_shape_of_the_client_that_asks(client: TestClient) -> None:
    answer = client.get("/v1/models/none")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    answer = client.get("/v1/models/none", headers=ANTHROPIC)
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"
    for limit in ("0", "x", "1001", "9" * 5000, "²"):
        answer = client.get(f"/v1/models?limit={limit}", headers=ANTHROPIC)
        assert (answer.status_code, answer.json()["type"]) == (400, "error")
        assert "limit: " in answer.json()["error"]["message"]


class Process:
    state = psutil.STATUS_SLEEPING

    def status(self) -> str:
        return self.state


class Gone:
    def status(self) -> str:
        raise psutil.NoSuchProcess(1)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_stopped_process_is_503_at_once_and_504_after_a_while() -> None:
    process, clock = Process(), Clock()
    readiness = Readiness(lambda: [Gone(), process], clock)
    assert readiness.status(takes_requests=True) == 200
    assert readiness.status(takes_requests=False) == 503
    process.state = psutil.STATUS_STOPPED
    assert readiness.status(takes_requests=True) == 503
    clock.now_s = STOPPED_S
    assert readiness.status(takes_requests=True) == 504
    process.state = psutil.STATUS_TRACING_STOP
    assert readiness.status(takes_requests=True) == 200
    process.state = psutil.STATUS_STOPPED
    assert readiness.status(takes_requests=True) == 503


LOOP = "print('up', flush=True)\nwhile True: pass"
COMPILER = "print('up', flush=True)\nwhile True: bytearray(50_000_000)"


async def test_faults_are_counted_of_processes_that_come_and_go() -> None:
    totals = iter([{1: 100, 2: 50}, {1: 130, 3: 7}])
    assert await count_faults(lambda: next(totals), 0.0) == 37


@pytest.fixture(params=[LOOP, COMPILER], ids=["loop", "compiler"])
def child(request: pytest.FixtureRequest) -> Iterator[tuple[int, bool]]:
    """A process below this one: its id, and whether it works."""
    with subprocess.Popen([sys.executable, "-c", request.param], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid, request.param == COMPILER
        process.kill()


def test_a_compiler_touches_memory_and_a_loop_does_not(child: tuple[int, bool]) -> None:
    pid, works = child
    before = faults_by_process()[pid]
    process = psutil.Process(pid)
    begun_s = process.cpu_times().user

    def is_seen() -> bool:
        return faults_by_process()[pid] - before >= WORKING_FAULTS

    until(is_seen if works else lambda: process.cpu_times().user - begun_s > 0.5)
    assert is_seen() is works


def test_an_engine_says_how_old_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "SAMPLE_S", 0.0)
    monkeypatch.setattr(routes, "faults_by_process", dict)
    client = TestClient(Starlette(routes=[routes.work_route()]))
    signs = client.get("/sgl_ext/work").json()
    assert signs["page_faults"] == 0
    assert 0 <= signs["age_s"] < 60
