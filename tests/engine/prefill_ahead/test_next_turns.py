"""Which tokens of a next turn are certain, and which conversations are guessed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.engine.prefill_ahead.next_turns import NextTurns, certain_ids
from sgl_ext.reading.cache_marks import Marks
from sgl_ext.reading.client import ClientFacts
from sgl_ext.reading.hints import Importance
from sgl_ext.reading.next_turn import Turn
from sgl_ext.reading.segments import Chain

NONCE = "0a1b2c3d4e5f6a7bn0z"


def decode(ids: Sequence[int]) -> str:
    """A text of three characters a token."""
    return b"".join(number.to_bytes(3, "big") for number in ids).decode("latin-1")


def encode(text: str) -> list[int]:
    data = text.encode("latin-1")
    data += b" " * (-len(data) % 3)
    return [int.from_bytes(data[at : at + 3], "big") for at in range(0, len(data), 3)]


def converted(ids: Any) -> Any:
    return SimpleNamespace(input_ids=ids)


@given(before=st.integers(13, 400), after=st.integers(0, 400))
def test_tokens_before_the_nonce_are_certain(before: int, after: int) -> None:
    text = "x" * before + NONCE + "y" * after
    ids = encode(text)
    found = certain_ids(converted(ids), Turn({}, (NONCE,)), decode)
    known = ids[: before // 3]
    if len(known) <= 4:
        assert found is None
    else:
        assert list(found or ()) == known[:-4]


def test_all_tokens_are_certain_without_a_nonce() -> None:
    ids = encode("as it is")
    for given_ids in (ids, array("q", ids)):
        assert list(certain_ids(converted(given_ids), Turn({}, ()), decode) or ()) == ids


@pytest.mark.parametrize("ids", [None, [], [[1, 2]], "text", encode("no such word " * 50)])
def test_no_token_is_certain_if_the_nonce_is_not_found(ids: Any) -> None:
    assert certain_ids(converted(ids), Turn({}, (NONCE,)), decode) is None
    assert certain_ids(None, Turn({}, ()), decode) is None


class NoPrefiller:
    is_supported = True

    def drop(self, name: str, why: str) -> bool:
        return False


def turns(policy: str = "auto") -> NextTurns:
    made: Any = NextTurns(None, SimpleNamespace(), NoPrefiller(), policy)  # type: ignore[arg-type]
    assert isinstance(made, NextTurns)
    return made


def context_of(*hashes: int, hint: bool | None = None, **fields: Any) -> RequestContext:
    return RequestContext(
        "/v1/messages",
        {},
        Chain(hashes=hashes, ends=tuple(range(1, len(hashes) + 1))),
        Marks(),
        Importance(speculative_prefill=hint),
        conversation=7,
        **fields,
    )


NO_REQUEST = SimpleNamespace(input_ids=[1])


def test_a_conversation_that_grows_is_guessed() -> None:
    seen = turns()
    seen.compare(context_of(1, 2), NO_REQUEST)
    assert not seen.wants(context_of(1, 2))
    seen.compare(context_of(1, 2, 3), NO_REQUEST)
    assert seen.wants(context_of(1, 2, 3))


def test_a_repeated_request_is_no_growth() -> None:
    seen = turns()
    for _ in range(3):
        seen.compare(context_of(1, 2), NO_REQUEST)
    assert not seen.wants(context_of(1, 2))


@pytest.mark.parametrize(
    ("policy", "hint", "wanted"),
    [
        ("auto", True, True),
        ("auto", None, False),
        ("auto", False, False),
        ("hinted", True, True),
        ("off", True, False),
    ],
)
def test_a_hinted_turn_is_guessed(policy: str, hint: bool | None, wanted: bool) -> None:
    assert turns(policy).wants(context_of(1, hint=hint)) is wanted


def test_a_growing_conversation_that_opts_out_is_not_guessed() -> None:
    seen = turns()
    seen.compare(context_of(1), NO_REQUEST)
    seen.compare(context_of(1, 2), NO_REQUEST)
    assert not seen.wants(context_of(1, 2, hint=False))
    assert not seen.wants(context_of(1, 2, is_last=True))
    only_asked = turns("hinted")
    only_asked.compare(context_of(1), NO_REQUEST)
    only_asked.compare(context_of(1, 2), NO_REQUEST)
    assert not only_asked.wants(context_of(1, 2))


@pytest.mark.parametrize(
    "facts", [ClientFacts(request_class="compaction"), ClientFacts(compaction="auto")]
)
def test_no_turn_begins_with_the_request_that_asks_for_a_summary(facts: ClientFacts) -> None:
    assert not turns().wants(context_of(1, 2, hint=True, facts=facts))


def test_tenants_do_not_share_a_conversation() -> None:
    seen = turns()
    seen.compare(context_of(1, owner="one"), NO_REQUEST)
    seen.compare(context_of(1, 2, owner="other"), NO_REQUEST)
    assert not seen.wants(context_of(1, 2, owner="one"))
    assert not seen.wants(context_of(1, 2, owner="other"))


def test_where_no_slice_runs_no_turn_is_guessed() -> None:
    seen = turns()
    assert seen.wants(context_of(1, 2, hint=True))
    seen.prefiller.is_supported = False
    assert not seen.wants(context_of(1, 2, hint=True))
