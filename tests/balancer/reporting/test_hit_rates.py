"""Hit rates of engines from samples of counters."""

from __future__ import annotations

from sgl_ext.balancer.metrics.instruments import Labels
from sgl_ext.balancer.reporting.activity import HIT_RATE_S, HIT_RATE_SAMPLES, HitRates


def test_what_is_older_than_the_samples_does_not_count() -> None:
    cached: dict[Labels, int] = {("a",): 100}
    prompt: dict[Labels, int] = {("a",): 100}
    rates = HitRates(cached, prompt)
    assert rates.recent("a") == (100, 100)
    for number in range(HIT_RATE_SAMPLES):
        rates.sample(number * HIT_RATE_S, ["a"])
    prompt["a",] += 50
    assert rates.recent("a") == (0, 50)
    assert rates.recent("b") == (0, 0)


def test_samples_are_taken_once_an_interval() -> None:
    cached: dict[Labels, int] = {("a",): 1}
    prompt: dict[Labels, int] = {("a",): 10}
    rates = HitRates(cached, prompt)
    for number in range(5 * HIT_RATE_SAMPLES):
        rates.sample(number / 1000, ["a"])
    assert rates.recent("a") == (1, 10)


def test_an_engine_that_takes_over_a_name_begins_anew() -> None:
    cached: dict[Labels, int] = {("a",): 1000}
    prompt: dict[Labels, int] = {("a",): 1000}
    rates = HitRates(cached, prompt)
    for number in range(HIT_RATE_SAMPLES + 1):
        rates.sample(number * HIT_RATE_S, ["a"])
    cached["a",], prompt["a",] = 5, 10
    assert rates.recent("a") == (5, 10)
