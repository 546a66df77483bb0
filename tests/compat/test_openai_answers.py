"""Answers with several choices, and the offsets of their tokens, on a real engine.

What answers of OpenAI's protocols hold.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests

from sgl_ext.compat.openai_answers import Choices
from sgl_ext.engine.core.request_context import RequestContext
from tests.engine.scheduler.test_event_publisher import Engine
from tests.waiting import HANG_S

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def events(engine: Engine, path: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "max_tokens": 4, "stream": True, **fields}
    answer = requests.post(engine.url + path, json=body, timeout=HANG_S)
    assert answer.ok, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 3}),
        (COMPLETIONS, {"prompt": "a b", "n": 2}),
        (COMPLETIONS, {"prompt": ["a b", "c d"], "stream_options": {"include_usage": True}}),
        (COMPLETIONS, {"prompt": [[5, 6], [7]]}),
    ],
)
def test_a_stream_has_one_id(engine: Engine, path: str, fields: dict[str, Any]) -> None:
    found = events(engine, path, **fields)
    assert len({each["id"] for each in found}) == 1
    assert len({choice["index"] for each in found for choice in each["choices"]}) > 1


@pytest.mark.parametrize(("echo", "count"), [(False, 1), (True, 1), (True, 0)])
def test_offsets_are_places_in_the_text(engine: Engine, echo: bool, count: int) -> None:
    # No token ends the answer, or is a part of a character.
    fields = {"prompt": "a word", "logprobs": count, "echo": echo, "n": 2, "regex": "[a-z ]{99}"}
    whole = engine.post(COMPLETIONS, {"model": "tiny", "max_tokens": 4, **fields})
    for choice in whole["choices"]:
        logprobs = choice["logprobs"]
        for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            assert choice["text"][offset:].startswith(token)
    texts: dict[int, str] = {}
    for event in events(engine, COMPLETIONS, **fields):
        for choice in event["choices"]:
            text = texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            logprobs = choice["logprobs"] or {"text_offset": [], "tokens": []}
            for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
                assert text[offset:].startswith(token)


def test_an_answer_without_either_passes_unchanged(engine: Engine) -> None:
    one = engine.post(COMPLETIONS, {"model": "tiny", "max_tokens": 2, "prompt": "a"})
    assert one["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_metadata_holds_texts_only(path: str) -> None:
    """SGLang adds a list of the versions of its weights."""
    choices = Choices.of(RequestContext(path, {}), path)
    assert choices is not None
    metadata = {"weight_version": "default", "weight_versions": [["default", 0, 7]]}
    answer = {"choices": [{"text": '"weight_versions"', "logprobs": None}], "metadata": metadata}
    written = json.loads(choices.whole(json.dumps(answer).encode()))
    assert written == {**answer, "metadata": {"weight_version": "default"}}


def test_metadata_of_a_real_answer_holds_texts_only(engine: Engine) -> None:
    for path, prompt in (
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
        (COMPLETIONS, {"prompt": "a"}),
    ):
        answer = engine.post(path, {"model": "tiny", "max_tokens": 2, **prompt})
        assert all(isinstance(each, str) for each in answer["metadata"].values())
