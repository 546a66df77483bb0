"""Prefilling ahead: when a slice may run, where it ends, and which turns are guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.prefill import GuessHistory, Rejection, rejection, slice_end


def decided(**changed: int) -> Rejection | None:
    usual = {"new_tokens": 100, "page": 1, "slice_tokens": 256, "free_tokens": 500}
    return rejection(**usual | changed)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"new_tokens": 15}, Rejection.TOO_SHORT),
        ({"new_tokens": 16}, None),
        ({"new_tokens": 31, "page": 32}, Rejection.TOO_SHORT),
        ({"new_tokens": 256}, None),
        ({"new_tokens": 257}, Rejection.TOO_LONG),
        ({"new_tokens": 64, "page": 64, "slice_tokens": 32}, None),
        ({"new_tokens": 65, "page": 64, "slice_tokens": 32}, Rejection.TOO_LONG),
        ({"free_tokens": 99}, Rejection.MEMORY),
        ({"free_tokens": 100}, None),
        ({"new_tokens": 9000, "loaded_tokens": 8744, "free_tokens": 9000}, None),
        ({"new_tokens": 9000, "loaded_tokens": 8743, "free_tokens": 9000}, Rejection.TOO_LONG),
        ({"new_tokens": 9000, "loaded_tokens": 9000, "free_tokens": 8999}, Rejection.MEMORY),
        ({"new_tokens": 15, "loaded_tokens": 15}, Rejection.TOO_SHORT),
    ],
)
def test_a_slice_runs_only_if_no_reason_speaks_against_it(
    changed: dict[str, int], why: Rejection | None
) -> None:
    assert decided(**changed) is why


@given(
    total=st.integers(1, 5000),
    slice_tokens=st.integers(1, 700),
    page=st.sampled_from([1, 16, 64, 128, 256]),
)
def test_slices_reach_the_end_of_a_prompt(total: int, slice_tokens: int, page: int) -> None:
    cached = 0
    for _ in range(total + 1):
        end = slice_end(total, cached, slice_tokens, page)
        assert cached < end <= total
        assert end == total or end % page == 0
        assert end - cached <= max(slice_tokens, page)
        cached = end
        if end == total:
            return
    raise AssertionError("it never ends")


@given(
    total=st.integers(32, 5000),
    slices=st.lists(st.integers(128, 700), min_size=1),
    page=st.sampled_from([1, 16, 64, 128, 256]),
)
def test_the_last_slice_is_not_too_short_to_run(total: int, slices: list[int], page: int) -> None:
    cached = end = 0
    for slice_tokens in slices * total:
        end = slice_end(total, cached, max(slice_tokens, 2 * page), page)
        if end == total:
            break
        cached = end
    if total >= 2 * page:
        assert end - cached >= max(page, 16)


def test_wrong_guesses_end_guessing() -> None:
    guesses = GuessHistory()
    assert guesses.should_guess("one")
    guesses.note("one", is_right=False)
    assert guesses.should_guess("one")
    guesses.note("one", is_right=False)
    assert not guesses.should_guess("one")
    assert guesses.should_guess("other")


def test_half_of_the_latest_guesses_must_be_right() -> None:
    guesses = GuessHistory()
    for _ in range(100):
        guesses.note("one", is_right=True)
    for _ in range(4):
        guesses.note("one", is_right=False)
        assert guesses.should_guess("one")
    guesses.note("one", is_right=False)
    assert not guesses.should_guess("one")


def test_the_oldest_conversation_is_forgotten() -> None:
    guesses = GuessHistory(limit=2)
    for name in ("one", "one", "two", "two", "three"):
        guesses.note(name, is_right=False)
    assert guesses.should_guess("one")
    assert not guesses.should_guess("two")
