"""The retry budget: a share of the requests, with a small reserve."""

from __future__ import annotations

from scheduler.retry_budget import RetryBudget


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
