"""The figures of bench/long_history: work by stage where spans overlap, and what is quadratic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.lib.history.growth import exponents, require_near_linear
from bench.lib.history.work import work_ms
from bench.lib.script import InvariantBroken
from bench.lib.warm.stages import Span

MS = 1_000_000


def test_work_that_overlaps_belongs_to_what_began_last() -> None:
    spans = [
        Span(5 * MS, 9 * MS, "events"),  # another process's, longer than the one around it
        Span(0, 6 * MS, "store"),
        Span(1 * MS, 2 * MS, "pins"),
        Span(20 * MS, 30 * MS, "parse"),
    ]
    found = work_ms(spans, 0, 25 * MS)
    assert found == {"store": 4.0, "pins": 1.0, "events": 4.0, "parse": 5.0}


spans = st.builds(
    lambda begin, size, stage: Span(begin * MS, (begin + size) * MS, stage),
    st.integers(0, 50),
    st.integers(0, 50),
    st.sampled_from("abc"),
)


@given(st.lists(spans, max_size=8), st.integers(0, 50), st.integers(0, 50))
def test_work_is_the_time_in_which_any_span_is_open(
    spans: list[Span], begin: int, size: int
) -> None:
    found = work_ms(spans, begin * MS, (begin + size) * MS)
    open_ms = sum(
        any(span.begin_ns <= ms * MS < span.end_ns for span in spans)
        for ms in range(begin, begin + size)
    )
    assert sum(found.values()) == pytest.approx(open_ms)


def test_what_takes_four_times_as_long_for_twice_the_history_is_named() -> None:
    linear = {100_000: {"parse": 5.0}, 200_000: {"parse": 10.0}, 400_000: {"parse": 20.0}}
    assert exponents(linear) == {"parse": 1.0}
    require_near_linear("warm", linear)
    quadratic = {"pins": 5.0}, {"pins": 20.0}
    with pytest.raises(InvariantBroken, match=r"stage=pins, power=2\.0"):
        require_near_linear("warm", dict(zip((100_000, 200_000), quadratic, strict=True)))
    require_near_linear("warm", dict(zip((1_000, 2_000), quadratic, strict=True)))


def test_what_is_short_is_noise() -> None:
    require_near_linear("warm", {100_000: {"route": 0.01}, 200_000: {"route": 4.9}})
    assert exponents({100_000: {"route": 0.01}, 200_000: {"route": 6.0}}) == {"route": 1.26}
