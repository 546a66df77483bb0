"""When a silent engine is waited for, and when it is checked for a hang."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.silence import STALL_S, WORKING_FAULTS, Signs, is_waited_for

LIMIT_S = 600.0
OLD, NEW = 10 * LIMIT_S, LIMIT_S / 2


@pytest.mark.parametrize(
    ("silent_s", "signs", "waits"),
    [
        (STALL_S - 1, None, True),
        (STALL_S, None, False),
        (STALL_S, Signs(OLD, 0), False),
        (STALL_S, Signs(OLD, WORKING_FAULTS - 1), False),
        (STALL_S, Signs(OLD, WORKING_FAULTS), True),
        (LIMIT_S - 1, Signs(OLD, WORKING_FAULTS), True),
        (LIMIT_S, Signs(OLD, WORKING_FAULTS), False),
        (STALL_S, Signs(NEW, 0), True),
        (STALL_S, Signs(LIMIT_S, 0), False),
    ],
)
def test_an_engine_is_waited_for_that_is_new_or_works(
    silent_s: float, signs: Signs | None, waits: bool
) -> None:
    assert is_waited_for(silent_s, signs, LIMIT_S) is waits


@given(
    st.floats(0, 1e6), st.builds(Signs, st.floats(0, 1e6), st.integers(0, 10**6)), st.floats(0, 1e5)
)
def test_no_sign_makes_an_engine_wait_for_ever(
    silent_s: float, signs: Signs, limit_s: float
) -> None:
    if silent_s >= max(STALL_S, limit_s) and signs.age_s >= limit_s:
        assert not is_waited_for(silent_s, signs, limit_s)
    if is_waited_for(silent_s, None, limit_s):
        assert is_waited_for(silent_s, signs, limit_s), "signs never shorten the wait"
