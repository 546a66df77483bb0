"""The last hour by interval, of one process and of several."""

from __future__ import annotations

import pytest

from sgl_ext.balancer.reporting.activity import HISTORY_INTERVALS, INTERVAL_S, History, series

START_S = 1_000_000.0


def test_an_interval_shows_once_it_is_complete() -> None:
    history = History(START_S)
    history.add(START_S + 1, 0.2, prompt=1000, cached=900, output=50)
    history.add(START_S + 2, 0.2, prompt=1000, cached=0, output=150)
    assert series([history.as_json()], START_S + 9)["hit_rate"] == []
    shown = series([history.as_json()], START_S + 25)
    assert shown["end_s"] == START_S + 2 * INTERVAL_S
    assert shown["hit_rate"] == [0.45, None]
    assert shown["requests_per_s"] == [0.2, 0.0]
    assert shown["output_tokens_per_s"] == [20.0, 0.0]
    assert shown["ttft_p50_s"] == [pytest.approx(0.2, rel=0.06), None]


def test_quantiles_are_off_by_five_percent() -> None:
    history = History(START_S)
    for number in range(1, 1001):
        history.add(START_S, number / 100, prompt=0, cached=0, output=0)
    shown = series([history.as_json()], START_S + INTERVAL_S)
    assert shown["ttft_p50_s"] == [pytest.approx(5.0, rel=0.06)]
    assert shown["ttft_p99_s"] == [pytest.approx(9.9, rel=0.06)]
    assert shown["hit_rate"] == [None]


@pytest.mark.parametrize("ttft_s", [0.0, 1e-9, 1e9])
def test_every_ttft_has_a_bucket(ttft_s: float) -> None:
    history = History(START_S)
    history.add(START_S, ttft_s, prompt=0, cached=0, output=0)
    assert series([history.as_json()], START_S + INTERVAL_S)["ttft_p50_s"][0] > 0


def test_a_request_without_a_ttft_counts_as_a_request() -> None:
    history = History(START_S)
    history.add(START_S, None, prompt=0, cached=0, output=0)
    shown = series([history.as_json()], START_S + INTERVAL_S)
    assert (shown["requests_per_s"], shown["ttft_p99_s"]) == ([0.1], [None])


def test_it_is_an_hour_long() -> None:
    history = History(START_S)
    for number in range(2 * HISTORY_INTERVALS):
        history.add(START_S + number * INTERVAL_S, 0.1, prompt=10, cached=number % 10, output=0)
    document = history.as_json()
    assert len(document["intervals"]) <= HISTORY_INTERVALS + 1
    shown = series([document], START_S + 2 * HISTORY_INTERVALS * INTERVAL_S)
    assert len(shown["hit_rate"]) == HISTORY_INTERVALS
    assert shown["hit_rate"][-1] == 0.9
    late = series([document], START_S + 9 * HISTORY_INTERVALS * INTERVAL_S)
    assert set(late["requests_per_s"]) == {0.0}


def test_a_clock_that_jumps_back_leaves_it_bounded() -> None:
    history = History(START_S)
    for number in range(3 * HISTORY_INTERVALS, 0, -1):
        history.add(START_S + number * INTERVAL_S, 0.1, prompt=0, cached=0, output=0)
    assert len(history.as_json()["intervals"]) <= HISTORY_INTERVALS + 1


def test_the_last_minute_is_summed() -> None:
    history = History(START_S)
    assert series([history.as_json()], START_S)["recent"]["requests_per_s"] is None
    for at_s, cached in ((0, 1000), (10, 0), (60, 500)):
        history.add(START_S + at_s, 0.5, prompt=1000, cached=cached, output=60)
    recent = series([history.as_json()], START_S + 20)["recent"]
    assert (recent["span_s"], recent["requests_per_s"]) == (20, 0.1)
    assert recent["output_tokens_per_s"] == 6.0
    recent = series([history.as_json()], START_S + 70)["recent"]
    assert (recent["span_s"], recent["hit_rate"]) == (60, 0.25)
    assert recent["ttft_p99_s"] == pytest.approx(0.5, rel=0.06)


def test_processes_add_up() -> None:
    one, two = History(START_S), History(START_S + INTERVAL_S)
    one.add(START_S + 12, 0.1, prompt=100, cached=100, output=0)
    two.add(START_S + 13, 1.0, prompt=300, cached=0, output=20)
    shown = series([one.as_json(), two.as_json()], START_S + 2 * INTERVAL_S)
    assert shown["hit_rate"] == [None, 0.25]
    assert shown["requests_per_s"] == [0.0, 0.2]
    assert shown["ttft_p99_s"][1] == pytest.approx(1.0, rel=0.06)
