"""Messages between balancer processes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.wire.peers import (
    AdminChanges,
    Left,
    Load,
    Message,
    Placed,
    State,
    encode,
    read_message,
)

texts, counts = st.text(max_size=9), st.integers(0, 2**40)
maybe_text = st.none() | texts
placed = st.builds(
    Placed,
    texts,
    maybe_text,
    st.lists(texts, max_size=3),
    counts,
    counts,
    texts,
    counts,
    maybe_text,
)
changes = st.builds(
    AdminChanges,
    st.floats(0, 1e10),
    st.lists(texts, max_size=2).map(tuple),
    st.lists(texts, max_size=2).map(tuple),
)
states = st.builds(
    State,
    st.dictionaries(texts, st.builds(Load, counts, counts, counts), max_size=3),
    changes,
    st.dictionaries(texts, st.floats(0, 1e6), max_size=3),
    st.booleans(),
)
left = st.builds(Left, texts, counts)


@given(placed | states | left)
def test_what_is_sent_arrives(message: Message) -> None:
    assert read_message(encode(message)) == message


@given(placed | states | left, st.data())
def test_a_message_that_was_cut_is_malformed(message: Message, data: st.DataObject) -> None:
    whole = encode(message)
    with pytest.raises(msgspec.MsgspecError):
        read_message(whole[: data.draw(st.integers(0, len(whole) - 1))])


def test_the_bytes_of_messages() -> None:
    """Balancers of two versions share a store."""
    assert encode(Placed("a", None, ["f"], 7, 3)) == (
        b'{"type":"_Placed","worker":"a","session":null,"segments":["f"],"prompt_tokens":7,'
        b'"uncached_tokens":3,"tenant":"","priority":0,"agent":null}'
    )
    assert encode(State({"a": Load(1, 0, 9)}, AdminChanges())) == (
        b'{"type":"_State","loads":{"a":[1,0,9]},'
        b'"admin":{"changed_s":0.0,"added":[],"removed":[]},"refused":{},"is_trying":false}'
    )


def test_fields_of_a_later_version_are_ignored_and_other_messages_refused() -> None:
    later = b'{"type":"_State","loads":{},"admin":{"later":1},"later":[1]}'
    assert read_message(later) == State({}, AdminChanges())
    for wrong in (
        b"",
        b"{}",
        b"null",
        b'{"type":"later"}',
        b'{"type":"_State","loads":{"a":[1,"x",2]},"admin":{}}',
        b'{"type":"_Placed","worker":1}',
    ):
        with pytest.raises(msgspec.MsgspecError):
            read_message(wrong)
