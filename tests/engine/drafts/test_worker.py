"""Drafts in a real engine: answers are those of an engine without them, and drafts are used."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sgl_ext_cpu.nursery import Nursery

from sgl_ext.settings.schema import EngineSettings
from tests.engine.scheduler.test_event_publisher import POOL
from tests.engine.scheduler.test_priority import Serving, serving, sound

FEW = {str(token): 60.0 for token in (1_000, 1_100, 1_200)}
"""A bias after which answers have three words, so that drafts are often right, and often wrong."""


@pytest.fixture(scope="module")
def engines(
    nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Serving]]:
    def settings(scope: Any) -> EngineSettings:
        return EngineSettings(draft_from_context=scope)

    # With overlap scheduling penalties count a token later, and drafts turn it off on a CPU.
    alike = "--disable-overlap-schedule"
    folders = (tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("drafts"))
    with (
        serving(nursery, tiny_model, folders[0], settings("off"), alike) as plain,
        serving(nursery, tiny_model, folders[1], settings("session")) as drafts,
    ):
        yield {"plain": plain, "drafts": drafts}


@pytest.fixture(autouse=True)
def stay_sound(engines: dict[str, Serving]) -> Iterator[None]:
    yield
    for engine in engines.values():
        list(sound(engine))


def prompts(number: int, tokens: int = 60, seed: int = 1) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(300, 4_000) for _ in range(tokens)] * 2 for _ in range(number)]


def answers(engine: Serving, asked: list[list[int]], at_once: int, **options: Any) -> list[Any]:
    sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    sampling |= options.pop("sampling", {})

    def ask(ids: list[int]) -> Any:
        body = {"input_ids": ids, "sampling_params": sampling, **options}
        answer = engine.post("/generate", body)
        assert answer.ok, answer.text
        return answer.json()

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, asked))


def ids(found: list[Any]) -> list[list[int]]:
    return [one["output_ids"] for one in found]


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": {"logit_bias": FEW}},
        {"sampling": {"logit_bias": FEW, "max_new_tokens": 1}},
        {"sampling": {"logit_bias": FEW, "repetition_penalty": 1.3}},
        {"sampling": {"logit_bias": FEW, "frequency_penalty": 0.5, "presence_penalty": 0.2}},
        {"sampling": {"regex": "(one two |one three )+"}},
        {"sampling": {}},
    ],
    ids=["few words", "one token", "repetition", "frequency", "grammar", "plain"],
)
@pytest.mark.parametrize("at_once", [1, 6])
def test_answers_are_those_without_drafts(
    engines: dict[str, Serving], options: dict[str, Any], at_once: int
) -> None:
    asked = prompts(12)
    found = {name: ids(answers(one, asked, at_once, **options)) for name, one in engines.items()}
    assert found["drafts"] == found["plain"]


def test_drafts_are_sent_and_right(engines: dict[str, Serving]) -> None:
    before = engines["drafts"].counted("sgl_ext_accepted_drafts_total")
    answers(engines["drafts"], prompts(24), 1, sampling={"logit_bias": FEW})
    assert engines["drafts"].counted("sgl_ext_accepted_drafts_total") > before


def test_a_request_that_wants_no_drafts_has_none(engines: dict[str, Serving]) -> None:
    engine = engines["drafts"]
    nvext = {"agent_hints": {"draft_from_context": False}}
    options: dict[str, Any] = {"sampling": {"logit_bias": FEW}, "nvext": nvext}
    answers(engine, prompts(4), 1, **options)  # what was counted before is shown with these
    before = engine.counted("sgl_ext_drafted_tokens_total")
    answers(engine, prompts(8), 1, sampling={"logit_bias": FEW}, nvext=nvext)
    assert engine.counted("sgl_ext_drafted_tokens_total") == before


def test_answers_are_the_same_when_memory_runs_out(engines: dict[str, Serving]) -> None:
    asked = prompts(10, POOL // 12, seed=3)
    options = {"sampling": {"logit_bias": FEW, "max_new_tokens": 150}}
    found = {name: ids(answers(one, asked, 10, **options)) for name, one in engines.items()}
    assert found["drafts"] == found["plain"]


def test_pinned_prompts_stay_cached_and_are_answered_alike(engines: dict[str, Serving]) -> None:
    asked = prompts(4, POOL // 40, seed=5)
    nvext = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    options = {"sampling": {"logit_bias": FEW}, "nvext": nvext}
    found = {name: ids(answers(one, asked, 4, **options)) for name, one in engines.items()}
    assert found["drafts"] == found["plain"]
    engine = engines["drafts"]
    answers(engine, prompts(14, POOL // 20, seed=6), 2, sampling={"max_new_tokens": 8})
    again = answers(engine, asked, 4, sampling={"logit_bias": FEW})
    assert ids(again) == found["plain"]
    assert [one["meta_info"]["cached_tokens"] for one in again] == [len(asked[0]) - 1] * 4


def test_a_prompt_that_was_prefilled_ahead_is_cached_and_answered_alike(
    engines: dict[str, Serving],
) -> None:
    said = " ".join(f"{number} is a number" for number in range(150))
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": f"{said} {said}"}],
        "temperature": 0,
        "max_tokens": 60,
        "logit_bias": FEW,
    }
    prefilled = engines["drafts"].post("/v1/prefill", body)
    assert prefilled.ok, prefilled.text
    found = {}
    for name, engine in engines.items():
        found[name] = engine.post("/v1/chat/completions", body).json()
    texts = [one["choices"][0]["message"]["content"] for one in found.values()]
    assert texts[0] == texts[1]
    usage = found["drafts"]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] - 16


def test_log_probabilities_are_those_without_drafts(engines: dict[str, Serving]) -> None:
    options = {"return_logprob": True, "top_logprobs_num": 2, "sampling": {"logit_bias": FEW}}
    plain, drafts = (answers(engines[name], prompts(6), 1, **options) for name in engines)
    for one, other in zip(plain, drafts, strict=True):
        for field in ("output_token_logprobs", "output_top_logprobs"):
            shown, expected = other["meta_info"][field], one["meta_info"][field]
            assert flat(shown) == pytest.approx(flat(expected), abs=1e-3)


def flat(values: Any) -> list[float]:
    if isinstance(values, list | tuple):
        return [number for value in values for number in flat(value)]
    return [] if values is None else [float(values)]
