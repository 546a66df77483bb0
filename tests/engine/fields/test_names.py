"""An error names a field as its client does.

Values of the vendors' ranges in SGLang's words.
"""

from __future__ import annotations

from typing import Any

import pytest

from sgl_ext.engine.fields.names import in_sglangs_words, is_native, name_of, taken_variable
from sgl_ext.engine.fields.ranges import Model, wrong_sampling

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.mark.parametrize(
    ("field", "path", "body", "of_sampling", "name"),
    [
        ("top_k", "/generate", {}, True, "sampling_params.top_k"),
        ("input_ids", "/generate", {}, False, "input_ids"),
        ("top_k", "/vertex_generate", {}, True, "parameters.sampling_params.top_k"),
        ("top_logprobs_num", CHAT, {"top_logprobs": 5}, False, "top_logprobs"),
        ("top_logprobs_num", "/v1/completions", {"logprobs": 5}, False, "logprobs"),
        ("max_new_tokens", CHAT, {"max_tokens": 5}, True, "max_tokens"),
        ("max_new_tokens", CHAT, {"max_completion_tokens": 5}, True, "max_completion_tokens"),
        ("max_new_tokens", MESSAGES, {"max_tokens": 5}, True, "max_tokens"),
        ("max_new_tokens", RESPONSES, {}, True, "max_output_tokens"),
        ("max_new_tokens", "/api/generate", {}, True, "options.num_predict"),
        ("stop", MESSAGES, {"stop_sequences": ["a"]}, True, "stop_sequences"),
        ("stop", CHAT, {"stop": "a"}, True, "stop"),
        ("min_new_tokens", CHAT, {}, True, "min_tokens"),
        ("sampling_seed", "/v1/completions", {}, True, "seed"),
        ("json_schema", CHAT, {"response_format": {}}, True, "response_format"),
        ("json_schema", RESPONSES, {"text": {"format": {}}}, True, "text.format"),
        ("structural_tag", MESSAGES, {"tools": [{}]}, True, "tools"),
        ("input_ids", "/v1/completions", {"prompt": [1]}, False, "prompt"),
        ("input_ids", CHAT, {"messages": []}, False, "messages"),
        ("input_ids", RESPONSES, {"input": "a"}, False, "input"),
        ("input_ids", "/v1/embeddings", {"input": [1]}, False, "input"),
    ],
)
def test_a_field_has_its_clients_name(
    field: str, path: str, body: dict[str, Any], of_sampling: bool, name: str
) -> None:
    assert name_of(field, path, body, of_sampling=of_sampling) == name


def test_native_paths_are_those_with_sglangs_own_fields() -> None:
    assert is_native("/generate")
    assert is_native("/encode")
    assert not is_native("/v1/embeddings")
    assert not is_native(CHAT)


def test_variables_of_a_template_are_the_clients_but_for_those_of_the_call() -> None:
    assert taken_variable({"enable_thinking": False, "documents": []}) is None
    assert taken_variable({"enable_thinking": False, "messages": []}) == "messages"


@pytest.mark.parametrize(
    ("params", "body", "expected"),
    [
        ({"top_k": 0}, {}, {"top_k": -1}),
        ({"top_p": 0}, {}, {"top_p": 1e-30}),
        ({"top_p": 0.0, "top_k": 0}, None, {"top_p": 1e-30, "top_k": -1}),
        ({"max_new_tokens": -1}, {}, {"max_new_tokens": None}),
        ({"max_new_tokens": 1}, {"max_tokens": 0}, {"max_new_tokens": 0}),
    ],
)
def test_a_value_that_sglang_writes_differently_is_in_its_range(
    params: dict[str, Any], body: Any, expected: dict[str, Any]
) -> None:
    found = dict(in_sglangs_words(params, body))
    assert found == expected
    assert wrong_sampling(found, Model(100, 100)) is None


@pytest.mark.parametrize("params", [{"top_k": False}, {"top_k": 5, "top_p": 0.5}, {"top_k": "0"}])
def test_other_values_stay(params: dict[str, Any]) -> None:
    assert dict(in_sglangs_words(params, {"max_tokens": 5})) == {}
