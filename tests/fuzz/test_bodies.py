"""The balancer decides by no other values than those that an engine computes with."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_ext.engine.http.extension import HttpExtension, install, installed
from sgl_ext.reading.field_types import FIELDS, STREAM_OPTIONS, as_integer, find_wrong_field
from sgl_ext.settings.schema import EngineSettings
from tests.fuzz.bodies import run

CASES = 20_000
_ALWAYS = 5_000
_VALUES: list[Any] = [
    *(None, True, False, 0, 1, 5, -1, 5.0, 0.0, 1e30, 2**63, "", "m", "5", "true", "off", "no"),
    *([], [5], {}, {"a": 1}),
]


@pytest.fixture(autouse=True)
def _extension() -> Any:
    before = installed()
    install(HttpExtension(EngineSettings()))
    yield
    install(before)


def test_both_read_the_same_in_what_neither_refuses() -> None:
    assert run(0, _ALWAYS)["read"] > _ALWAYS / 4


@pytest.mark.long
@pytest.mark.slow
def test_both_read_the_same_in_many_more() -> None:
    run(_ALWAYS, CASES - _ALWAYS)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning")
def test_a_field_that_decides_has_the_value_that_sglang_s_models_take() -> None:
    from pydantic import ValidationError
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.openai import protocol as openai

    message = {"role": "user", "content": "a"}
    rest: list[tuple[Any, dict[str, Any]]] = [
        (AnthropicMessagesRequest, {"model": "m", "max_tokens": 5, "messages": [message]}),
        (openai.ChatCompletionRequest, {"model": "m", "messages": [message]}),
        (openai.CompletionRequest, {"model": "m", "prompt": "a"}),
        (openai.ResponsesRequest, {"model": "m", "input": "a"}),
    ]
    taken = 0
    for model, body in rest:
        for field in FIELDS:
            for value in _VALUES:
                if find_wrong_field({field: value}) is not None or value is None:
                    continue
                try:
                    read = getattr(model(**{**body, field: value}), field, value)
                except ValidationError:
                    continue
                if field not in model.model_fields:  # nothing is computed with it
                    read = as_integer(read)
                meant = as_integer(value)
                assert (type(read), read) == (type(meant), meant), (model, field)
                taken += 1
    assert taken > 40
    for value in _VALUES:
        if find_wrong_field({"stream_options": {"include_usage": value}}) is None:
            options = {"include_usage": value}
            request = openai.ChatCompletionRequest(
                model="m", messages=[message], stream_options=options
            )
            assert value is None or request.stream_options.include_usage is value
    assert set(STREAM_OPTIONS) == {"include_usage"}
