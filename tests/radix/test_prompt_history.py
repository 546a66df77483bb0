"""The table of prompts: begins only what it knows, and never over its bound."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from radix.prompt_history import ENTRY_BYTES, Begun, Cut, Prompts

AHEAD = 3
letters = st.text("ab", max_size=12)


def kept(prompts: Prompts, text: str, space: str = "") -> None:
    """Each character is a token, and every second place a cut."""
    cuts = [Cut(n, n, "") for n in range(2, len(text), 2)]
    prompts.keep(space, text, array("q", map(ord, text)), cuts)


@given(st.lists(letters, max_size=6), letters)
def test_a_text_is_begun_at_the_last_sure_cut_of_the_last_prompt_it_continues(
    known: list[str], text: str
) -> None:
    prompts = Prompts(1 << 20, AHEAD)
    for one in known:
        kept(prompts, one)
    begun = prompts.begin("", text)
    sure = [
        [
            cut
            for cut in range(2, len(one), 2)
            if cut + AHEAD <= len(one) and one[: cut + AHEAD] == text[: cut + AHEAD]
        ]
        for one in known
    ]
    last = next((cuts[-1] for cuts in reversed(sure) if cuts), None)
    assert (begun and begun.cut.chars) == last
    if begun is not None:
        assert list(begun.tokens) == [ord(char) for char in text[: begun.cut.tokens]]


@given(st.text("ab\u00e9\U0001f600", max_size=12), st.text("ab\u00e9\U0001f600", max_size=12))
def test_letters_of_all_widths_are_compared(one: str, other: str) -> None:
    prompts = Prompts(1 << 20, AHEAD)
    kept(prompts, "a" + one)
    begun = prompts.begin("", "a" + other)
    assert (begun is not None) is (len(one) >= 4 and one[:4] == other[:4])


def test_what_is_done_with_the_tokens_does_not_change_what_is_known() -> None:
    prompts = Prompts(1 << 20, AHEAD)
    kept(prompts, "abababab")
    for _ in range(2):
        begun = prompts.begin("", "abababab")
        assert begun is not None
        assert list(begun.tokens) == [ord(char) for char in "abab"]
        begun.tokens[0] = 0
        del begun.tokens[1:]


@given(st.lists(st.tuples(st.integers(0, 80), letters, st.integers(0, 2)), max_size=12))
def test_prompts_that_grow_and_branch_have_their_own_tokens(
    turns: list[tuple[int, str, int]],
) -> None:
    """Each goes on somewhere in the one before it; some are begun while another is."""
    prompts = Prompts(1 << 20, AHEAD)
    text = ""
    waiting: list[tuple[str, Begun | None, array[int]]] = []
    for end, added, late in turns:
        text = text[:end] + "ab" + added * 3
        begun = prompts.begin("", text)
        tokens = begun.tokens if begun is not None else array("q")
        tokens.extend(array("q", map(ord, text[len(tokens) :])))
        assert tokens.tolist() == list(map(ord, text))
        waiting.append((text, begun, tokens))
        while len(waiting) > late:
            said, before, ids = waiting.pop(0)
            start = 2 if before is None else before.cut.chars + 1
            cuts = [Cut(n, n, "") for n in range(start, len(said))]
            prompts.keep("", said, ids, cuts, before)
            ids[0] = 0
            prompts.check()
    for known in prompts._prompts.values():
        said = "".join(known.parts)
        assert known.tokens.tolist()[: len(said)] == list(map(ord, said))
        assert [cut.chars + AHEAD for cut in known.cuts] == [
            len("".join(known.parts[: n + 1])) for n in range(len(known.cuts))
        ]


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
    prompts.keep("", "ababababab", array("q", range(10)), [Cut(8, 8, "")], begun)
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
