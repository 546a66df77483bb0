"""The breaker: shut out after failures in a row, one trial after a pause, back after a success."""

from __future__ import annotations

from scheduler.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker, State


def opened(now_s: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(now_s)
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN - 1):
        breaker.failed(0)
    assert breaker.allows(0)
    breaker.succeeded()
    for _ in range(FAILURES_TO_OPEN - 1):
        breaker.failed(0)
    assert breaker.allows(0), "a success in between starts the count anew"
    breaker.failed(0)
    assert not breaker.allows(0)


def test_after_the_pause_one_trial_goes_and_closes_it() -> None:
    breaker = opened()
    assert not breaker.allows(FIRST_PAUSE_S - 0.01)
    assert breaker.allows(FIRST_PAUSE_S)
    breaker.sent(FIRST_PAUSE_S)
    assert not breaker.allows(FIRST_PAUSE_S), "one trial at a time"
    breaker.succeeded()
    assert breaker.state is State.CLOSED


def test_a_failed_trial_doubles_the_pause_up_to_a_limit() -> None:
    breaker, now_s, pauses = opened(), 0.0, []
    for _ in range(8):
        began_s = now_s
        while not breaker.allows(now_s):
            now_s += 0.5
        pauses.append(now_s - began_s)
        breaker.sent(now_s)
        breaker.failed(now_s)
    assert pauses[:4] == [1, 2, 4, 8]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_a_trial_that_its_client_abandons_is_made_again() -> None:
    breaker = opened()
    breaker.sent(FIRST_PAUSE_S)
    breaker.abandoned()
    assert breaker.allows(FIRST_PAUSE_S)


def test_a_trial_that_never_ends_does_not_shut_the_worker_out_for_good() -> None:
    breaker = opened()
    breaker.sent(FIRST_PAUSE_S)
    assert breaker.allows(FIRST_PAUSE_S + LONGEST_PAUSE_S)
