"""The cost of a loaded token, measured as a share of a computed one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.load_cost import (
    ENOUGH,
    LATEST,
    LEAST,
    LEAST_TOKENS,
    MOST,
    PRIOR,
    SHARED_PRIOR,
    LoadCost,
)

MEASURED = st.tuples(st.integers(0, 200_000), st.floats(-1, 1e6))


def measured(loads: list[tuple[int, float]], passes: list[tuple[int, float]]) -> LoadCost:
    cost = LoadCost()
    for tokens, seconds in passes:
        cost.computed(tokens, seconds)
    for tokens, seconds in loads:
        cost.loaded(tokens, seconds)
    return cost


def test_the_share_is_the_measured_one() -> None:
    cost = measured([(10_000, 0.02)] * ENOUGH, [(4096, 0.4096)] * ENOUGH)
    assert cost.share == pytest.approx(0.02)


@pytest.mark.parametrize(("loads", "passes"), [(ENOUGH - 1, 9), (9, ENOUGH - 1), (0, 0)])
def test_too_few_measurements_of_one_kind_leave_the_prior(loads: int, passes: int) -> None:
    assert measured([(10_000, 9.0)] * loads, [(4096, 1.0)] * passes).share == PRIOR


def test_small_measurements_count_for_nothing() -> None:
    """Most of what they take is the start of a copy or of a pass."""
    passes = [(4096, 0.4096)] * 9
    assert measured([(LEAST_TOKENS - 1, 9.0)] * 99, passes).share == PRIOR
    assert measured([(LEAST_TOKENS, 0.0)] * 99, passes).share == PRIOR


@given(loads=st.lists(MEASURED, max_size=60), passes=st.lists(MEASURED, max_size=60))
def test_the_share_stays_within_its_bounds(
    loads: list[tuple[int, float]], passes: list[tuple[int, float]]
) -> None:
    assert LEAST <= measured(loads, passes).share <= MOST


@given(wrong=st.lists(st.floats(1e-9, 1e9), max_size=LATEST // 2 - 1), of_loads=st.booleans())
def test_less_than_half_of_the_measurements_do_not_move_it(
    wrong: list[float], of_loads: bool
) -> None:
    usual = [(2000, 0.01)] * (LATEST - len(wrong))
    mixed = [*((2000, seconds) for seconds in wrong), *usual]
    passes = [(2000, 0.2)] * LATEST
    if of_loads:
        assert measured(mixed, passes).share == 0.05
    else:
        mixed = [(2000, 0.2) if seconds == 0.01 else (tokens, seconds) for tokens, seconds in mixed]
        assert measured([(2000, 0.01)] * ENOUGH, mixed).share == 0.05


def test_old_measurements_are_forgotten() -> None:
    cost = measured([(2000, 0.01)] * 99, [(2000, 0.2)] * 99)
    for _ in range(LATEST):
        cost.loaded(2000, 0.1)
    assert cost.share == pytest.approx(0.5)


def test_small_changes_are_not_sent() -> None:
    cost = measured([(2000, 0.02)] * LATEST, [(2000, 0.2)] * LATEST)
    shares = set()
    for number in range(4 * LATEST):
        cost.loaded(2000, 0.02 * (1 + 0.15 * (-1) ** number))
        shares.add(cost.share)
    assert shares == {0.1}


def test_a_token_of_the_shared_tier_is_read_and_then_loaded() -> None:
    cost = measured([(2000, 0.01)] * ENOUGH, [(2000, 0.2)] * ENOUGH)
    for _ in range(ENOUGH):
        assert cost.shared_share == SHARED_PRIOR
        cost.read(2000, 0.02)
    assert (cost.share, cost.shared_share) == (0.05, 0.15)


def test_how_long_a_token_is_computed_is_known_once_enough_were() -> None:
    cost = LoadCost()
    for number in range(ENOUGH):
        assert cost.token_s == 0.0, number
        cost.computed(1000, 0.5)
    assert cost.token_s == 0.0005
    for _ in range(LATEST):
        cost.computed(1000, 0.55)
    assert cost.token_s == 0.0005, "a small change is not sent"
    for _ in range(LATEST):
        cost.computed(1000, 0.7)
    assert cost.token_s == 0.0007


def test_reads_alone_measure_nothing() -> None:
    cost = LoadCost()
    for _ in range(LATEST):
        cost.read(2000, 0.02)
        cost.computed(2000, 0.2)
    assert (cost.share, cost.shared_share) == (PRIOR, SHARED_PRIOR)
