"""A shortlist: the choice among few workers is the choice among all, within the stated bound."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from scheduler.placement import (
    DELAY,
    PlacementRequest,
    WorkerView,
    place,
    rendezvous,
    score_all,
    standing_cost,
)
from scheduler.shortlist import MOST_GROUPS, MOST_PICKED, SMALL_FLEET, Shortlist, bits_of

PREFIX = 0x1234


def fleet_of(views: list[WorkerView]) -> Shortlist:
    """A shortlist of workers that are numbered as they are listed."""
    fleet = Shortlist()
    for number, view in enumerate(views):
        fleet.put(number, rendezvous(0, view.name), view)
    return fleet


def groups_of(views: list[WorkerView]) -> list[int]:
    """Those that hold the same, as the router finds them: the most first."""
    masks: dict[int, int] = {}
    for number, view in enumerate(views):
        if view.held_tokens:
            masks[view.held_tokens] = masks.get(view.held_tokens, 0) | 1 << number
    return [masks[tokens] for tokens in sorted(masks, reverse=True)]


def picked(
    views: list[WorkerView], *, is_new: bool, full: frozenset[int] = frozenset()
) -> list[WorkerView]:
    found = fleet_of(views).pick(groups_of(views), lambda number: number not in full, is_new=is_new)
    assert len(found) == len(set(found))
    return [views[number] for number in found]


def mean_of(views: list[WorkerView]) -> float:
    return sum(view.session_tokens for view in views) / len(views)


loads = st.builds(
    WorkerView,
    name=st.just(""),
    held_tokens=st.sampled_from([0, 0, 0, 1_000, 5_000, 20_000, 80_000]),
    pending_tokens=st.integers(0, 3).map(lambda n: n * 7_000),
    decoding=st.integers(0, 20),
    recent_tokens=st.floats(0, 100_000),
    session_tokens=st.integers(0, 2_000_000),
    prefill_weight=st.sampled_from([1.0, 1.0, 1.0, 2.0]),
    decode_weight=st.sampled_from([1.0, 1.0, 1.0, 4.0]),
)


@st.composite
def fleets(draw: st.DrawFn) -> list[WorkerView]:
    """Up to 300 workers of few kinds, so that there are ties and crowded groups."""
    kinds = draw(st.lists(loads, min_size=1, max_size=12))
    count = draw(st.integers(SMALL_FLEET + 1, 300))
    random = draw(st.randoms(use_true_random=False))
    return [replace(random.choice(kinds), name=f"w{number}") for number in range(count)]


@given(fleets(), st.integers(0, 100_000), st.integers(0, 1 << 64), st.data())
@settings(deadline=None, max_examples=150)
def test_a_new_session_costs_little_more_than_at_the_best_of_all_workers(
    views: list[WorkerView], tokens: int, prefix: int, data: st.DataObject
) -> None:
    full = frozenset(data.draw(st.sets(st.integers(0, len(views) - 1), max_size=len(views) - 1)))
    tokens = max(tokens, *(view.held_tokens for view in views))
    request, mean = PlacementRequest(tokens, prefix, answer_tokens=20_000), mean_of(views)
    chosen = place(request, picked(views, is_new=True, full=full), mean)
    assert chosen is not None
    open_views = [view for number, view in enumerate(views) if number not in full]
    costs = {s.name: s for s in score_all(request, open_views, mean, is_new=True)}
    least = min(costs.values(), key=lambda score: score.cost)
    weight = next(view.prefill_weight for view in views if view.name == least.name)
    assert costs[chosen.worker].cost <= least.cost + weight * DELAY * least.uncached + 1


@given(fleets(), st.integers(0, 1 << 64), st.data())
@settings(deadline=None, max_examples=150)
def test_a_session_that_moves_goes_to_the_best_of_all_workers(
    views: list[WorkerView], prefix: int, data: st.DataObject
) -> None:
    """But for ties, of which each is as good."""
    at = data.draw(st.integers(0, len(views) - 1))
    views[at] = home = replace(views[at], held_tokens=100_000, pending_tokens=10_000_000)
    request = PlacementRequest(101_000, prefix, home.name, 100_000, 20_000)
    chosen = place(request, [home, *picked(views, is_new=False)], mean_of(views))
    among_all = place(request, views)
    assert chosen is not None
    assert among_all is not None
    assert (chosen.reason, among_all.reason) == ("moved", "moved")
    costs = {score.name: score.cost for score in score_all(request, views, is_new=False)}
    assert round(costs[chosen.worker]) == round(costs[among_all.worker])


@given(fleets(), st.integers(1, 30))
def test_few_workers_are_picked(views: list[WorkerView], depths: int) -> None:
    views = [
        replace(view, held_tokens=number % depths, warmth=0.5 if number % 7 == 0 else 1.0)
        for number, view in enumerate(views)
    ]
    equal = [replace(view, prefill_weight=1.0, decode_weight=1.0) for view in views]
    for is_new in (True, False):
        assert len(picked(equal, is_new=is_new)) <= 4 * (MOST_GROUPS + 1)
        # Twice as many groups for each pair of weights.
        assert len(picked(views, is_new=is_new)) <= 4 * (2 * 2 * (MOST_GROUPS + 1))


def test_all_workers_that_hold_most_are_picked_and_some_of_those_that_hold_nothing() -> None:
    views = [WorkerView(f"w{n}", pending_tokens=n) for n in range(200)]
    for deep in (150, 199):
        views[deep] = replace(views[deep], held_tokens=90_000)
    found = picked(views, is_new=True)
    assert {view.name for view in found if view.held_tokens} == {"w150", "w199"}
    assert {f"w{n}" for n in range(4)} <= {view.name for view in found}


def test_workers_beyond_the_groups_that_are_told_apart_still_count() -> None:
    views = [WorkerView(f"w{n}", held_tokens=1_000 * (n % 20), decoding=n) for n in range(200)]
    found = picked(views, is_new=True)
    assert len({view.held_tokens for view in found}) > MOST_GROUPS
    assert views[0] in found


def test_workers_that_warm_up_do_not_hide_the_others() -> None:
    """They are idle, and yet worse for a long prompt."""
    warming = [WorkerView(f"new{n}", warmth=0.05) for n in range(100)]
    warm = [WorkerView(f"old{n}", pending_tokens=5_000) for n in range(100)]
    request = PlacementRequest(50_000, PREFIX)
    chosen = place(request, picked([*warming, *warm], is_new=True))
    assert chosen is not None
    assert chosen.worker.startswith("old")


def test_slow_workers_do_not_hide_the_others() -> None:
    """They are idle, and yet worse for a long prompt or a long answer."""
    slow = [WorkerView(f"slow{n}", prefill_weight=4.0) for n in range(100)]
    late = [WorkerView(f"late{n}", decode_weight=4.0) for n in range(100)]
    fast = [WorkerView(f"fast{n}", pending_tokens=5_000) for n in range(100)]
    request = PlacementRequest(50_000, PREFIX, answer_tokens=40_000)
    chosen = place(request, picked([*slow, *late, *fast], is_new=True))
    assert chosen is not None
    assert chosen.worker.startswith("fast")


def test_balancers_that_number_workers_differently_pick_the_same() -> None:
    views = [WorkerView(f"w{n}") for n in range(300)]
    one = {view.name for view in picked(views, is_new=True)}
    assert one == {view.name for view in picked(views[::-1], is_new=True)}


def test_a_worker_is_where_its_last_load_puts_it_until_it_is_removed() -> None:
    views = [WorkerView(f"w{n}", pending_tokens=n) for n in range(100)]
    fleet = fleet_of(views)
    fleet.put(99, 0, WorkerView("w99"))
    fleet.put(0, 0, WorkerView("w0", pending_tokens=500, warmth=0.5))
    fleet.put(0, 0, WorkerView("w0", pending_tokens=500))
    fleet.check()
    found = fleet.pick([], lambda _: True, is_new=True)
    assert found == [99, *range(1, MOST_PICKED)]
    for number in (99, 99, 5):
        fleet.remove(number)
    fleet.check()
    assert len(fleet) == 98
    assert fleet.pick([1 << 99], lambda _: True, is_new=True)[:5] == [1, 2, 3, 4, 6]
    assert fleet.pick([], lambda _: False, is_new=False) == []
    assert Shortlist().pick([7], lambda _: True, is_new=True) == []


def test_a_standing_cost_is_that_of_a_request_without_a_prompt() -> None:
    view = WorkerView("a", 500, 300, 2, 9_000.0, 40_000)
    for is_new in (True, False):
        (score,) = score_all(PlacementRequest(0, PREFIX), [view], is_new=is_new)
        assert standing_cost(view, is_new=is_new) == pytest.approx(score.cost)


def test_the_bits_of_a_mask() -> None:
    assert list(bits_of(0b1011 | 1 << 2_000)) == [0, 1, 3, 2_000]
