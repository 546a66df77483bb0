"""Values of the vendors' ranges in SGLang's words."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_ext.engine.fields.names import in_sglangs_words
from sgl_ext.engine.fields.ranges import Model, wrong_sampling


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
