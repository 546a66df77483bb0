"""A tier that is full, fails or is slow turns off by name, and on again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.tier_switch import BEHIND_S, PAUSE_S, RETRY_S, Off, TierSwitch


@pytest.mark.parametrize("why", [Off.FULL, Off.FAILING])
def test_after_a_failure_it_is_tried_again_once_a_minute(why: Off) -> None:
    switch = TierSwitch()
    assert switch.begin_write(1.0)
    switch.failed(why, 1.0)
    assert switch.why is why
    assert not switch.begin_write(RETRY_S)
    assert switch.may_read(2.0) == (why is Off.FULL), "a full disk is still read"
    assert switch.begin_write(1.0 + RETRY_S)
    assert switch.may_read(1.0 + RETRY_S)
    switch.failed(why, 1.0 + RETRY_S)
    assert not switch.begin_write(2.0 + RETRY_S)
    switch.worked((Off.FULL, Off.FAILING))
    assert switch.why is None
    assert switch.begin_write(2.0 + RETRY_S)


def test_a_read_that_works_does_not_end_a_full_disk() -> None:
    switch = TierSwitch()
    switch.failed(Off.FULL, 0.0)
    switch.worked((Off.FAILING,))
    assert switch.why is Off.FULL


def write_without_a_pause(switch: TierSwitch, seconds: float) -> float:
    """Writes for so long; returns when it ended."""
    now_s = 0.0
    while now_s < seconds:
        switch.begin_write(now_s)
        now_s += 1.0
        switch.end_write(now_s)
    return now_s


def test_what_is_written_without_a_pause_for_long_is_left_out_until_nothing_waits() -> None:
    switch = TierSwitch()
    now_s = write_without_a_pause(switch, BEHIND_S)
    assert switch.begin_write(now_s)
    now_s += 1.0
    switch.end_write(now_s)
    assert not switch.begin_write(now_s)
    assert switch.why is Off.BEHIND
    assert switch.may_read(now_s)
    switch.end_write(now_s)
    now_s += PAUSE_S / 2
    assert not switch.begin_write(now_s), "more waited"
    switch.end_write(now_s)
    assert switch.begin_write(now_s + 2 * PAUSE_S)
    assert switch.why is None


def test_an_engine_that_ends_writes_all_however_long_it_takes() -> None:
    switch = TierSwitch()
    switch.is_patient = True
    assert switch.begin_write(write_without_a_pause(switch, 3 * BEHIND_S))
    assert switch.why is None


@given(st.lists(st.tuples(st.sampled_from("wfxr"), st.floats(0, 100)), max_size=50))
def test_it_is_on_again_after_a_write_that_works(steps: list[tuple[str, float]]) -> None:
    switch, now_s = TierSwitch(), 0.0
    for what, passed_s in steps:
        now_s += passed_s
        if what == "w" and switch.begin_write(now_s):
            switch.worked((Off.FULL, Off.FAILING))
            assert switch.why is None
            switch.end_write(now_s)
        elif what in "fx":
            switch.failed(Off.FULL if what == "f" else Off.FAILING, now_s)
            assert not switch.begin_write(now_s)
            switch.end_write(now_s)
    now_s += RETRY_S
    assert switch.begin_write(now_s)
    assert switch.may_read(now_s)
