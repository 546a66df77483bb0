"""The window that clients are told is what the engine takes, and a longer prompt is refused in the
vendors' words: a real engine whose KV memory holds less than one context, without a balancer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import requests
from sgl_ext_cpu.nursery import Nursery

from sgl_ext.compat.window import announce, check_length, window_of
from tests.engine.scheduler.test_event_publisher import Engine, running_engine

MEMORY, WINDOW = 3000, 2993
LONG = "word " * 4000
ANTHROPIC = {"anthropic-version": "2023-06-01"}
TURN = [{"role": "user", "content": LONG}]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("window") / "engine.log"


@pytest.fixture(scope="module")
def engine(nursery: Nursery, tiny_model: Path, log: Path) -> Iterator[Engine]:
    with running_engine(
        nursery, tiny_model, log, "--max-total-tokens", str(MEMORY), "--enable-cache-report"
    ) as started:
        yield started


def manager(context: int, refused_from: int, *, truncates: bool = False) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(context_len=context),
        max_req_input_len=refused_from,
        tokenizer=None,
        allow_auto_truncate=truncates,
    )


def test_the_window_is_the_smaller_of_context_and_memory() -> None:
    assert window_of(262_144, 39_994) == 39_993
    assert window_of(4096, 4090) == 4096, "SGLang keeps a few tokens of each context free"


def test_a_prompt_that_the_schedulers_would_refuse_names_the_window() -> None:
    check_length(manager(39_993, 39_994), None, [0] * 39_993)
    check_length(manager(39_993, 39_994), None, None)
    check_length(manager(39_993, 39_994, truncates=True), None, [0] * 50_000)
    with pytest.raises(ValueError, match=r"length is 39993 tokens.* in 39994 tokens"):
        check_length(manager(39_993, 39_994), None, [0] * 39_994)
    with pytest.raises(ValueError, match=r"length is 4096 tokens.* in 5000 tokens"):
        check_length(manager(4096, 4090), None, [0] * 5000)
    with pytest.raises(ValueError, match=r"length is 4089 tokens.* in 4092 tokens"):
        check_length(manager(4096, 4090), None, [0] * 4092)


def test_the_operator_is_told_once_with_the_flag(caplog: pytest.LogCaptureFixture) -> None:
    announce(manager(4096, 4090))
    assert not caplog.records
    announce(manager(262_144, 39_994))
    said = caplog.messages[0]
    assert said.startswith("sgl-ext: KV memory holds 40000 tokens, less than one context of 262144")
    assert said.endswith("set --context-length 40000")


def test_every_list_of_models_tells_the_window(engine: Engine, log: Path) -> None:
    card = requests.get(f"{engine.url}/v1/models", timeout=30).json()["data"][0]
    for name in ("max_model_len", "context_length", "context_window", "max_input_tokens"):
        assert card[name] == WINDOW
    assert card["meta"]["n_ctx_train"] == WINDOW
    url = f"{engine.url}/v1/models/{card['id']}"
    shown = requests.get(url, headers=ANTHROPIC, timeout=30).json()
    assert (shown["max_input_tokens"], shown["max_tokens"]) == (WINDOW, WINDOW)
    counted = requests.post(
        f"{engine.url}/tokenize", json={"model": card["id"], "prompt": "a"}, timeout=30
    )
    assert counted.json()["max_model_len"] == WINDOW
    ollama = requests.post(f"{engine.url}/api/show", json={"model": card["id"]}, timeout=30)
    assert f"num_ctx {WINDOW}" in ollama.json()["parameters"]
    assert "--context-length 3000" in log.read_text()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/completions"])
def test_a_longer_prompt_is_refused_in_the_vendor_s_words(
    engine: Engine, path: str, stream: bool
) -> None:
    prompt = {"prompt": LONG} if path == "/v1/completions" else {"messages": TURN}
    body = {"model": "tiny", "max_tokens": 4, "stream": stream, **prompt}
    answer = requests.post(engine.url + path, json=body, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    if path == "/v1/messages":
        assert error["message"].startswith("prompt is too long: ")
        assert error["message"].endswith(f" tokens > {WINDOW} maximum")
    else:
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith(f"This model's maximum context length is {WINDOW} ")


def test_responses_say_so_in_an_error_and_in_an_event(engine: Engine) -> None:
    model = requests.get(f"{engine.url}/v1/models", timeout=30).json()["data"][0]["id"]
    body = {"model": model, "input": LONG, "store": False}
    whole = requests.post(f"{engine.url}/v1/responses", json=body, timeout=60)
    assert (whole.status_code, whole.json()["error"]["code"]) == (400, "context_length_exceeded")
    stream = requests.post(f"{engine.url}/v1/responses", json={**body, "stream": True}, timeout=60)
    last = stream.text.rpartition("event: response.failed\ndata: ")[2].partition("\n")[0]
    error = orjson.loads(last)["response"]["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(f"This model's maximum context length is {WINDOW} tokens.")


def test_ollamas_paths_say_so_too(engine: Engine) -> None:
    body = {"model": "tiny", "messages": TURN, "stream": False}
    refused = requests.post(f"{engine.url}/api/chat", json=body, timeout=60)
    assert refused.status_code == 400
    assert f"maximum context length is {WINDOW} tokens" in refused.json()["error"]["message"]


def test_the_longest_prompt_is_answered(engine: Engine) -> None:
    body: dict[str, Any] = {"input_ids": [5] * WINDOW, "sampling_params": {"max_new_tokens": 2}}
    engine.post("/generate", body)
    body["input_ids"].append(5)
    refused = requests.post(f"{engine.url}/generate", json=body, timeout=60)
    assert refused.status_code == 400
    assert f"maximum context length is {WINDOW} tokens" in refused.text
