"""How fast a worker computes prompts, by the totals that it reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.programs.pace import SPAN_S, PrefillPace


def test_the_share_of_time_and_the_speed_follow_the_reports() -> None:
    pace = PrefillPace()
    for second in range(200):
        pace.report(1000 * second, 250 * second, float(second))
    assert pace.share(199.0) == pytest.approx(0.25, rel=0.1)
    assert pace.tokens_per_s == pytest.approx(4000)
    assert pace.seconds_of(10_000) == pytest.approx(2.5)
    assert pace.share(199.0 + 3 * SPAN_S) < 0.02


def test_nothing_is_known_of_a_worker_that_has_just_begun() -> None:
    pace = PrefillPace()
    pace.report(10**9, 10**9, 0.0)
    assert (pace.share(0.0), pace.seconds_of(1000)) == (0.0, 0.0)
    pace.report(10**9 + 4000, 10**9 + 1000, 1.0)
    assert pace.tokens_per_s == 4000
    pace.report(0, 0, 2.0)
    assert pace.tokens_per_s == 4000, "it was started again"


@given(st.lists(st.tuples(*[st.integers(0, 10**12)] * 2, st.floats(0, 1e6)), max_size=20))
def test_whatever_is_reported_a_share_is_a_share(reports: list[tuple[int, int, float]]) -> None:
    pace = PrefillPace()
    for tokens, busy_ms, now_s in sorted(reports, key=lambda one: one[2]):
        pace.report(tokens, busy_ms, now_s)
        assert 0 <= pace.share(now_s) <= 1
        assert pace.tokens_per_s >= 0
