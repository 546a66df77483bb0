"""What the engines' own schema allows, and what it forbids, on paths with a JSON body.

The schema is SGLang's `/openapi.json`. Chat and completions are left to `test_fuzz.py`, as to make
one body of their schemas takes half a minute, and so is what generates until a context is full
unless it is told otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from sgl_ext_cpu.node import Node

from sgl_ext.protocols import routes
from tests.clients.test_fuzz import problem
from tests.waiting import HANG_S

pytestmark = [pytest.mark.wrong_requests, pytest.mark.slow]
_TRIES = 3
_SLOW = {"/v1/chat/completions", "/v1/completions", "/invocations", "/vertex_generate"}
_LONG = {"/api/chat", "/api/generate"}
_HEADERS = {"content-type": "application/json"}


def try_out(operation: Any, mode: GenerationMode, ask: Callable[[str, bytes], None]) -> None:
    """Has some bodies of a schema asked, the same every time."""

    @settings(
        max_examples=_TRIES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        body = case.body
        ask(operation.path, body if isinstance(body, bytes) else json.dumps(body).encode())

    send()


def test_nothing_that_a_schema_allows_or_forbids_is_an_error_of_the_server(node: Node) -> None:
    document = requests.get(f"{node.engines[0]}/openapi.json", timeout=HANG_S).json()
    document["paths"] = {
        path: {"post": methods["post"]}
        for path, methods in document["paths"].items()
        if path in routes.PLACED and path not in _SLOW | _LONG
    }
    failed: list[Any] = []
    tried: set[str] = set()
    with requests.Session() as session:

        def ask(path: str, data: bytes) -> None:
            tried.add(path)
            answer = session.post(node.url + path, data=data, headers=_HEADERS, timeout=HANG_S)
            if told := problem(path, answer):
                failed.append((path, data[:200], answer.status_code, told))

        for found in schemathesis.openapi.from_dict(document).get_all_operations():
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                try_out(found.ok(), mode, ask)
    assert not failed
    assert tried >= {"/v1/messages", "/v1/responses", "/generate", "/v1/detokenize"}
