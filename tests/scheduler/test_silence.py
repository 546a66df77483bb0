"""When a silent engine is waited for, and when it is checked for a hang."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.silence import (
    HANG_S,
    STALLED_S,
    WORKING_FAULTS,
    Signs,
    is_waited_for,
    stalled_after_s,
)

LIMIT_S = 600.0
OLD, NEW = 10 * LIMIT_S, LIMIT_S / 2


@pytest.mark.parametrize(
    ("silent_s", "quiet_s", "age_s", "waits"),
    [
        (HANG_S - 1, HANG_S - 1, None, True),
        (HANG_S, HANG_S, None, False),
        (HANG_S, HANG_S, OLD, False),
        (LIMIT_S - 1, HANG_S - 1, OLD, True),
        (LIMIT_S - 1, HANG_S, OLD, False),
        (LIMIT_S, 0, OLD, False),
        (HANG_S, HANG_S, NEW, True),
        (HANG_S, HANG_S, LIMIT_S, False),
    ],
)
def test_an_engine_is_waited_for_that_is_new_or_works(
    silent_s: float, quiet_s: float, age_s: float | None, waits: bool
) -> None:
    assert is_waited_for(silent_s, quiet_s, age_s, LIMIT_S) is waits


def test_few_page_faults_are_no_sign_of_work() -> None:
    assert not Signs(OLD, WORKING_FAULTS - 1).is_working
    assert Signs(OLD, WORKING_FAULTS).is_working


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e5))
def test_no_sign_makes_an_engine_wait_for_ever(
    silent_s: float, quiet_s: float, age_s: float, limit_s: float
) -> None:
    if silent_s >= max(HANG_S, limit_s) and age_s >= limit_s:
        assert not is_waited_for(silent_s, quiet_s, age_s, limit_s)
    if silent_s < HANG_S:
        assert is_waited_for(silent_s, min(quiet_s, silent_s), None, limit_s)


def test_a_long_step_is_no_stall() -> None:
    assert stalled_after_s(0, 20_000) == STALLED_S
    assert stalled_after_s(100_000, 20_000) == STALLED_S + 3 * 5
    assert stalled_after_s(5_000, 0) == STALLED_S + 3 * 5, "its speed is not known"
    assert stalled_after_s(10_000_000, 20_000) == HANG_S, "there is an end to it"
