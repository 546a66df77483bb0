"""The comparison of routers: what it counts, in which order arms run, and when it is not valid."""

from __future__ import annotations

import pytest

from bench.lib.script import NotValid
from bench.routing import POLICIES, check_controls, moves_of, order_of


def test_a_request_moves_if_the_one_before_of_its_conversation_went_elsewhere() -> None:
    one = [(1.0, "a"), (2.0, "b"), (5.0, "a")]
    other = [(3.0, "a"), (4.0, "b"), (6.0, "c")]
    assert moves_of([one, other]) == 3
    assert moves_of([one, []]) == 0


def test_every_arm_runs_in_each_round_and_in_another_order() -> None:
    orders = [tuple(order_of(POLICIES, number)) for number in range(5)]
    assert all(sorted(order) == sorted(POLICIES) for order in orders)
    assert len(set(orders)) == 5
    assert orders[0].index("smg") < orders[0].index("vllm_router")
    assert orders[1].index("smg") > orders[1].index("vllm_router")


def test_a_run_on_a_machine_that_became_slower_by_more_than_a_third_is_not_valid() -> None:
    check_controls([6.0, 7.9, 6.5])
    with pytest.raises(NotValid, match=r"slowest_control_ms=8\.1"):
        check_controls([6.0, 8.1, 6.5])
