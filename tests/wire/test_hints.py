"""What an engine's HTTP process sends its scheduler with a request."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.prefill import Rejection
from sgl_ext.wire.hints import Hints, hints_in, payload_of, read_rejection, rejection_message

texts, seconds = st.text(max_size=9), st.floats(0, 1e6)
hints = st.builds(
    Hints,
    st.lists(st.integers(0, 2**128 - 1), max_size=5).map(tuple),
    st.lists(st.integers(0, 2**40), max_size=5),
    st.lists(st.tuples(st.integers(-1, 2**40), seconds), max_size=3).map(tuple),
    texts,
    texts,
    seconds,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.none() | st.integers(0, 2**31),
    st.integers(-1000, 1000),
    seconds,
    st.booleans(),
    texts,
    seconds,
    due_s=st.none() | seconds,
)


@given(hints)
def test_what_is_sent_arrives(stated: Hints) -> None:
    """Whatever SGLang makes of the payload on its way, it can hold no more than JSON does."""
    assert hints_in(orjson.loads(orjson.dumps(payload_of(stated)))) == stated
    assert hints_in(payload_of(stated)) == stated


def test_a_payload_of_another_form_is_an_error() -> None:
    stated = Hints((1, 2), (5, 9), (), "", "", 0.0, True, False, True)
    payload = payload_of(stated)
    with pytest.raises(ValueError, match="cut"):
        hints_in(payload | {"hashes": payload["hashes"][:-2]})
    with pytest.raises(TypeError):
        hints_in({"hashes": ""})
    with pytest.raises(TypeError):
        hints_in(payload | {"later": 1})


@given(st.sampled_from(Rejection), st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_rejection_arrives(why: Rejection, on_device: int, on_host: int) -> None:
    assert read_rejection(rejection_message(why, on_device, on_host)) == (why, on_device, on_host)


@pytest.mark.parametrize("other", ["", "Aborted", "client left", "a b c", "busy 1"])
def test_the_message_of_another_abort_is_none(other: str) -> None:
    assert read_rejection(other) is None
