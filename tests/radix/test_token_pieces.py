"""The table of tokens by piece: exact, and never over its bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radix.token_pieces import ENTRY_BYTES, Pieces


def test_what_was_kept_is_found() -> None:
    pieces = Pieces(10_000)
    name = pieces.name("<a>", "some text")
    assert pieces.find(name) is None
    pieces.keep(name, [1, 2, 70_000])
    found = pieces.find(pieces.name("<a>", "some text"))
    assert found is not None
    assert list(found) == [1, 2, 70_000]


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_two_pieces_have_two_names(one: tuple[str, str], other: tuple[str, str]) -> None:
    pieces = Pieces(0)
    assert (pieces.name(*one) == pieces.name(*other)) is (one == other)


def test_lone_surrogates_have_names() -> None:
    pieces = Pieces(0)
    assert pieces.name("\ud800") != pieces.name("\ud801")


def test_names_of_one_process_say_nothing_to_another() -> None:
    assert Pieces(0).name("a") != Pieces(0).name("a")


def test_what_was_not_used_for_longest_is_forgotten() -> None:
    pieces = Pieces(3 * (ENTRY_BYTES + 20))
    names = [pieces.name(str(n)) for n in range(4)]
    for name in names[:3]:
        pieces.keep(name, [1, 2])
    pieces.find(names[0])
    pieces.keep(names[3], [1, 2])
    assert [pieces.find(name) is not None for name in names] == [True, False, True, True]


def test_a_piece_larger_than_all_room_is_not_kept_and_nothing_goes_for_it() -> None:
    pieces = Pieces(2_000)
    small, large = pieces.name("small"), pieces.name("large")
    pieces.keep(small, [1])
    pieces.keep(large, range(1_000))
    assert pieces.find(large) is None
    assert pieces.find(small) is not None


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), max_size=60))
def test_the_bound_holds(kept: list[tuple[int, int]]) -> None:
    pieces = Pieces(4_000)
    for number, length in kept:
        pieces.keep(pieces.name(str(number)), range(length))
        pieces.check()
