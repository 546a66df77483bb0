"""The retry budget: a share of the requests, with a small reserve."""

from __future__ import annotations

from scheduler.retry_budget import RetryBudget


def test_retries_are_a_share_of_the_requests() -> None:
    budget = RetryBudget(share=0.5, reserve=0)
    for _ in range(10):
        budget.requested()
    assert [budget.spend() for _ in range(6)] == [True] * 5 + [False]


def test_a_quiet_node_has_a_reserve_and_a_busy_one_does_not_hoard() -> None:
    budget = RetryBudget(share=1, reserve=1, most=3)
    assert budget.spend()
    assert not budget.spend()
    for _ in range(100):
        budget.requested()
    assert [budget.spend() for _ in range(4)] == [True] * 3 + [False]
