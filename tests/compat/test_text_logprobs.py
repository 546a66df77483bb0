"""Texts of an answer have the log probabilities of their own tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st
from sgl_ext_cpu.nursery import Nursery

from sgl_ext.compat.text_logprobs import Token, Tokens
from tests.engine.scheduler.test_event_publisher import Engine, running_engine
from tests.waiting import HANG_S

INCLUDE = "message.output_text.logprobs"


def tokens(*texts: str) -> Tokens:
    made = Tokens()
    made.add([Token(text, float(-at)) for at, text in enumerate(texts)])
    return made


def found(made: Tokens, *texts: str) -> list[list[str]]:
    return [[token.text for token in made.of(text)] for text in texts]


def test_thinking_and_markup_pass_between_the_texts() -> None:
    made = tokens("<think>", "Hi", " t", "</think>", "\n\n", "It", " is", " t", ".")
    assert found(made, "Hi t", "It is", " t.") == [["Hi", " t"], ["It", " is"], [" t", "."]]


def test_a_text_begins_with_a_token_rather_than_within_markup() -> None:
    assert found(tokens("a", "</think>", "think"), "a", "think") == [["a"], ["think"]]


def test_a_text_that_begins_within_a_token_has_it() -> None:
    assert found(tokens("</t>", "\n\nIt", " is"), "It is") == [["\n\nIt", " is"]]


def test_no_token_is_given_twice() -> None:
    assert found(tokens("ab", "c"), "a", "b", "c") == [["ab"], [], ["c"]]


def test_half_a_character_is_no_fault() -> None:
    made = tokens("a", "\ufffd", "\ufffd", "b", "c")
    assert found(made, "a", "\U0001f600", "bc") == [["a"], ["\ufffd", "\ufffd"], ["b", "c"]]


@given(st.lists(st.text("ab \n", min_size=1, max_size=4), max_size=30), st.data())
def test_the_deltas_of_a_text_have_its_tokens(texts: list[str], data: st.DataObject) -> None:
    made, whole, at, got = tokens(*texts), "".join(texts), 0, list[str]()
    while at < len(whole):
        size = data.draw(st.integers(1, 6))
        got += [token.text for token in made.of(whole[at : at + size])]
        at += size
    assert got == texts


@pytest.fixture(scope="module")
def engine(
    nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("logprobs")
    flags = ("--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3")
    with running_engine(nursery, tiny_model, folder / "engine.log", *flags) as started:
        yield started


def body(**fields: Any) -> dict[str, Any]:
    """The answer is JSON, after some thinking."""
    schema = {"type": "object", "properties": {"a": {"enum": ["one two"]}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    made: dict[str, Any] = {"model": "tiny", "input": "Say hello.", "store": False}
    made |= {"include": [INCLUDE], "text": {"format": form}, "max_output_tokens": 60}
    return {**made, "reasoning": {"effort": "none"}, "temperature": 0, **fields}


def text_of(parts: list[dict[str, Any]]) -> str:
    return "".join(each["token"] for each in parts)


def test_a_whole_answer_has_those_of_its_text(engine: Engine) -> None:
    answer = engine.post("/v1/responses", body(top_logprobs=2))
    (part,) = next(each for each in answer["output"] if each["type"] == "message")["content"]
    assert text_of(part["logprobs"]).strip() == part["text"].strip()
    assert all(len(each["top_logprobs"]) == 2 for each in part["logprobs"])


def test_a_stream_has_them_in_its_deltas_and_at_the_end(engine: Engine) -> None:
    whole = engine.post("/v1/responses", body(top_logprobs=2))
    sent = body(top_logprobs=2, stream=True)
    answer = requests.post(f"{engine.url}/v1/responses", json=sent, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    assert all(each["logprobs"] for each in deltas)
    given_first = [one for each in deltas for one in each["logprobs"]]
    done = next(each for each in events if each["type"] == "response.output_text.done")
    assert done["logprobs"] == given_first
    message = next(e for e in events[-1]["response"]["output"] if e["type"] == "message")
    expected = next(e for e in whole["output"] if e["type"] == "message")
    given, wanted = message["content"][0], expected["content"][0]
    assert given["text"] == wanted["text"]
    assert [each["token"] for each in given["logprobs"]] == [
        each["token"] for each in wanted["logprobs"]
    ]
    assert {frozenset(each) for each in given["logprobs"]} == {
        frozenset({"token", "logprob", "bytes", "top_logprobs"})
    }


def test_a_stream_without_the_wish_has_none(engine: Engine) -> None:
    sent = body(stream=True, include=[])
    answer = requests.post(f"{engine.url}/v1/responses", json=sent, timeout=HANG_S)
    assert '"logprob":' not in answer.text
