"""The cache of token ids by piece: exact, and within its bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radix.token_pieces import ENTRY_BYTES, TokenPieces


def test_an_added_piece_is_found() -> None:
    pieces = TokenPieces(10_000)
    key = pieces.key("<a>", "some text")
    assert pieces.get(key) is None
    pieces.add_ids(key, [1, 2, 70_000])
    found = pieces.get(pieces.key("<a>", "some text"))
    assert found is not None
    assert list(found) == [1, 2, 70_000]


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_different_pieces_have_different_keys(one: tuple[str, str], other: tuple[str, str]) -> None:
    pieces = TokenPieces(0)
    assert (pieces.key(*one) == pieces.key(*other)) is (one == other)


def test_lone_surrogates_have_keys() -> None:
    pieces = TokenPieces(0)
    assert pieces.key("\ud800") != pieces.key("\ud801")


def test_each_process_has_its_own_keys() -> None:
    assert TokenPieces(0).key("a") != TokenPieces(0).key("a")


def test_the_least_recently_used_piece_is_evicted() -> None:
    pieces = TokenPieces(3 * (ENTRY_BYTES + 20))
    keys = [pieces.key(str(n)) for n in range(4)]
    for key in keys[:3]:
        pieces.add_ids(key, [1, 2])
    pieces.get(keys[0])
    pieces.add_ids(keys[3], [1, 2])
    assert [pieces.get(key) is not None for key in keys] == [True, False, True, True]


def test_a_piece_over_the_bound_evicts_nothing() -> None:
    pieces = TokenPieces(2_000)
    small, large = pieces.key("small"), pieces.key("large")
    pieces.add_ids(small, [1])
    pieces.add_ids(large, range(1_000))
    assert pieces.get(large) is None
    assert pieces.get(small) is not None


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), max_size=60))
def test_the_bound_holds(added: list[tuple[int, int]]) -> None:
    pieces = TokenPieces(4_000)
    for number, length in added:
        pieces.add_ids(pieces.key(str(number)), range(length))
        pieces.check()
