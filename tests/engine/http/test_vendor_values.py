"""The vendors' ranges hold on a real engine, on every protocol."""

from __future__ import annotations

from typing import Any

import pytest
import requests

from tests.engine.scheduler.test_event_publisher import Engine
from tests.sglang_versions import needs_newest
from tests.waiting import HANG_S

TURN = [{"role": "user", "content": "Say hello."}]
MESSAGES: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "messages": TURN}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": MESSAGES,
    "/v1/chat/completions": MESSAGES,
    "/v1/completions": {"model": "tiny", "max_tokens": 3, "prompt": "Say hello."},
    "/v1/responses": {"model": "tiny", "max_output_tokens": 3, "input": "a", "store": False},
}


@pytest.mark.parametrize("path", BODIES)
def test_top_k_and_top_p_begin_at_0(engine: Engine, path: str) -> None:
    body = BODIES[path]
    engine.post(path, {**body, "top_k": 0})
    least = engine.post(path, {**body, "top_p": 0, "temperature": 1})
    greedy = engine.post(path, {**body, "temperature": 0})
    for field in ("content", "choices"):
        assert least.get(field) == greedy.get(field)


@needs_newest("/api/chat fails")
def test_ollamas_options_begin_at_0_and_say_no_limit_by_minus_1(engine: Engine) -> None:
    for options in ({"top_k": 0, "top_p": 0, "num_predict": 3}, {"num_predict": -1, "stop": ["e"]}):
        body = {"model": "tiny", "messages": TURN, "stream": False, "options": options}
        engine.post("/api/chat", body)


def test_no_answer_at_all_fills_the_cache(engine: Engine) -> None:
    body = {**MESSAGES, "messages": [{"role": "user", "content": "word " * 50}]}
    first = engine.post("/v1/messages", {**body, "max_tokens": 0})
    assert (first["content"], first["stop_reason"]) == ([], "max_tokens")
    assert first["usage"]["output_tokens"] == 0
    second = engine.post("/v1/messages", body)
    assert second["usage"]["cache_read_input_tokens"] > 40


def test_sglangs_own_path_has_sglangs_range(engine: Engine) -> None:
    body = {"text": "a", "sampling_params": {"top_k": 0, "max_new_tokens": 2}}
    assert requests.post(f"{engine.url}/generate", json=body, timeout=HANG_S).status_code == 400
