"""The token bucket: its waits, and what it allows in any interval."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.token_bucket import Bucket


@pytest.mark.parametrize(
    ("per_minute", "taken", "later_s", "cost", "wait_s"),
    [
        (60, [], 0, 60, 0),  # a minute's worth at once
        (60, [60], 0, 1, 1),
        (60, [60], 1, 1, 0),
        (60, [60], 600, 60, 0),
        (60, [60], 600, 61, 0),  # more than it ever holds: from a full one
        (60, [1], 0, 1000, 1),
        (60, [1000], 0, 1, 941),  # and the debt is worked off
        (60, [60, -20], 0, 20, 0),  # what was put back is there
        (60, [-20], 0, 60, 0),  # and there is no more than a minute's worth
        (60, [-20, 60], 0, 1, 1),
        (0.25, [1], 0, 1, 240),  # one process's part of a limit of one
    ],
)
def test_a_bucket_computes_when_a_cost_will_be_available(
    per_minute: float, taken: list[float], later_s: float, cost: float, wait_s: float
) -> None:
    bucket = Bucket(per_minute, 0.0)
    for amount in taken:
        bucket.take(amount, 0.0)
    assert bucket.wait_s(cost, later_s) == pytest.approx(wait_s)


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 300)), min_size=1, max_size=60),
)
def test_no_interval_exceeds_its_share_plus_one_minutes(
    per_minute: int, asked: list[tuple[float, int]]
) -> None:
    bucket, now_s = Bucket(per_minute, 0.0), 0.0
    let_in: list[tuple[float, int]] = []
    for pause_s, cost in asked:
        now_s += pause_s
        wait_s = bucket.wait_s(cost, now_s)
        if wait_s == 0:
            bucket.take(cost, now_s)
            let_in.append((now_s, cost))
        else:  # what it says is the truth, give or take rounding
            later = Bucket(per_minute, 0.0)
            for at_s, amount in let_in:
                later.take(amount, at_s)
            assert later.wait_s(cost, now_s + wait_s) == pytest.approx(0, abs=1e-6)
    for begin, (begin_s, _) in enumerate(let_in):
        for end in range(begin, len(let_in)):
            before_last = sum(cost for _, cost in let_in[begin:end])
            last = min(let_in[end][1], per_minute)
            brought = (let_in[end][0] - begin_s) / 60 * per_minute
            assert before_last + last <= per_minute + brought + 1e-6


def test_a_new_limit_holds_at_once_and_keeps_the_debt() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(50, 0.0)
    bucket.resize(20, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx((1 + 30) / 20 * 60)
    bucket.resize(120, 0.0)
    assert bucket.wait_s(70, 0.0) == 0
    assert bucket.wait_s(71, 0.0) > 0
