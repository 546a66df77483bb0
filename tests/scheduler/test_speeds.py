"""Speeds: how much slower workers are is learned within bounds, and forgotten."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.speeds import (
    EVEN,
    LATEST,
    LEAST,
    MOST,
    MOST_OUTPUT,
    MOST_STEP_TOKENS,
    REFRESH_S,
    SPAN_S,
    Slope,
    Speeds,
    Weights,
)

TOKEN_S, BASE_S, STEP_S = 0.000_1, 0.03, 0.01


def served(
    speeds: Sequence[float],
    *,
    count: int = 200,
    noise: float = 0.0,
    spoil: Callable[[int, float], float] = lambda number, seconds: seconds,
    seed: int = 1,
) -> Speeds:
    """What was learned from so many requests of each worker, within a minute."""
    chance, found = random.Random(seed), Speeds()
    for number in range(count):
        now_s = number * 60 / count
        for worker, speed in enumerate(speeds):
            tokens = int(chance.lognormvariate(7.5, 1.2))
            took_s = (BASE_S + tokens * TOKEN_S) / speed * chance.uniform(1 - noise, 1 + noise)
            found.prefilled(worker, tokens, spoil(number, took_s), now_s)
            output = int(chance.lognormvariate(5, 1))
            took_s = output * STEP_S / speed * chance.uniform(1 - noise, 1 + noise)
            found.decoded(worker, output, spoil(number, took_s), now_s)
        found.refresh(now_s)
    found.refresh(60 + REFRESH_S)
    return found


def weights_of(found: Speeds, count: int) -> list[Weights]:
    return [found.weights(worker) for worker in range(count)]


def test_a_worker_of_half_the_speed_counts_double() -> None:
    found = served([1, 1, 0.5, 0.25])
    assert weights_of(found, 3) == [EVEN, EVEN, Weights(2, 2)]
    # A few pairs that say nothing different are always assumed.
    assert found.weights(3) in (Weights(4, 4), Weights(2**1.5, 2**1.5))


@pytest.mark.parametrize("seed", range(5))
def test_noise_changes_little(seed: int) -> None:
    for prefill, decode in weights_of(served([1, 1, 1, 1], noise=0.4, seed=seed), 4):
        assert (prefill, decode) == EVEN
    found = served([1, 1, 0.5, 0.25], noise=0.4, seed=seed)
    for worker, slower in enumerate([1, 1, 2, 4]):
        for weight in found.weights(worker):
            assert slower / 1.5 < weight < slower * 1.5


@pytest.mark.parametrize("count", [16, 64, 200])
def test_a_busy_machine_hardly_ever_makes_equal_workers_look_different(count: int) -> None:
    found = [served([1, 1], count=count, noise=0.8, seed=seed) for seed in range(20)]
    equal = [weights_of(each, 2) == [EVEN, EVEN] for each in found]
    assert equal.count(True) >= 18


def test_what_every_request_takes_in_addition_is_no_speed() -> None:
    """A worker that gets short requests alone is not slower for it."""
    found, chance = Speeds(), random.Random(1)
    for number in range(200):
        for worker, median in enumerate((6.0, 9.0)):
            tokens = int(chance.lognormvariate(median, 1))
            found.prefilled(worker, tokens, 0.2 + tokens * TOKEN_S, number / 10)
    found.refresh(20)
    assert weights_of(found, 2) == [EVEN, EVEN]


@pytest.mark.parametrize("absurd_s", [1e-9, 599.0])
def test_a_fifth_of_the_samples_may_be_absurd(absurd_s: float) -> None:
    def spoil(number: int, seconds: float) -> float:
        return absurd_s if number % 5 == 0 else seconds

    found = served([1, 1, 0.5], spoil=spoil)
    assert weights_of(found, 2) == [EVEN, EVEN]
    assert found.weights(2).prefill == pytest.approx(2, rel=0.5)


samples = st.tuples(
    st.integers(0, 3),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(-10, 10_000),
)


@given(st.lists(samples, max_size=200), st.lists(samples, max_size=200))
@settings(deadline=None)
def test_weights_never_leave_their_bounds(
    prefills: list[tuple[int, float, float, float]],
    decodes: list[tuple[int, float, float, float]],
) -> None:
    found, now_s = Speeds(), 0.0
    for prefilled, decoded in zip(prefills, decodes, strict=False):
        now_s += REFRESH_S
        found.prefilled(*prefilled)
        found.decoded(*decoded)
        found.refresh(now_s)
        for weight in (w for each in range(4) for w in found.weights(each)):
            assert LEAST <= weight <= MOST
        for expected in (0, 100, 10**9):
            assert 0 <= found.answer_tokens(expected) <= MOST_OUTPUT * MOST_STEP_TOKENS
    assert len(found) <= 4


@given(st.floats(0.001, 1000), st.floats(0.001, 1000))
@settings(max_examples=30, deadline=None)
def test_one_worker_more_slow_than_bounds_allow_stays_within_them(one: float, other: float) -> None:
    found = served([one, other], count=40)
    for weights in weights_of(found, 2):
        assert all(LEAST <= weight <= MOST for weight in weights)


def test_what_is_old_is_forgotten() -> None:
    found = served([1, 1, 0.25])
    before = found.weights(2)
    found.refresh(60 + SPAN_S)
    assert 1 < found.weights(2).prefill <= before.prefill
    assert set(found.refresh(60 + 10 * SPAN_S)) == {2}
    assert found.weights(2) == EVEN


def test_a_worker_that_has_recovered_is_as_fast_as_the_others_soon() -> None:
    found, chance = served([1, 1, 0.25]), random.Random(2)
    for number in range(2 * LATEST):
        for worker in range(3):
            tokens = int(chance.lognormvariate(7.5, 1.2))
            found.prefilled(worker, tokens, BASE_S + tokens * TOKEN_S, 61 + number)
            found.decoded(worker, tokens, tokens * STEP_S, 61 + number)
    found.refresh(200)
    assert weights_of(found, 3) == [EVEN] * 3


def test_nothing_is_learned_of_one_worker_alone() -> None:
    assert served([0.25]).weights(0) == EVEN


def test_without_learning_all_workers_are_equal() -> None:
    found = served([1, 1, 0.25])
    found.learns = False
    assert found.refresh(61 + REFRESH_S) == [2]
    assert weights_of(found, 3) == [EVEN] * 3
    found.prefilled(2, 10_000, 100, 70)
    found.decoded(2, 10_000, 100, 70)
    assert (len(found), found.answer_tokens(500)) == (0, 0)


def test_a_worker_that_is_gone_is_forgotten() -> None:
    found = served([1, 1, 0.25])
    found.forget(2)
    found.forget(7)
    assert found.weights(2) == EVEN
    assert len(found) == 2


def test_weights_change_at_most_once_a_second() -> None:
    found = served([1, 1, 0.25])
    found.forget(2)
    for number in range(LATEST):
        found.prefilled(2, 1_000 + 50 * number, 1 + number, 61)
    assert found.refresh(61.5) == []
    assert found.refresh(61 + REFRESH_S) == [2]


def test_an_answer_costs_what_the_usual_worker_could_prefill_meanwhile() -> None:
    found = served([1, 1, 0.5])
    assert found.answer_tokens(300) == pytest.approx(300 * STEP_S / TOKEN_S, rel=0.05)
    assert found.answer_tokens() == pytest.approx(230 * STEP_S / TOKEN_S, rel=0.4)
    assert served([1, 1, 1]).answer_tokens(300) == 0


def test_a_slope_keeps_the_latest_samples() -> None:
    slope = Slope(1)
    for number in range(10_000):
        slope.add(1 + number % 100, 0.5, number)
    for seconds, count in ((1.0, LATEST), (3.0, LATEST)):
        for number in range(count):
            slope.add(1 + number, seconds * number + 1, 10_000)
        assert slope.slope == pytest.approx(seconds)
    assert slope.pairs(10_000) <= LATEST / 2
    assert math.isclose(slope.pairs(10_000 + SPAN_S), slope.pairs(10_000) / math.e)
