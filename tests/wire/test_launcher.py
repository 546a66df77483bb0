"""What a launcher answers its balancer."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.wire.launcher import EngineRow, engines_document, engines_in

texts = st.text(max_size=9)
rows: Any = st.fixed_dictionaries(
    {
        "name": texts,
        "url": texts,
        "state": st.sampled_from(["ready", "starting", "draining", "ended"]),
        "stage": texts,
        "progress": st.none() | st.floats(0, 1),
        "restarts": st.integers(0, 99),
    }
)


@given(st.lists(rows, max_size=3))
def test_the_engines_arrive(stated: list[EngineRow]) -> None:
    assert engines_in(json.loads(json.dumps(engines_document(stated)))) == stated


@pytest.mark.parametrize("wrong", [None, [], {}, {"children": None}, {"children": [{"name": "a"}]}])
def test_other_answers_are_errors(wrong: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        engines_in(wrong)
