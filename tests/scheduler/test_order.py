"""Serving order: priority and age, tenants in turn, cheapest first, and a bound on overtaking."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import order
from scheduler.order import (
    MOST,
    MOST_NEW,
    SORTED_FOR_S,
    WORK,
    Entry,
    OrderedQueue,
    Served,
    Waiting,
    due_at,
    in_order,
    step,
    window_of,
)

NOW_S = 100.0
# Quarters, and powers of two to divide by, so that no sum is rounded.
times_s = st.integers(0, int(NOW_S) * 4).map(lambda quarters: quarters / 4)
agings_s = st.sampled_from([0.5, 1.0, 4.0, 16.0, inf])
windows_s = st.sampled_from([0.0, 0.5, 4.0, 32.0, 1024.0])
tokens = st.integers(0, 50)


def queues(tenants: str) -> st.SearchStrategy[list[Waiting]]:
    one = st.builds(
        Waiting,
        st.integers(-2, 4),
        times_s,
        tokens,
        st.sampled_from(tenants),
        st.just(inf) | times_s,
    )
    return st.lists(one, max_size=12)


served_lately = st.dictionaries(st.sampled_from("abc"), tokens.map(float))
given_weights = st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 2.0, 4.0]))


def bound_s(priority: int, highest: int, aging_s: float, window_s: float = 0.0) -> float:
    """How much later a request must arrive so that it never overtakes one of `priority`."""
    if not 0 < aging_s < inf:
        return inf
    return (highest - priority) * aging_s + max(aging_s, window_s)


def test_each_full_aging_time_waited_adds_a_step() -> None:
    assert [step(3, waited_s, 10) for waited_s in (0, 9.9, 10, 29.9, 30)] == [3, 3, 4, 5, 6]


@pytest.mark.parametrize("aging_s", [inf, 0.0])
def test_without_aging_the_step_is_the_priority(aging_s: float) -> None:
    assert step(3, 1e9, aging_s) == 3


def test_a_negative_wait_counts_as_none() -> None:
    assert step(3, -100, 10) == 3
    assert step(3, -100, 0.001) == 3
    waiting = [Waiting(0, NOW_S + 100, 1), Waiting(0, NOW_S, 2)]
    assert in_order(waiting, NOW_S, 0.001) == [0, 1]


def test_the_more_important_goes_first_until_the_other_has_waited_for_longer() -> None:
    waiting = [Waiting(0, 100, 1), Waiting(5, 100, 9000), Waiting(0, 40, 500)]
    assert in_order(waiting, NOW_S, 10) == [2, 1, 0]
    assert in_order(waiting, NOW_S, inf) == [1, 0, 2]
    assert in_order(waiting, NOW_S, 10, window_s=30) == [2, 1, 0]
    assert in_order(waiting, NOW_S, 10, window_s=35) == [1, 2, 0], "they are in one window"


def test_within_a_window_the_cheapest_goes_first_whichever_waits_for_longer() -> None:
    waiting = [Waiting(0, 45, 9), Waiting(0, 75, 5), Waiting(0, 95, 1)]
    assert in_order(waiting, NOW_S, 10) == [0, 1, 2]
    assert in_order(waiting, NOW_S, 10, window_s=30) == [0, 2, 1]
    assert in_order(waiting, NOW_S, 10, window_s=60) == [2, 1, 0]
    assert in_order(waiting, NOW_S, 10, window_s=5) == in_order(waiting, NOW_S, 10)


def test_a_window_is_as_long_as_the_work_that_waits_asks_for_within_bounds() -> None:
    assert window_of(0.0, 10) == 10, "what waits is not known, or nothing does"
    assert window_of(5.0, 10) == WORK * 5.0
    assert window_of(1e9, 10) == MOST * 10
    assert window_of(1.0, 10, 30.0) == 30.0, "as long as in the queue before"
    assert window_of(1.0, 10, 1e9) == MOST * 10
    assert window_of(5.0, 0) == 0, "without aging there are no windows"
    assert window_of(5.0, inf) == inf


def test_of_one_tenant_the_cheapest_goes_first_then_the_earliest() -> None:
    waiting = [Waiting(0, 9, 5), Waiting(0, 3, 7), Waiting(0, 8, 5), Waiting(0, 8, 5)]
    assert in_order(waiting, NOW_S, inf) == [2, 3, 0, 1]


def test_a_deadline_orders_within_a_priority() -> None:
    waiting = [
        Waiting(0, 9, 1),
        Waiting(0, 9, 7, due_s=due_at(9, 2.0)),
        Waiting(0, 9, 8, due_s=due_at(9, 1.0)),
        Waiting(1, 9, 9, due_s=due_at(9, None)),
    ]
    assert in_order(waiting, 9, inf) == [3, 2, 1, 0]


def test_a_deadline_takes_no_turn_of_another_tenant() -> None:
    hurried = [Waiting(0, 1, 5, "a", due_s=0.0) for _ in range(3)]
    order = in_order([*hurried, Waiting(0, 2, 5, "b")], 4, inf)
    assert order.index(3) == 1


def test_requests_without_a_cost_go_first() -> None:
    assert in_order([Waiting(0, 1, 9), Waiting(0, 2, 0), Waiting(0, 3, -1)], 4, inf) == [2, 1, 0]


def test_tenants_take_turns_however_many_requests_they_have() -> None:
    waiting = [Waiting(0, at_s, 10, "many") for at_s in range(6)]
    waiting += [Waiting(0, 50 + at_s, 10, "few") for at_s in range(2)]
    assert in_order(waiting, NOW_S, inf) == [0, 6, 1, 7, 2, 3, 4, 5]


def test_tenants_get_shares_by_weight() -> None:
    waiting = [Waiting(0, 1, 10, tenant) for tenant in "ababababab"]
    order = in_order(waiting, NOW_S, inf, weights={"a": 4})
    assert "".join(waiting[position].tenant for position in order) == "abaaababbb"


def test_the_tenant_that_was_given_most_recently_goes_last() -> None:
    waiting = [Waiting(0, 1, 1, "a"), Waiting(0, 2, 1, "b"), Waiting(0, 3, 1, "c")]
    assert in_order(waiting, NOW_S, inf, {"a": 90, "b": 40}) == [2, 1, 0]
    assert in_order(waiting, NOW_S, inf, {"a": 90, "b": 40}, {"a": 3}) == [2, 0, 1]


def test_what_goes_first_for_its_priority_counts_for_its_tenant() -> None:
    waiting = [Waiting(9, 1, 10, "a"), Waiting(0, 1, 5, "a"), Waiting(0, 2, 5, "b")]
    assert in_order(waiting, NOW_S, inf) == [0, 2, 1]


def test_an_expensive_request_waits_no_longer_than_the_bound() -> None:
    aging_s = 8.0
    late_s = bound_s(1, 3, aging_s)
    assert late_s == 24
    slow = Waiting(1, 0, 10**9, "a")
    most = [slow, Waiting(3, late_s + 8, 1, "b")]
    assert in_order(most, 32, aging_s, window_s=16) == [0, 1]
    assert in_order(most, 32, aging_s, window_s=24) == [1, 0], "a longer window, a larger bound"
    for tenant in "ab":
        soon = [slow, Waiting(3, late_s - 0.25, 1, tenant)]
        assert in_order(soon, 31.75, aging_s, {"a": 1}) == [1, 0], "the bound is tight"
        for now_s in (24, 31.75, 1000):
            assert in_order([slow, Waiting(3, late_s, 1, tenant)], now_s, aging_s) == [0, 1]


@settings(max_examples=150)
@given(
    st.one_of(queues("a"), queues("abc")),
    agings_s,
    served_lately,
    given_weights,
    windows_s,
)
def test_a_request_that_arrives_after_the_bound_does_not_overtake(
    waiting: list[Waiting],
    aging_s: float,
    served: dict[str, float],
    weights: dict[str, float],
    window_s: float,
) -> None:
    order = in_order(waiting, NOW_S, aging_s, served, weights, window_s)
    assert sorted(order) == list(range(len(waiting)))
    highest = max((request.priority for request in waiting), default=0)
    for rank, ahead in enumerate(order):
        for behind in order[rank + 1 :]:
            late_s = waiting[ahead].arrived_s - waiting[behind].arrived_s
            most_s = bound_s(waiting[behind].priority, highest, aging_s, window_s)
            assert late_s < most_s or late_s < 0


@settings(max_examples=100)
@given(queues("abc"), agings_s, served_lately, given_weights, windows_s)
def test_of_each_tenant_window_and_priority_the_first_due_then_the_cheapest_goes_first(
    waiting: list[Waiting],
    aging_s: float,
    served: dict[str, float],
    weights: dict[str, float],
    window_s: float,
) -> None:
    order = in_order(waiting, NOW_S, aging_s, served, weights, window_s)

    def level(position: int) -> tuple[float, int]:
        request = waiting[position]
        if aging_s == inf:
            return 0, request.priority
        lead_s = request.priority * aging_s + NOW_S - request.arrived_s
        return lead_s // max(aging_s, window_s), request.priority

    assert [level(p) for p in order] == sorted(map(level, order), reverse=True)
    for tenant in "abc":
        for reached in {*map(level, order)}:
            own = [p for p in order if waiting[p].tenant == tenant and level(p) == reached]
            ranked = [waiting[p] for p in own]
            keys = [(one.due_s, one.cost_tokens, one.arrived_s) for one in ranked]
            assert keys == sorted(keys)


@settings(max_examples=100)
@given(queues("abc"), agings_s, served_lately, given_weights)
def test_serving_the_first_leaves_the_order_of_the_rest(
    waiting: list[Waiting], aging_s: float, served: dict[str, float], weights: dict[str, float]
) -> None:
    order = in_order(waiting, NOW_S, aging_s, served, weights)
    for first in order[:1]:
        tenant = waiting[first].tenant
        counted = {**served, tenant: served.get(tenant, 0) + waiting[first].cost_tokens}
        rest = [position for position in range(len(waiting)) if position != first]
        again = in_order([waiting[p] for p in rest], NOW_S, aging_s, counted, weights)
        assert [rest[p] for p in again] == order[1:]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from("abc"), tokens), max_size=20), given_weights)
def test_shares_of_waiting_tenants_differ_by_at_most_one_request(
    requests: list[tuple[str, int]], weights: dict[str, float]
) -> None:
    waiting = [Waiting(0, 0, cost, tenant) for tenant, cost in requests]
    order = in_order(waiting, NOW_S, inf, weights=weights)
    left = {tenant: sum(request.tenant == tenant for request in waiting) for tenant in "abc"}
    shares = dict.fromkeys("abc", 0.0)
    most = max(
        (request.cost_tokens / weights.get(request.tenant, 1) for request in waiting), default=0
    )
    for position in order:
        tenant = waiting[position].tenant
        wait = [shares[name] for name in "abc" if left[name]]
        assert max(wait) - min(wait) <= most
        shares[tenant] += waiting[position].cost_tokens / weights.get(tenant, 1)
        left[tenant] -= 1


@settings(max_examples=100)
@given(queues("abc"), agings_s, st.randoms(use_true_random=False))
def test_positions_decide_only_between_equal_requests(
    waiting: list[Waiting], aging_s: float, random: Random
) -> None:
    waiting = [one._replace(arrived_s=number / 4) for number, one in enumerate(waiting)]
    shuffled = random.sample(waiting, len(waiting))
    order = [waiting[position] for position in in_order(waiting, NOW_S, aging_s)]
    assert [shuffled[position] for position in in_order(shuffled, NOW_S, aging_s)] == order


def test_served_tokens_halve_every_half_life() -> None:
    served = Served(half_life_s=10)
    served.add("a", 64, 0)
    served.add("b", 8, 10)
    assert served.at(10) == pytest.approx({"a": 32, "b": 8})
    served.add("a", 32, 10)
    assert served.at(20) == pytest.approx({"a": 32, "b": 4})
    assert served.at(60) == pytest.approx({"a": 2}), "what is below one token is left out"


def test_the_number_of_tenants_is_limited() -> None:
    served = Served(half_life_s=10, limit=3)
    for tenant, given_tokens in (("c", 100), ("a", 50), ("b", 50), ("d", 2)):
        served.add(tenant, given_tokens, 0)
    assert served.at(0) == {"c": 100, "b": 50, "d": 2}, "the least goes, not the one that came"
    served.add("e", 60, 20)
    assert served.at(20) == pytest.approx({"c": 25, "b": 12.5, "e": 60}), "the decayed go first"
    for number in range(50):
        served.add(str(number), 5, 20)
        assert len(served.at(20)) <= 3


def names(entries: Sequence[Entry[str]]) -> list[str | None]:
    return [entry.item for entry in entries]


def test_new_entries_are_in_order() -> None:
    waits = OrderedQueue[str](0.0, Served())
    waits.add("usual", Waiting(0, 100.0, 5))
    assert names(waits.head(9, 100.0)) == ["usual"]
    waits.add("cheap", Waiting(0, 100.1, 1))
    waits.add("person", Waiting(10, 100.1, 9))
    assert names(waits.head(9, 100.1)) == ["person", "cheap", "usual"]
    assert names(waits.head(2, 100.1)) == ["person", "cheap"]


def test_a_long_wait_moves_an_entry_up_within_a_second() -> None:
    waits = OrderedQueue[str](10.0, Served())
    waits.add("long", Waiting(0, 100.0, 5))
    waits.add("cheap", Waiting(0, 105.0, 1))
    waits.sort(109.9)
    assert names(waits.head(9, 109.9)) == ["cheap", "long"]
    assert names(waits.head(9, 109.9 + SORTED_FOR_S)) == ["long", "cheap"]


def test_what_waits_decides_how_long_a_window_is() -> None:
    asked: list[int] = []

    def window_s(tokens: int) -> float:
        asked.append(tokens)
        return 30.0 if tokens > 10 else 0.0

    waits = OrderedQueue[str](10.0, Served(), window_of=window_s)
    waits.add("dear", Waiting(0, 100.0, 9))
    waits.add("cheap", Waiting(0, 112.0, 2))
    assert names(waits.head(9, 112.0)) == ["cheap", "dear"], "11 tokens wait"
    waits.remove("cheap")
    waits.add("cheaper", Waiting(0, 113.0, 1))
    assert names(waits.sort(113.0)) == ["dear", "cheaper"], "10 tokens wait"
    waits.remove("cheaper")
    waits.remove("cheaper")
    waits.sort(114.0)
    assert asked == [11, 10, 9]


def test_removed_items_are_not_referenced() -> None:
    class Who:
        pass

    waits = OrderedQueue[Who](0.0, Served())
    gone = []
    for number in range(300):
        item = Who()
        gone.append(weakref.ref(item))
        waits.add(item, Waiting(0, 100.0, number))
        if number == 200:
            waits.head(9, 100.0)
        waits.remove(item)
        del item
    gc.collect()
    assert not any(one() for one in gone)
    assert len(waits) == len(waits.head(9, 100.0)) == 0


def test_adding_an_entry_does_not_sort_the_whole_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_in_all = []
    original = order.in_order

    def counted(waiting: list[Waiting], *args: Any) -> list[int]:
        sorted_in_all.append(len(waiting))
        return original(waiting, *args)

    monkeypatch.setattr(order, "in_order", counted)
    waits = OrderedQueue[int](0.0, Served())
    for number in range(10_000):
        waits.add(number, Waiting(0, 100.0, number))
    waits.head(32, 100.0)
    assert sorted_in_all == [10_000]
    for number in range(MOST_NEW):
        waits.remove(number)
        assert waits.head(32, 100.5)[0].item == number + 1
    assert sorted_in_all == [10_000], "nothing came, so nothing is sorted"
    for number in range(MOST_NEW):
        waits.add(-number - 1, Waiting(0, 100.5, 0))
        waits.head(32, 100.5)
    assert max(sorted_in_all[1:]) <= 32 + MOST_NEW
    waits.add(10_000, Waiting(0, 100.5, 0))
    waits.head(32, 100.5)
    assert sorted_in_all[-1] == len(waits), "too many are new"


comings = st.tuples(st.integers(-1, 2), st.integers(0, 9), st.sampled_from("ab"))


@given(st.lists(comings | st.integers(0, 40), max_size=60), st.integers(1, 5))
def test_the_head_is_the_beginning_of_the_whole_order(
    events: list[tuple[int, int, str] | int], most: int
) -> None:
    waits = OrderedQueue[int](0.0, Served())
    number = 0
    for event in events:
        if isinstance(event, int):
            waits.remove(event)
        else:
            priority, cost, _ = event
            waits.add(number, Waiting(priority, 100.0 + number / 1000, cost))
            number += 1
        found = [entry.item for entry in waits.head(most, 100.1)]
        whole = OrderedQueue[int](0.0, Served())
        for entry in waits:
            assert entry.item is not None
            whole.add(entry.item, entry.waiting)
        assert found == [entry.item for entry in whole.sort(100.1)][:most]
