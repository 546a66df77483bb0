"""The history of prompts: finds only true prefixes, and stays within its bound."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from radix.known_tokens import (
    ENTRY_BYTES,
    PIECE_BYTES,
    Cut,
    KnownPrefix,
    PromptHistory,
    TokenPieces,
)

LOOKAHEAD = 3
letters = st.text("ab", max_size=12)


def add(prompts: PromptHistory, text: str, group: str = "") -> None:
    """Each character is a token, and every second place a cut."""
    cuts = [Cut(n, n, "") for n in range(2, len(text), 2)]
    prompts.add(group, text, array("q", map(ord, text)), cuts)


@given(st.lists(letters, max_size=6), letters)
def test_the_known_prefix_ends_at_the_last_sure_cut_of_the_most_recent_prompt(
    known: list[str], text: str
) -> None:
    prompts = PromptHistory(1 << 20, LOOKAHEAD)
    for one in known:
        add(prompts, one)
    prefix = prompts.known_prefix("", text)
    sure = [
        [
            cut
            for cut in range(2, len(one), 2)
            if cut + LOOKAHEAD <= len(one) and one[: cut + LOOKAHEAD] == text[: cut + LOOKAHEAD]
        ]
        for one in known
    ]
    last = next((cuts[-1] for cuts in reversed(sure) if cuts), None)
    assert (prefix and prefix.cut.chars) == last
    if prefix is not None:
        assert list(prefix.ids) == [ord(char) for char in text[: prefix.cut.tokens]]


@given(st.text("ab\u00e9\U0001f600", max_size=12), st.text("ab\u00e9\U0001f600", max_size=12))
def test_characters_of_all_widths_are_compared(one: str, other: str) -> None:
    prompts = PromptHistory(1 << 20, LOOKAHEAD)
    add(prompts, "a" + one)
    prefix = prompts.known_prefix("", "a" + other)
    assert (prefix is not None) is (len(one) >= 4 and one[:4] == other[:4])


def test_a_caller_may_change_the_ids_it_got() -> None:
    prompts = PromptHistory(1 << 20, LOOKAHEAD)
    add(prompts, "abababab")
    for _ in range(2):
        prefix = prompts.known_prefix("", "abababab")
        assert prefix is not None
        assert list(prefix.ids) == [ord(char) for char in "abab"]
        prefix.ids[0] = 0
        del prefix.ids[1:]


@given(st.lists(st.tuples(st.integers(0, 80), letters, st.integers(0, 2)), max_size=12))
def test_prompts_that_grow_and_branch_have_their_own_ids(
    turns: list[tuple[int, str, int]],
) -> None:
    """Each continues a prefix of the one before it; some are added late."""
    prompts = PromptHistory(1 << 20, LOOKAHEAD)
    text = ""
    waiting: list[tuple[str, KnownPrefix | None, array[int]]] = []
    for end, added, late in turns:
        text = text[:end] + "ab" + added * 3
        prefix = prompts.known_prefix("", text)
        tokens = prefix.ids if prefix is not None else array("q")
        tokens.extend(array("q", map(ord, text[len(tokens) :])))
        assert tokens.tolist() == list(map(ord, text))
        waiting.append((text, prefix, tokens))
        while len(waiting) > late:
            said, before, ids = waiting.pop(0)
            start = 2 if before is None else before.cut.chars + 1
            cuts = [Cut(n, n, "") for n in range(start, len(said))]
            prompts.add("", said, ids, cuts, before)
            ids[0] = 0
            prompts.check()
    for known in prompts._prompts.values():
        said = "".join(known.parts)
        assert known.ids.tolist()[: len(said)] == list(map(ord, said))
        assert [cut.chars + LOOKAHEAD for cut in known.cuts] == [
            len("".join(known.parts[: n + 1])) for n in range(len(known.cuts))
        ]


def test_a_cut_is_sure_only_with_its_whole_lookahead() -> None:
    prompts = PromptHistory(1 << 20, LOOKAHEAD)
    add(prompts, "abababab")
    prefix = prompts.known_prefix("", "abababab" + "ba")
    assert prefix is not None
    assert prefix.cut.chars == 4  # 6 is one only if what follows is known up to 9
    assert prompts.known_prefix("", "ababb") is None


def test_a_prompt_replaces_the_one_that_it_continues() -> None:
    prompts = PromptHistory(1 << 20, LOOKAHEAD)
    add(prompts, "abababab")
    prefix = prompts.known_prefix("", "ababababab")
    prompts.add("", "ababababab", array("q", range(10)), [Cut(8, 8, "")], prefix)
    assert len(prompts) == 1
    prompts.check()


def test_a_prompt_without_a_cut_is_not_added() -> None:
    prompts = PromptHistory(1 << 20, LOOKAHEAD)
    add(prompts, "a")
    assert len(prompts) == 0


@given(st.lists(letters.map(lambda text: text * 100), max_size=20))
def test_the_bound_holds(known: list[str]) -> None:
    prompts = PromptHistory(3 * ENTRY_BYTES + 4_000, LOOKAHEAD)
    for one in known:
        add(prompts, one)
        prompts.check()


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
    pieces = TokenPieces(3 * (PIECE_BYTES + 20))
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
def test_the_bound_of_pieces_holds(added: list[tuple[int, int]]) -> None:
    pieces = TokenPieces(4_000)
    for number, length in added:
        pieces.add_ids(pieces.key(str(number)), range(length))
        pieces.check()
