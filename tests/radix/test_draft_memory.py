"""Drafts: the longest suffix against a naive search, the bounds, and whose tokens are found."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix.draft_memory import (
    LEFT_TOKENS,
    LOOK_BACK,
    NO_DRAFT,
    RECALLED_TOKENS,
    SEARCHED_TOKENS,
    DraftMemory,
    Match,
    TokenLog,
    find_draft,
    find_suffix,
)

few = st.lists(st.integers(0, 3), max_size=90)
some = st.lists(st.integers(0, 40), max_size=60)


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def naive(tokens: list[int], suffix: list[int]) -> Match:
    best = Match()
    for at in range(1, len(tokens)):
        length = 0
        while length < min(at, len(suffix), LOOK_BACK) and (
            tokens[at - 1 - length] == suffix[-1 - length]
        ):
            length += 1
        if length and length >= best.length:
            best = Match(at, length)
    return best


@given(few, few)
def test_the_longest_suffix_is_found(tokens: list[int], suffix: list[int]) -> None:
    found = find_suffix(array(tokens), array(suffix))
    expected = naive(tokens, suffix)
    assert found.length == expected.length
    assert found == expected or found.length < LOOK_BACK


@given(st.one_of(few, some), st.lists(st.integers(0, 3), max_size=20), st.integers(1, 20))
def test_a_draft_is_what_follows_the_last_of_the_longest_places(
    start: list[int], more: list[int], most: int
) -> None:
    log = TokenLog(start)
    for token in more:
        log.extend([token])
    tokens = [*start, *more]
    draft, expected = find_draft(log, most=most), naive(tokens, tokens)
    assert draft.matched == expected.length
    if not expected.length:
        assert draft is NO_DRAFT
        return
    # What follows may run into itself.
    guessed = list(tokens)
    for at in range(most):
        guessed.append(guessed[expected.at + at])
    assert draft.tokens.tolist() == guessed[len(tokens) :]


def test_of_equal_places_among_many_the_last_counts() -> None:
    log = TokenLog([1, 2, 3] * 5_000 + [9, 1, 2, 7, 5] + [1, 2, 3] * 5_000 + [6, 1, 2])
    draft = find_draft(log, most=3)
    assert draft.matched == 2
    assert draft.tokens.tolist() == [3, 6, 1]


def test_nothing_is_drafted_from_nothing() -> None:
    for tokens in ([], [1], [1, 2, 3]):
        assert find_draft(TokenLog(tokens)) is NO_DRAFT


@given(st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=12))
def test_a_log_has_the_tokens_that_it_was_given(parts: list[list[int]]) -> None:
    log = TokenLog(parts[0] if parts else [])
    for part in parts[1:]:
        log.extend(part)
    tokens = [token for part in parts for token in part]
    assert log.tokens.tolist() == tokens
    assert log.total == len(tokens)


def test_a_log_keeps_no_more_tokens_than_are_searched() -> None:
    log, source = TokenLog(range(SEARCHED_TOKENS + 5)), random.Random(1)
    for _ in range(300):
        log.extend([source.randrange(100)] * 1_000)
        assert len(log.tokens) <= SEARCHED_TOKENS + SEARCHED_TOKENS // 8 + 256
        assert log.bytes <= 5 * (SEARCHED_TOKENS + 2_000)
    assert log.total == SEARCHED_TOKENS + 5 + 300_000
    log.extend(range(2 * SEARCHED_TOKENS))
    assert log.tokens[-3:].tolist() == [2 * SEARCHED_TOKENS - 3 + at for at in range(3)]


def test_what_earlier_requests_left_is_drafted_from_where_it_matches_longer() -> None:
    memory = DraftMemory(1 << 20)
    memory.leave("session", TokenLog([7, 1, 2, 3, 4, 5, 6]))
    draft = find_draft(TokenLog([3, 8, 9, 1, 2, 3]), memory.recall("session"), most=9)
    assert (draft.tokens.tolist(), draft.matched, draft.is_own) == ([4, 5, 6], 3, False)
    own = find_draft(TokenLog([1, 2, 3, 8, 9, 1, 2, 3]), memory.recall("session"), most=1)
    assert (own.tokens.tolist(), own.is_own) == ([8], True)


def test_a_draft_does_not_run_from_one_request_into_another() -> None:
    memory = DraftMemory(1 << 20)
    memory.leave("session", TokenLog([1, 2, 3]))
    memory.leave("session", TokenLog([7, 7, 4]))
    assert find_draft(TokenLog([9, 1, 2]), memory.recall("session"), 9).tokens.tolist() == [3]
    assert find_draft(TokenLog([9, 2, 3]), memory.recall("session"), 9) is NO_DRAFT


def test_a_key_finds_nothing_of_another() -> None:
    memory = DraftMemory(1 << 20)
    memory.leave(("one", "session"), TokenLog(range(100)))
    assert not len(memory.recall(("other", "session")))
    assert find_draft(TokenLog([4, 5, 6]), memory.recall(("other", "session"))) is NO_DRAFT


def test_a_next_turn_takes_the_place_of_the_turn_that_it_continues() -> None:
    memory, turn = DraftMemory(1 << 20), list(range(50))
    memory.leave("session", TokenLog(turn))
    once = memory.bytes
    memory.leave("session", TokenLog([*turn, 77, 78]))
    assert memory.recall("session").tolist() == [*turn, 77, 78, -1]
    memory.leave("session", TokenLog([4, *turn]))
    assert memory.recall("session").tolist() == [*turn, 77, 78, -1, 4, *turn, -1]
    assert memory.bytes > 2 * once


def test_a_long_next_turn_takes_it_too() -> None:
    memory, turn = DraftMemory(1 << 24), [at % 1_000 for at in range(LEFT_TOKENS + 5_000)]
    memory.leave("session", TokenLog(turn))
    memory.leave("session", TokenLog([*turn, *range(2_000)]))
    assert len(memory.recall("session")) == LEFT_TOKENS + 1


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 400), st.booleans()), max_size=40),
    st.integers(0, 8_000),
)
def test_the_memory_stays_within_its_bounds(
    left: list[tuple[str, int, bool]], limit_bytes: int
) -> None:
    memory = DraftMemory(limit_bytes)
    for key, tokens, reads in left:
        memory.leave(key, TokenLog(range(tokens)))
        memory.check()
        if reads:
            memory.recall(key)
    memory.clear()
    memory.check()


def test_one_key_keeps_so_many_tokens_at_most() -> None:
    memory, source = DraftMemory(1 << 30), random.Random(2)
    for _ in range(8):
        memory.leave("session", TokenLog([source.randrange(9_999) for _ in range(40_000)]))
        memory.check()
    assert len(memory.recall("session")) <= RECALLED_TOKENS


@pytest.mark.parametrize("used", ["a", "b"])
def test_the_key_that_was_used_longest_ago_goes_first(used: str) -> None:
    memory = DraftMemory(2_500)
    for key in "ab":
        memory.leave(key, TokenLog(range(100)))
    memory.recall(used)
    assert memory.leave("c", TokenLog(range(200))) == 1
    assert {key for key in "abc" if len(memory.recall(key))} == {used, "c"}
