"""When a silent engine is waited for, and when it is checked for a hang."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.silence import STALL_S, WORKING_FAULTS, Signs, is_waited_for

LIMIT_S = 600.0
OLD, NEW = 10 * LIMIT_S, LIMIT_S / 2


@pytest.mark.parametrize(
    ("silent_s", "quiet_s", "age_s", "waits"),
    [
        (STALL_S - 1, STALL_S - 1, None, True),
        (STALL_S, STALL_S, None, False),
        (STALL_S, STALL_S, OLD, False),
        (LIMIT_S - 1, STALL_S - 1, OLD, True),
        (LIMIT_S - 1, STALL_S, OLD, False),
        (LIMIT_S, 0, OLD, False),
        (STALL_S, STALL_S, NEW, True),
        (STALL_S, STALL_S, LIMIT_S, False),
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
    if silent_s >= max(STALL_S, limit_s) and age_s >= limit_s:
        assert not is_waited_for(silent_s, quiet_s, age_s, limit_s)
    if silent_s < STALL_S:
        assert is_waited_for(silent_s, min(quiet_s, silent_s), None, limit_s)
