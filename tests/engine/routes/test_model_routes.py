"""`GET /v1/models` for clients of both vendors, in the application as SGLang builds it."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from sgl_ext.compat.errors import ErrorMiddleware
from sgl_ext.engine import sglang_api
from sgl_ext.engine.http.routes import model_routes

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
