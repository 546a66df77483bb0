"""Fields that SGLang drops without a word are refused by name, on a real engine."""

from __future__ import annotations

from typing import Any

import pytest
import requests

from tests.engine.scheduler.test_event_publisher import Engine
from tests.sglang_versions import needs_newest
from tests.waiting import HANG_S

COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "a b", "max_tokens": 2}
OLLAMA: dict[str, Any] = {"model": "tiny", "stream": False, "options": {"num_predict": 2}}
BODIES = {
    "/v1/completions": COMPLETION,
    "/api/chat": {**OLLAMA, "messages": [{"role": "user", "content": "a"}]},
    "/api/generate": {**OLLAMA, "prompt": "a"},
}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"suffix": "c"}),
        ("/v1/completions", {"suffix": "c", "stream": True}),
        ("/v1/completions", {"best_of": 3}),
        ("/v1/completions", {"best_of": 3, "n": 2}),
        ("/api/chat", {"format": "json"}),
        ("/api/chat", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("/api/generate", {"suffix": "c"}),
        ("/api/generate", {"template": "{{ .Prompt }}"}),
    ],
)
def test_a_field_that_nothing_acts_on_is_refused(
    engine: Engine, path: str, fields: dict[str, Any]
) -> None:
    refused = requests.post(engine.url + path, json={**BODIES[path], **fields}, timeout=HANG_S)
    assert refused.status_code == 400
    error = refused.json()["error"]
    name = next(iter(fields))
    assert error["message"].startswith(f"{name}: is not supported; ")
    if path == "/v1/completions":
        assert error["param"] == name


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"suffix": None, "best_of": None}),
        ("/v1/completions", {"suffix": "", "best_of": 1}),
        ("/v1/completions", {"best_of": 2, "n": 2}),
        pytest.param(
            "/api/chat", {"format": "", "tools": []}, marks=needs_newest("/api/chat fails")
        ),
        ("/api/generate", {"suffix": "", "images": []}),
    ],
)
def test_its_default_is_no_wish(engine: Engine, path: str, fields: dict[str, Any]) -> None:
    if fields.get("format") == "":
        fields = {**fields, "format": None}
    engine.post(path, {**BODIES[path], **fields})
