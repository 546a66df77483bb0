"""The breaker: failures cause a trial, and the trial decides."""

from __future__ import annotations

from scheduler.breaker import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker, RetryBudget, State


def suspected() -> Breaker:
    breaker = Breaker()
    fail(breaker, FAILURES)
    return breaker


def fail(breaker: Breaker, times: int, *, answered: bool = True) -> None:
    for _ in range(times):
        breaker.failed(0, answered=answered)


def opened(now_s: float = 0.0) -> Breaker:
    breaker = suspected()
    breaker.trial_failed(now_s)
    return breaker


def test_failures_in_a_row_cause_a_trial() -> None:
    breaker = Breaker()
    for _ in range(2):
        fail(breaker, FAILURES - 1)
        assert not breaker.wants_trial(0), "a success in between resets the count"
        breaker.succeeded()
    fail(breaker, FAILURES)
    assert breaker.wants_trial(0)


def test_error_responses_alone_do_not_open_the_breaker() -> None:
    breaker = Breaker()
    fail(breaker, 100)
    assert breaker.takes_requests
    breaker.succeeded()  # the trial
    assert breaker.state is State.CLOSED
    assert not breaker.wants_trial(0)


def test_broken_connections_open_the_breaker_until_a_trial() -> None:
    breaker = Breaker()
    fail(breaker, FAILURES - 1, answered=False)
    assert breaker.takes_requests
    fail(breaker, 2, answered=False)
    assert not breaker.takes_requests
    assert not breaker.wants_trial(FIRST_PAUSE_S - 0.01)
    assert breaker.wants_trial(FIRST_PAUSE_S)


def test_a_failed_trial_opens_it_and_the_next_one_closes_it() -> None:
    breaker = opened()
    assert not breaker.takes_requests
    assert not breaker.wants_trial(FIRST_PAUSE_S - 0.01)
    assert breaker.wants_trial(FIRST_PAUSE_S)
    breaker.succeeded()
    assert breaker.state is State.CLOSED
    assert breaker.takes_requests


def test_a_failed_trial_doubles_the_pause_up_to_a_limit() -> None:
    breaker, now_s, pauses = opened(), 0.0, []
    for _ in range(8):
        began_s = now_s
        while not breaker.wants_trial(now_s):
            now_s += 0.5
        pauses.append(now_s - began_s)
        breaker.trial_failed(now_s)
    assert pauses[:4] == [1, 2, 4, 8]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_a_request_that_succeeds_outweighs_a_failed_trial() -> None:
    breaker = suspected()
    breaker.succeeded()
    breaker.trial_failed(0)
    assert breaker.takes_requests


def test_retries_are_a_share_of_the_requests() -> None:
    budget = RetryBudget(share=0.5, reserve=0)
    for _ in range(10):
        budget.add_request()
    assert [budget.spend() for _ in range(6)] == [True] * 5 + [False]


def test_a_quiet_node_has_a_reserve_and_a_busy_one_saves_a_limited_number() -> None:
    budget = RetryBudget(share=1, reserve=1, limit=3)
    assert budget.spend()
    assert not budget.spend()
    for _ in range(100):
        budget.add_request()
    assert [budget.spend() for _ in range(4)] == [True] * 3 + [False]
