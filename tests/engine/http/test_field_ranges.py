"""No request ends or freezes an engine: real requests to a real engine, without a balancer."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import requests

from tests.engine.scheduler.test_event_publisher import Engine
from tests.fuzz.ranges import MESSAGES, case
from tests.sglang_versions import needs_newest
from tests.waiting import HANG_S

GENERATE, CHAT, COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"
MESSAGES_PATH, RESPONSES = "/v1/messages", "/v1/responses"
TOO_MANY = {"enum": [f"value {i}" for i in range(20_000)]}
BRANCHES = {"anyOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(3_000)]}
AT_ONCE = 8


@pytest.fixture(scope="module")
def vocab_size(tiny_model: Path) -> int:
    return int(json.loads((tiny_model / "config.json").read_text())["vocab_size"])


def native(**params: Any) -> tuple[str, dict[str, Any]]:
    return GENERATE, {"text": "hi there", "sampling_params": {"max_new_tokens": 2, **params}}


def logprobs(**fields: Any) -> tuple[str, dict[str, Any]]:
    path, body = native()
    return path, {**body, "return_logprob": True, **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, **fields}


def schema(value: Any) -> tuple[str, dict[str, Any]]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}
    return chat(response_format=form)


OUT_OF_RANGE: dict[str, tuple[tuple[str, dict[str, Any]], str]] = {
    "top_logprobs of chat": (chat(logprobs=True, top_logprobs=10**9), "top_logprobs"),
    "logprobs of completions": (
        (COMPLETIONS, {"model": "tiny", "prompt": "hi", "max_tokens": 2, "logprobs": 10**9}),
        "logprobs",
    ),
    "top_logprobs of responses": (
        (
            RESPONSES,
            {
                "model": "tiny",
                "input": "hi",
                "top_logprobs": 10**9,
                "include": ["message.output_text.logprobs"],
            },
        ),
        "top_logprobs",
    ),
    "top_k of messages": (
        (MESSAGES_PATH, {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "top_k": 10**18}),
        "top_k",
    ),
    "stop_sequences": (
        (
            MESSAGES_PATH,
            {
                "model": "tiny",
                "messages": MESSAGES,
                "max_tokens": 2,
                "stop_sequences": ["x" * 9999],
            },
        ),
        "stop_sequences",
    ),
    "top_logprobs_num": (logprobs(top_logprobs_num=10**9), "top_logprobs_num"),
    "logprob_start_len": (logprobs(logprob_start_len=-9), "logprob_start_len"),
    "token_ids_logprob": (logprobs(token_ids_logprob=[-1]), "token_ids_logprob"),
    "log probabilities": (
        logprobs(text="a b c d e " * 400, logprob_start_len=0, top_logprobs_num=900),
        "top_logprobs_num",
    ),
    "top_k": (native(temperature=1, top_k=10**18), "sampling_params.top_k"),
    "stop_token_ids": (native(min_new_tokens=1, stop_token_ids=[-1]), "stop_token_ids"),
    "stop of 1 MB": (native(stop="x" * (1 << 20)), "sampling_params.stop"),
    "stop_regex that RE2 does not take": (native(stop_regex="(?=a)b"), "stop_regex"),
    "regex of 1 MB": (native(regex="abcdefgh" * 131_072), "sampling_params.regex"),
    "enum": (schema(TOO_MANY), "response_format"),
    "anyOf": (schema(BRANCHES), "response_format"),
    "a field of nobody": (native(nothing=1), "sampling_params.nothing"),
    "an internal field": (native(is_normalized=True), "sampling_params.is_normalized"),
    "deep custom_params": (native(custom_params={"a": {"b": {}}}), "custom_params"),
    "a bias beyond 32 bits": (native(logit_bias={"5": 1e300}), "logit_bias"),
    "an adapter's id": ((GENERATE, {**native()[1], "lora_id": "x"}), "lora_id"),
    "another process": ((GENERATE, {**native()[1], "http_worker_ipc": "ipc:///x"}), "http_worker"),
    "a position": ((GENERATE, {**native()[1], "token_indices_to_pool": [10**9]}), "token_indices"),
    "prompts": ((GENERATE, {**native()[1], "text": ["a"] * 129}), "text"),
    "an empty prompt": ((GENERATE, {**native()[1], "text": [""]}), "text"),
    "an empty prompt with a picture": (
        (GENERATE, {**native()[1], "text": "", "image_data": "a"}),
        "text",
    ),
    "an empty prompt of no session": (
        (GENERATE, {**native()[1], "text": "", "session_params": {"rid": "r"}}),
        "text",
    ),
    "a session's history replaced whole": (
        (GENERATE, {**native()[1], "session_params": {"id": "s", "replace": True}}),
        "session_params",
    ),
    "top_k of Ollama": (
        ("/api/generate", {"model": "tiny", "prompt": "hi", "options": {"top_k": 10**18}}),
        "options.top_k",
    ),
    "items": (
        (
            "/v1/score",
            {"model": "tiny", "query": "hi", "items": ["a"] * 2049, "label_token_ids": [1]},
        ),
        "items",
    ),
    "uneven lists": (
        (GENERATE, {**native()[1], "text": ["a", "b"], "top_logprobs_num": [1]}),
        "top_logprobs_num",
    ),
    "samples": (chat(n=10**9), "n"),
    "variables of the template's call": (
        chat(chat_template_kwargs={"messages": []}),
        "chat_template_kwargs.messages",
    ),
}


def refused(engine: Engine, path: str, body: dict[str, Any], field: str) -> None:
    """The request is answered 400 in its protocol's shape, and the engine answers the next."""
    answer = requests.post(engine.url + path, json=body, timeout=HANG_S)
    assert answer.status_code == 400, answer.text[-300:]
    error = answer.json()["error"]
    if isinstance(error, str):  # of SGLang's own check of native sampling parameters
        error = {"message": f"{error}:"}
    assert field.rpartition(".")[2] in error["message"].partition(":")[0]
    if path.startswith("/v1/"):
        assert field in error.get("param", field)
        assert error["type"] == "invalid_request_error"
    goes_on(engine)


def goes_on(engine: Engine) -> None:
    assert engine.server.running()
    assert engine.ask("still here")[0]


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_what_is_out_of_range_is_refused_by_the_clients_name_of_it(
    engine: Engine, name: str
) -> None:
    (path, body), field = OUT_OF_RANGE[name]
    refused(engine, path, body, field)


@pytest.mark.parametrize("name", ["top_logprobs of chat", "top_k", "top_k of messages"])
def test_a_stream_is_refused_before_it_begins(engine: Engine, name: str) -> None:
    (path, body), field = OUT_OF_RANGE[name]
    refused(engine, path, {**body, "stream": True}, field)


@pytest.mark.parametrize("beyond", ["size", "below", "64 bits"])
@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
def test_token_ids_outside_of_the_vocabulary_are_refused(
    engine: Engine, vocab_size: int, path: str, beyond: str
) -> None:
    ids = [1, {"size": vocab_size, "below": -1, "64 bits": 2**63 - 1}[beyond]]
    if path == GENERATE:
        refused(engine, path, {"input_ids": ids, "sampling_params": {}}, "input_ids")
    else:
        refused(engine, path, {"model": "tiny", "prompt": ids, "max_tokens": 2}, "prompt")


def test_the_edges_of_the_ranges_are_answered(engine: Engine, vocab_size: int) -> None:
    bias = {"0": 1e6, str(vocab_size - 1): -1e6}
    params = {"max_new_tokens": 2, "temperature": 1000, "top_k": 1 << 30, "top_p": 1e-30}
    params |= {"repetition_penalty": 1e-6, "min_p": 1, "logit_bias": bias, "min_new_tokens": 1}
    params |= {"stop_token_ids": [0, vocab_size - 1], "sampling_seed": -(2**63)}
    body = {
        "input_ids": [0, vocab_size - 1],
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1000,
        "token_ids_logprob": [0, vocab_size - 1],
    }
    assert engine.post(GENERATE, body)["meta_info"]["completion_tokens"]


def test_a_pattern_that_backtracks_for_minutes_stops_an_answer_as_any_other(
    engine: Engine,
) -> None:
    params = {"max_new_tokens": 200, "ignore_eos": True}
    slow = {**params, "stop_regex": r"(.*)*(.*)*(.*)*\x00"}
    meta = engine.post(GENERATE, {"text": "go on", "sampling_params": slow})["meta_info"]
    assert meta["completion_tokens"] == 200
    stopping = {**params, "stop_regex": ["(?i)[aeiou]"]}
    meta = engine.post(GENERATE, {"text": "go on", "sampling_params": stopping})["meta_info"]
    assert meta["finish_reason"]["type"] == "stop"


def test_a_grammar_in_which_nothing_can_be_written_is_refused_by_name(engine: Engine) -> None:
    nothing = {"ebnf": "root ::= root"}
    for (path, body), said in (
        (native(**nothing), "Failed to compile ebnf grammar: nothing can be written"),
        (chat(**nothing), "ebnf: no grammar can be made of it: nothing can be written"),
    ):
        answer = requests.post(engine.url + path, json=body, timeout=HANG_S)
        assert answer.status_code == 400
        assert said in answer.text
    empty = engine.post(*native(regex="|a"))
    assert empty["meta_info"]["finish_reason"]["type"] in ("stop", "length")
    goes_on(engine)


@needs_newest("such an answer ends without an error")
def test_a_request_that_may_write_no_token_ends_alone(engine: Engine) -> None:
    sampling = {"max_new_tokens": 4, "temperature": 1, "top_p": 0.5, "min_p": 0.1}
    body = {"text": "go on", "sampling_params": {**sampling, "regex": "a", "min_new_tokens": 3}}
    answer = requests.post(engine.url + GENERATE, json=body, timeout=HANG_S)
    assert answer.status_code == 500
    assert "accept_token" in answer.text
    goes_on(engine)


def send(engine: Engine, first: int, count: int, vocab_size: int) -> Counter[int]:
    """Sends cases by number, several at once, and counts the statuses of their answers."""

    def one(number: int) -> int:
        path, body = case(Random(number), vocab_size)
        headers = {"content-type": "application/json"}
        try:
            answer = requests.post(engine.url + path, data=body, headers=headers, timeout=300)
        except requests.RequestException as error:
            raise AssertionError(f"case {number}: {path} {body!r}") from error
        return answer.status_code

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return Counter(pool.map(one, range(first, first + count)))


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(300, marks=pytest.mark.long),
        pytest.param(5_000, marks=pytest.mark.slow),
    ],
)
def test_no_request_of_a_fuzzer_ends_the_engine(
    engine: Engine, vocab_size: int, count: int
) -> None:
    counts = send(engine, 0, count, vocab_size)
    goes_on(engine)
    assert counts[200] > count / 10
    assert counts[400] > count / 10
    assert counts[200] + counts[400] + counts[500] == count
    assert counts[500] <= count / 100  # grammars in which nothing can be written
