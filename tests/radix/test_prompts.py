"""The table of prompts: begins only what it knows, and never over its bound."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from radix.prompts import ENTRY_BYTES, Cut, Prompts

AHEAD = 3
letters = st.text("ab", max_size=12)


def kept(prompts: Prompts, text: str, space: str = "") -> None:
    """Each character is a token, and every second place a cut."""
    cuts = [Cut(n, n, "") for n in range(2, len(text), 2)]
    prompts.keep(space, text, array("I", map(ord, text)), cuts)


@given(st.lists(letters, max_size=6), letters)
def test_what_is_begun_is_how_the_text_begins(known: list[str], text: str) -> None:
    prompts = Prompts(1 << 20, AHEAD)
    for one in known:
        kept(prompts, one)
    begun = prompts.begin("", text)
    if begun is not None:
        end = begun.cut.chars + AHEAD
        assert any(one[:end] == text[:end] and len(one) >= end for one in known)
        assert list(begun.tokens) == [ord(char) for char in text[: begun.cut.tokens]]


def test_a_prompt_that_goes_on_is_begun_at_the_last_cut_that_is_sure() -> None:
    prompts = Prompts(1 << 20, AHEAD)
    kept(prompts, "abababab")
    begun = prompts.begin("", "abababab" + "ba")
    assert begun is not None
    assert begun.cut.chars == 4  # 6 is one only if what follows is known up to 9
    assert prompts.begin("", "ababb") is None


def test_a_prompt_stands_in_place_of_the_one_it_goes_on_from() -> None:
    prompts = Prompts(1 << 20, AHEAD)
    kept(prompts, "abababab")
    begun = prompts.begin("", "ababababab")
    prompts.keep("", "ababababab", array("I", range(10)), [Cut(8, 8, "")], begun)
    assert len(prompts) == 1
    prompts.check()


def test_one_without_a_cut_is_not_kept() -> None:
    prompts = Prompts(1 << 20, AHEAD)
    kept(prompts, "a")
    assert len(prompts) == 0


@given(st.lists(letters.map(lambda text: text * 100), max_size=20))
def test_the_bound_holds(known: list[str]) -> None:
    prompts = Prompts(3 * ENTRY_BYTES + 4_000, AHEAD)
    for one in known:
        kept(prompts, one)
        prompts.check()
