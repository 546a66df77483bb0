"""Texts of SGLang's for what is too long, as its own code writes them, in the vendors' words.

The window that clients are told is what the engine takes, and a longer prompt is refused in the
vendors' words: a real engine whose KV memory holds less than one context, without a balancer.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import requests
from sgl_ext_cpu.nursery import Nursery

from sgl_ext.compat.errors import EngineError
from sgl_ext.compat.window import TooLong, announce, check_length, too_long, window_of
from tests.engine.scheduler.test_event_publisher import Engine, running_engine
from tests.waiting import HANG_S

SCHEDULERS = (
    "Input length (700 tokens) exceeds the maximum allowed length (700 tokens). "
    "Use a shorter input or enable --allow-auto-truncate."
)
EXPANDED = (
    "Multimodal prompt is too long after expanding multimodal tokens. "
    "After expanding len(req.origin_input_ids_unpadded)=30 => 800 >= 700."
)


def test_the_scheduler_s_limit_is_told_as_the_longest_prompt_that_it_takes() -> None:
    found = too_long(SCHEDULERS)
    assert found == TooLong(700, 699)
    assert found.anthropic == "prompt is too long: 700 tokens > 699 maximum"
    assert found.openai == (
        "This model's maximum context length is 699 tokens. However, your messages resulted in "
        "700 tokens. Please reduce the length of the messages."
    )
    assert too_long(found.openai) == found, "ours are read again"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (EXPANDED, TooLong(800, 699)),
        ("Dots note omni expanded prompt is too long: 800 > 700", TooLong(800, 700)),
        ("Request a1 exceeds the maximum number of tokens: 800 > 700", TooLong(800, 700)),
        (
            "the prompt has 800 tokens, which does not fit the context length of 700 tokens",
            TooLong(800, 700),
        ),
    ],
)
def test_other_checks_of_sglang_are_read(message: str, expected: TooLong) -> None:
    assert too_long(message) == expected


@pytest.mark.parametrize(
    "message",
    [
        "Request prompt exceeds the KV memory budget: input_len=800.",
        "Request a1 exceeds the unified FULL/SWA KV byte budget: full=800, swa=90",
        "Beam search needs at least 1 generated token within the context budget "
        "(prompt_len=800, max_req_len=700).",
    ],
)
def test_a_text_without_a_limit_begins_with_the_words_that_clients_look_for(message: str) -> None:
    found = too_long(message)
    assert found is not None
    assert found.anthropic.startswith("prompt is too long: ")
    assert "maximum context length" in found.openai
    assert EngineError(400, message).code == "context_length_exceeded"


def test_another_error_is_not_one_of_length() -> None:
    for message in ("n must be positive", "messages: the list is too long", ""):
        assert too_long(message) is None


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("managers/utils.py", "the maximum allowed length ("),
        ("managers/tokenizer_manager.py", "model's context length ("),
        ("managers/tokenizer_manager.py", "exceeds the model's maximum context length "),
        ("managers/scheduler.py", "too long after expanding multimodal tokens. "),
        ("managers/scheduler.py", "exceeds the KV memory budget: input_len="),
        ("beam_search/coordinator.py", "Beam search needs at least 1 generated token"),
        ("disaggregation/prefill.py", "exceeds the maximum number of tokens: "),
        ("disaggregation/decode.py", "exceeds the unified FULL/SWA KV byte "),
        ("entrypoints/openai/serving_decisions.py", "the context length of {context_len}"),
        ("multimodal/processors/dots_note_omni.py", "expanded prompt is too long: "),
    ],
)
def test_sglang_still_has_each_of_these_texts(file: str, text: str) -> None:
    found = find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    assert text in (Path(found.origin).parent / "srt" / file).read_text()


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
    card = requests.get(f"{engine.url}/v1/models", timeout=HANG_S).json()["data"][0]
    for name in ("max_model_len", "context_length", "context_window", "max_input_tokens"):
        assert card[name] == WINDOW
    assert card["meta"]["n_ctx_train"] == WINDOW
    url = f"{engine.url}/v1/models/{card['id']}"
    shown = requests.get(url, headers=ANTHROPIC, timeout=HANG_S).json()
    assert (shown["max_input_tokens"], shown["max_tokens"]) == (WINDOW, WINDOW)
    counted = requests.post(
        f"{engine.url}/tokenize", json={"model": card["id"], "prompt": "a"}, timeout=HANG_S
    )
    assert counted.json()["max_model_len"] == WINDOW
    ollama = requests.post(f"{engine.url}/api/show", json={"model": card["id"]}, timeout=HANG_S)
    assert f"num_ctx {WINDOW}" in ollama.json()["parameters"]
    assert "--context-length 3000" in log.read_text()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/completions"])
def test_a_longer_prompt_is_refused_in_the_vendor_s_words(
    engine: Engine, path: str, stream: bool
) -> None:
    prompt = {"prompt": LONG} if path == "/v1/completions" else {"messages": TURN}
    body = {"model": "tiny", "max_tokens": 4, "stream": stream, **prompt}
    answer = requests.post(engine.url + path, json=body, timeout=HANG_S)
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
    model = requests.get(f"{engine.url}/v1/models", timeout=HANG_S).json()["data"][0]["id"]
    body = {"model": model, "input": LONG, "store": False}
    whole = requests.post(f"{engine.url}/v1/responses", json=body, timeout=HANG_S)
    assert (whole.status_code, whole.json()["error"]["code"]) == (400, "context_length_exceeded")
    stream = requests.post(
        f"{engine.url}/v1/responses", json={**body, "stream": True}, timeout=HANG_S
    )
    last = stream.text.rpartition("event: response.failed\ndata: ")[2].partition("\n")[0]
    error = orjson.loads(last)["response"]["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(f"This model's maximum context length is {WINDOW} tokens.")


def test_ollamas_paths_say_so_too(engine: Engine) -> None:
    body = {"model": "tiny", "messages": TURN, "stream": False}
    refused = requests.post(f"{engine.url}/api/chat", json=body, timeout=HANG_S)
    assert refused.status_code == 400
    assert f"maximum context length is {WINDOW} tokens" in refused.json()["error"]["message"]


def test_the_longest_prompt_is_answered(engine: Engine) -> None:
    body: dict[str, Any] = {"input_ids": [5] * WINDOW, "sampling_params": {"max_new_tokens": 2}}
    engine.post("/generate", body)
    body["input_ids"].append(5)
    refused = requests.post(f"{engine.url}/generate", json=body, timeout=HANG_S)
    assert refused.status_code == 400
    assert f"maximum context length is {WINDOW} tokens" in refused.text
