"""Placement: cached tokens count for what they save, sessions stay, hot prefixes spread."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from scheduler.placement import (
    DECODE_TOKENS,
    DELAY,
    LEAVE,
    RECENT,
    RECENT_FLOOR,
    SESSION_SHARE,
    Placement,
    PlacementRequest,
    WorkerView,
    choose_standby,
    is_strained,
    place,
    rendezvous,
    score_all,
    standing_cost,
    stays,
)

PREFIX = 0x1234


def placed(tokens: int, home: str | None, *views: WorkerView, last_tokens: int = 0) -> Placement:
    found = place(PlacementRequest(tokens, PREFIX, home, last_tokens), views)
    assert found is not None
    return found


def test_without_workers_there_is_no_placement() -> None:
    assert place(PlacementRequest(100, PREFIX), []) is None


def test_a_prefix_draws_a_request_to_its_worker() -> None:
    assert placed(50_000, None, WorkerView("a"), WorkerView("b", 40_000)).worker == "b"


def test_overlap_is_worth_what_it_saves_and_no_more() -> None:
    holder = WorkerView("b", held_tokens=2_000, pending_tokens=50_000)
    assert placed(3_000, None, WorkerView("a"), holder).worker == "a"


def test_requests_follow_a_shared_prefix_while_it_is_computed() -> None:
    lead = WorkerView("a", 20_000, 20_000, recent_tokens=20_000, session_tokens=20_000)
    assert placed(20_500, None, lead, WorkerView("b")).worker == "a"


def test_a_hot_prefix_spreads_earlier_to_a_worker_with_few_sessions() -> None:
    pending = 2 * 20_000
    holder = WorkerView("a", 20_000, pending, session_tokens=200_000)
    assert placed(20_500, None, holder, WorkerView("b")).worker == "b"
    shared = [holder, WorkerView("b", session_tokens=200_000)]
    assert placed(20_500, None, *shared).worker == "a"


def test_computing_a_prefix_counts_more_where_sessions_would_wait_for_it() -> None:
    queue = int((1 + DELAY) * 20_000)
    used = WorkerView("b", session_tokens=20_000)
    holder = WorkerView("a", 20_000, queue - 1, session_tokens=20_000)
    assert placed(20_500, None, holder, used).worker == "a"
    assert placed(20_500, None, replace(holder, pending_tokens=queue + 1), used).worker == "b"
    fewer = replace(used, session_tokens=10_000)
    assert placed(20_500, None, holder, fewer).worker == "b"


@given(st.integers(1, 40), st.integers(2, 8))
def test_sessions_that_all_share_a_prefix_spread_over_idle_workers(each: int, count: int) -> None:
    """Each placement counts at once, so that a burst does not queue at one worker."""
    views = {name: WorkerView(name) for name in map(str, range(count))}
    for _ in range(each * count):
        chosen = views[placed(10_500, None, *views.values()).worker]
        views[chosen.name] = replace(
            chosen,
            held_tokens=10_000,
            pending_tokens=chosen.pending_tokens + 10_500 - chosen.held_tokens,
            session_tokens=chosen.session_tokens + 10_500,
        )
    waits = [view.pending_tokens for view in views.values()]
    assert max(waits) - min(waits) <= (1 + DELAY) * 10_000


def test_harnesses_of_some_sessions_each_stay_on_one_worker() -> None:
    views = {name: WorkerView(name, session_tokens=50_000) for name in "ab"}
    holders = {0: "a", 1: "b"}
    for turn in range(40):
        harness = turn % 2
        seen = [
            replace(view, held_tokens=10_000 if holders[harness] == view.name else 0)
            for view in views.values()
        ]
        chosen = placed(10_500, None, *seen).worker
        assert chosen == holders[harness]
        view = views[chosen]
        views[chosen] = replace(
            view,
            pending_tokens=view.pending_tokens + 500,
            session_tokens=view.session_tokens + 10_500,
        )


def test_new_sessions_go_where_few_sessions_live() -> None:
    crowded = WorkerView("a", 20_000, session_tokens=int((1 + DELAY) * 20_500 / SESSION_SHARE))
    assert placed(20_500, None, crowded, WorkerView("b")).worker == "b"


def test_new_sessions_avoid_a_worker_that_computes_all_the_time() -> None:
    busy = WorkerView("a", 20_000, recent_tokens=RECENT_FLOOR + (1 + DELAY) * 20_500 / RECENT)
    assert placed(20_500, None, busy, WorkerView("b")).worker == "b"


def test_a_short_shared_prefix_stays_on_one_worker_under_light_load() -> None:
    used = WorkerView("a", 500, recent_tokens=2_000, session_tokens=4_000)
    assert placed(540, None, used, WorkerView("b")).worker == "a"


def test_a_known_session_stays_until_waiting_costs_more_than_moving() -> None:
    views = [
        WorkerView("a", 9_000, int(LEAVE * 7_000), recent_tokens=1e6, session_tokens=1_000_000),
        WorkerView("b", 2_000),
    ]
    assert placed(10_000, "a", *views, last_tokens=9_000) == Placement("a", "home")
    views[0] = replace(views[0], pending_tokens=int((LEAVE + 1 + DELAY) * 7_000))
    assert placed(10_000, "a", *views, last_tokens=9_000) == Placement("b", "moved")


def test_a_session_whose_cache_is_gone_is_placed_as_new() -> None:
    views = [WorkerView("a", 2_000, recent_tokens=90_000), WorkerView("b", 2_000)]
    assert placed(10_000, "a", *views, last_tokens=9_000) == Placement("b", "lost")


def test_a_short_session_with_few_own_tokens_stays() -> None:
    views = [WorkerView("a", 2_300, recent_tokens=90_000), WorkerView("b", 2_000)]
    assert placed(2_600, "a", *views, last_tokens=2_300) == Placement("a", "home")


def test_a_session_whose_worker_is_gone_is_placed_as_new() -> None:
    assert placed(100, "gone", WorkerView("a", 90), WorkerView("b")) == Placement("a", "new")


def test_a_worker_that_has_just_come_back_gets_less() -> None:
    views = [WorkerView("a", pending_tokens=3_000), WorkerView("b", warmth=0.1)]
    assert placed(2_000, None, *views).worker == "a"
    assert placed(2_000, None, views[0], WorkerView("b")).worker == "b"


def test_requests_without_a_prompt_go_where_little_runs() -> None:
    views = [WorkerView("a", decoding=3), WorkerView("b", decoding=1)]
    assert placed(0, None, *views).worker == "b"


views_of_equal_load = st.lists(
    st.sampled_from([f"http://10.0.0.{n}" for n in range(9)]), min_size=1, max_size=9, unique=True
)


@given(views_of_equal_load, st.integers(0, 1 << 128))
def test_balancers_break_ties_alike(names: list[str], prefix: int) -> None:
    views = [WorkerView(name) for name in names]
    first = place(PlacementRequest(1000, prefix), views)
    assert first is not None
    assert first == place(PlacementRequest(1000, prefix), views[::-1])
    assert first.worker == max(names, key=lambda name: rendezvous(prefix, name))
    stayed = [v for v in views if v.name == first.worker or len(v.name) % 2]
    again = place(PlacementRequest(1000, prefix), stayed)
    assert again is not None
    assert again.worker == first.worker, "a worker that leaves moves only its own prefixes"


def test_less_than_a_token_is_a_tie_as_balancers_add_up_in_another_order() -> None:
    one, other = 9000.0, 9000.000001
    for prefix in range(50):
        request = PlacementRequest(1000, prefix)
        places = [
            place(request, [WorkerView("a", recent_tokens=a), WorkerView("b", recent_tokens=b)])
            for a, b in ((one, other), (other, one))
        ]
        assert places[0] == places[1]


def test_ties_of_many_prefixes_spread_over_all_workers() -> None:
    views = [WorkerView(f"w{n}") for n in range(4)]
    placements = [place(PlacementRequest(1000, prefix), views) for prefix in range(400)]
    shares = [sum(p is not None and p.worker == v.name for p in placements) for v in views]
    assert min(shares) > 60


def test_a_token_that_a_worker_loads_costs_its_share_of_a_computed_one() -> None:
    on_host = WorkerView("a", held_tokens=1_000, host_tokens=8_000, load_share=0.2)
    (score,) = score_all(PlacementRequest(10_000, PREFIX), [on_host], is_new=False)
    assert (score.uncached, score.loaded) == (1_000, 1_600)
    shared = replace(on_host, shared_tokens=1_000, shared_share=0.5)
    (score,) = score_all(PlacementRequest(10_000, PREFIX), [shared], is_new=False)
    assert (score.uncached, score.loaded) == (0, 2_100)


def test_the_fastest_tier_that_has_a_prefix_draws_its_requests() -> None:
    nothing, on_host = WorkerView("a"), WorkerView("b", host_tokens=20_000)
    shared, on_device = WorkerView("c", shared_tokens=20_000), WorkerView("d", 20_000)
    views = [nothing, shared, on_host, on_device]
    while len(views) > 1:
        best = views.pop()
        assert placed(20_500, None, *views, best).worker == best.name


def test_a_session_stays_where_its_conversation_is_on_the_host() -> None:
    home, other = WorkerView("a", host_tokens=20_000), WorkerView("b")
    assert placed(20_500, "a", home, other, last_tokens=20_000) == Placement("a", "home")
    busy = replace(home, pending_tokens=60_000)
    assert placed(20_500, "a", busy, other, last_tokens=20_000) == Placement("b", "moved")


def test_a_session_is_no_longer_bound_to_a_worker_that_loads_no_better_than_others() -> None:
    home, other = WorkerView("a", shared_tokens=20_000), WorkerView("b", shared_tokens=20_000)
    busy = replace(home, pending_tokens=5_000)
    assert placed(20_500, "a", busy, other, last_tokens=20_000) == Placement("b", "lost")


def test_what_an_engine_of_half_the_speed_costs_counts_double() -> None:
    request = PlacementRequest(10_000, PREFIX)
    view = WorkerView("a", 2_000, 6_000, 3, recent_tokens=8_000)
    half = replace(view, prefill_weight=2.0, decode_weight=2.0)
    for is_new in (True, False):
        (one,), (two,) = (score_all(request, [each], is_new=is_new) for each in (view, half))
        assert two.cost == 2 * one.cost
        assert two[2:] == one[2:]


def test_a_slow_worker_has_no_less_memory_for_sessions() -> None:
    slow = WorkerView("a", session_tokens=100_000, prefill_weight=4.0, decode_weight=4.0)
    fast = WorkerView("b", session_tokens=100_000)
    assert standing_cost(slow, is_new=True) == standing_cost(fast, is_new=True)


def test_a_long_answer_draws_a_new_session_to_a_worker_that_decodes_fast() -> None:
    views = [WorkerView("slow", 2_000, decode_weight=2.0), WorkerView("fast", pending_tokens=4_000)]
    least = PlacementRequest(3_000, PREFIX, answer_tokens=1_000)
    for request, worker in ((least, "slow"), (replace(least, answer_tokens=40_000), "fast")):
        found = place(request, views)
        assert found is not None
        assert found.worker == worker


def test_a_session_leaves_a_slow_worker_sooner() -> None:
    """Its wait lasts longer."""
    home, other = WorkerView("a", 9_000, int(LEAVE * 9_000 / 2) + 1), WorkerView("b")
    assert placed(10_000, "a", home, other, last_tokens=9_000).reason == "home"
    slow = replace(home, prefill_weight=2.0)
    assert stays(PlacementRequest(10_000, PREFIX, "a", 9_000), slow) == "moved"
    assert stays(PlacementRequest(10_000, PREFIX, "a", 9_000), slow, least_wait=2) == "home"


views_without_weights = st.lists(
    st.builds(
        WorkerView,
        name=st.uuids().map(str),
        held_tokens=st.integers(0, 50_000),
        pending_tokens=st.integers(0, 100_000),
        decoding=st.integers(0, 64),
        recent_tokens=st.integers(0, 100_000),
        session_tokens=st.integers(0, 1_000_000),
        warmth=st.sampled_from([1.0, 1.0, 0.3]),
    ),
    min_size=1,
    max_size=8,
)


@given(views_without_weights, st.integers(1, 60_000), st.data())
def test_without_anything_learned_decisions_are_those_of_equal_workers(
    views: list[WorkerView], tokens: int, data: st.DataObject
) -> None:
    """The cost as it was before there were weights. What an answer takes does not matter."""
    home = data.draw(st.sampled_from([None, *(view.name for view in views)]))
    last_tokens = data.draw(st.integers(0, 60_000))
    request = PlacementRequest(tokens, PREFIX, home, last_tokens)
    found = place(request, views)
    assert found == place(replace(request, answer_tokens=1e6), views)
    assert found is not None
    if found.reason == "home":
        return
    mean = sum(view.session_tokens for view in views) / len(views)
    costs = {}
    for view in views:
        share, more = 1.0, 0.0
        if found.reason != "moved":
            share = min((view.session_tokens + tokens) / (mean + tokens), 1.0)
            more = RECENT * view.recent_tokens**2 / (view.recent_tokens + RECENT_FLOOR)
            more += SESSION_SHARE * view.session_tokens
        cost = view.pending_tokens + (1 + DELAY * share) * max(tokens - view.held_tokens, 0)
        cost += DECODE_TOKENS * view.decoding + more
        costs[view.name] = cost if view.warmth == 1 else (cost + 1) / view.warmth
    assert round(costs[found.worker]) <= round(min(costs.values())) + 1


PROMPT = 10_000


@pytest.mark.parametrize(
    ("pending_tokens", "running", "strained"),
    [
        (0, 0.74, False),
        (0, 0.75, True),
        (0, None, False),
        (PROMPT // 2, None, True),
        (PROMPT // 2 - 1, 0.1, False),
    ],
)
def test_a_worker_is_strained_by_what_runs_or_by_what_waits(
    pending_tokens: int, running: float | None, strained: bool
) -> None:
    assert is_strained(PROMPT, pending_tokens, running) is strained


def test_only_an_idle_worker_is_chosen() -> None:
    assert choose_standby(PROMPT, 7, {"other": 0}, []) is None


def test_the_idle_worker_that_holds_most_is_chosen() -> None:
    held = {"w200": 200, "w4000": 4_000}
    for idle in (["w200", "w4000"], ["w4000", "w200"]):
        assert choose_standby(PROMPT, 7, held, idle) == "w4000"


def test_no_standby_is_chosen_while_another_worker_holds_the_prompt() -> None:
    assert choose_standby(PROMPT, 7, {"idle": 0, "warm": PROMPT - 500}, ["idle"]) is None
    assert choose_standby(PROMPT, 7, {"idle": 0, "half": PROMPT // 2}, ["idle"]) == "idle"


def test_a_short_prompt_is_not_worth_it() -> None:
    assert choose_standby(1_000, 7, {"idle": 0}, ["idle"]) is None


def test_every_balancer_chooses_the_same_of_equal_workers() -> None:
    held = {f"w{n}": 0 for n in range(5)}
    assert choose_standby(PROMPT, 7, held, list(held)) == choose_standby(
        PROMPT, 7, held, list(held)[::-1]
    )
