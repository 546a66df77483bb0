"""A large fleet: a decision is the one that all workers' views give, or nearly, and most need not
view all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.capacity import Capacity
from scheduler.placement import DELAY, PlacementRequest, WorkerView, place, score_all
from scheduler.shortlist import SMALL_FLEET
from sgl_ext.balancer.routing.prefixes import HeldPrefix
from sgl_ext.balancer.routing.router import MOST_LISTED, REREAD_S, Router, explain
from sgl_ext.balancer.routing.routing_request import RoutingRequest
from sgl_ext.balancer.routing.worker import Attempt, Worker
from sgl_ext.reading.segments import Chain
from sgl_ext.wire.peers import Load
from tests.balancer.routing.test_router import Setting

SEGMENT_TOKENS = 1_000


def reference(
    router: Router, routing: RoutingRequest, tried: set[Worker], *, waits_for_home: bool
) -> tuple[str, str] | None:
    """The worker and the reason, by views of all workers: the rules without any shortcut."""
    now_s = router.clock()
    views = dict(router.views(routing.chain))
    views = {w: view for w, view in views.items() if w not in tried} or views
    able = router.candidates(routing, tried)
    held = router.prefixes.lookup(routing.chain)
    open_views = {w: view for w, view in views.items() if able.has_capacity(w, held)}
    asked = home_of(router, routing, views)
    home = next((w for w in views if w.id == asked.home), None)
    stays = home is not None and is_home(asked, home, views)
    if place(asked, [*views.values()]) is None:
        return None
    if not open_views:  # a prompt that is at hand goes to its home's own queue
        there = held[home.slot] if home is not None else None
        if home is None or there is None or not stays:
            return None
        tokens = router.prefixes.prompt_tokens(routing.chain, there, routing.prompt_tokens)
        return (home.id, "home") if able.may_go_beyond(home, tokens, there.tokens) else None
    if home is not None and stays and home in open_views:
        return home.id, "home"
    most = max(view.held_tokens for view in open_views.values())
    if waits_for_home and home and stays and views[home].held_tokens - most >= 512:
        return None
    chosen = place(asked, [*open_views.values()], moves=stays)
    assert chosen is not None, f"at {now_s} some worker is open"
    return chosen.worker, chosen.reason


def is_home(asked: PlacementRequest, home: Worker, views: dict[Worker, WorkerView]) -> bool:
    """Whether the session stays, by what each other worker holds and has to prefill."""
    others = [view for w, view in views.items() if w is not home]
    most_held = max((view.held_tokens for view in others), default=0)
    saved = views[home].held_tokens - most_held
    if saved < 0.5 * (asked.last_tokens - most_held):
        return False
    waits = [view.wait for view in others]
    return not waits or views[home].wait - min(waits) <= 2 * max(saved, 0)


def home_of(
    router: Router, routing: RoutingRequest, views: dict[Worker, WorkerView]
) -> PlacementRequest:
    """The request, with the home that the router explains, and its session's last prompt."""
    home = explain(router, routing)["home"]
    known = routing.session is not None and router.attempts.sessions.home(routing.session)
    answer_tokens = router.attempts.speeds.answer_tokens(routing.output_tokens)
    last_tokens = known[1] if known else 0
    return PlacementRequest(routing.prompt_tokens, routing.prefix, home, last_tokens, answer_tokens)


def turn(session: int, turns: int, *, is_named: bool, priority: int) -> RoutingRequest:
    """A turn after a head of two segments that some sessions share."""
    own = range(1_000 * (session + 1), 1_000 * (session + 1) + turns)
    hashes = (7 + session % 3, 70 + session % 3, *own)
    ends = tuple(4 * SEGMENT_TOKENS * (n + 1) for n in range(len(hashes)))
    chain = Chain(hashes, ends, session=own[0])
    named = 10_000 + session if is_named else None
    return RoutingRequest(chain, named, hashes[1], SEGMENT_TOKENS * len(hashes), priority=priority)


def store(setting: Setting, worker: Worker, hashes: Sequence[int]) -> None:
    """The worker reports that it holds a chain."""
    for number, (parent, segment) in enumerate(pairwise((None, *hashes)), 1):
        assert segment is not None
        index = setting.router.prefixes.index
        assert index.store(worker.slot, parent, segment, number * SEGMENT_TOKENS)  # type: ignore[union-attr]


def disturb(data: st.DataObject, setting: Setting) -> None:
    """Changes a worker's state or load in one of the ways in which that happens."""
    worker = data.draw(st.sampled_from(setting.workers.all))
    match data.draw(st.integers(0, 6)):
        case 0:
            worker.draining = data.draw(st.booleans())
        case 1:
            setting.workers.mark(worker, ready=data.draw(st.booleans()))
        case 2:
            worker.is_hung = data.draw(st.booleans())
        case 3:
            worker.peer_load = Load(1, 1, data.draw(st.integers(0, 20_000)))
        case 4:
            pending = {"pending_tokens": data.draw(st.integers(0, 20_000))}
            worker.apply_load(pending, setting.clock.now_s)
        case 5:
            worker.capacity = Capacity(data.draw(st.sampled_from([6_000, 50_000])), 4)
        case _:
            for _ in range(5):
                worker.breaker.failed(setting.clock.now_s, answered=False)


def requests(
    data: st.DataObject, setting: Setting, running: list[Attempt], pauses_s: Sequence[float]
) -> Iterator[tuple[RoutingRequest, set[Worker], bool]]:
    """Requests, those tried and whether each waits for its home; what runs ends between them."""
    attempts = setting.router.attempts
    for _ in range(data.draw(st.integers(1, 30))):
        setting.clock.now_s += data.draw(st.sampled_from(pauses_s))
        if data.draw(st.integers(0, 2)) == 0:
            disturb(data, setting)
        if running and data.draw(st.booleans()):
            attempt = running.pop(data.draw(st.integers(0, len(running) - 1)))
            if data.draw(st.booleans()):
                attempts.prefill_done(attempt)
                store(setting, attempt.worker, attempt.routing.chain.hashes)
                attempts.succeed(attempt)
            else:
                attempts.fail(attempt, by_worker=False)
        routing = turn(
            data.draw(st.integers(0, 5)),
            data.draw(st.integers(1, 20)),
            is_named=data.draw(st.booleans()),
            priority=data.draw(st.sampled_from([0, 20])),
        )
        tried = set(data.draw(st.lists(st.sampled_from(setting.workers.all), max_size=2)))
        setting.router.pass_time(setting.clock.now_s)
        yield routing, tried, data.draw(st.booleans())


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_decisions_are_those_by_views_of_all_workers(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, SMALL_FLEET))
    setting = Setting([f"http://w{number}" for number in range(count)], worker_limit=8)
    running: list[Attempt] = []
    for routing, tried, waits in requests(data, setting, running, [0.0, 0.1, 0.7, 5.0]):
        expected = reference(setting.router, routing, tried, waits_for_home=waits)
        placed = setting.router.place(routing, tried, waits_for_home=waits)
        found = None if placed is None else (placed.worker.id, placed.placement.reason)
        assert found == expected
        if placed is not None:
            running.append(placed)


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_decisions_in_a_larger_fleet_cost_little_more_than_the_best(data: st.DataObject) -> None:
    """All loads were reported just before."""
    count = data.draw(st.integers(SMALL_FLEET + 1, 3 * SMALL_FLEET))
    setting = Setting([f"http://w{number}" for number in range(count)], worker_limit=8)
    router = setting.router
    running: list[Attempt] = []
    for routing, tried, waits in requests(data, setting, running, [0.0, 0.1, 0.7, 5.0]):
        for worker in setting.workers.all:
            router.fleet.load_changed(worker, setting.clock.now_s)
        views = {w: view for w, view in router.views(routing.chain) if w not in tried}
        held = router.prefixes.lookup(routing.chain)
        able = router.candidates(routing, tried)
        open_views = [view for w, view in views.items() if able.has_capacity(w, held)]
        asked, mean = home_of(router, routing, views), router.fleet.mean_sessions
        expected = reference(router, routing, tried, waits_for_home=waits)
        placed = router.place(routing, tried, waits_for_home=waits)
        assert (placed is None) is (expected is None)
        if placed is None or expected is None:
            continue
        running.append(placed)
        home = next((w for w in views if w.id == asked.home), None)
        # A session that has lost its cache may find that its worker costs least once more.
        if expected[1] == "home" and home is not None and is_home(asked, home, views):
            assert (placed.worker.id, placed.placement.reason) == expected
        elif placed.worker.id != asked.home:
            is_new = placed.placement.reason != "moved"
            scores = score_all(asked, open_views, mean, is_new=is_new)
            least = min(scores, key=lambda score: score.cost)
            chosen = next(score for score in scores if score.name == placed.worker.id)
            weight = next(view.prefill_weight for view in open_views if view.name == least.name)
            assert chosen.cost <= least.cost + weight * DELAY * least.uncached + 1


@pytest.mark.parametrize("count", [3, SMALL_FLEET + 1])
def test_a_session_that_finds_no_capacity_at_its_worker_moves_to_who_holds_most(count: int) -> None:
    """What the worker computed lately counts for a session's first request alone."""
    setting = Setting([f"http://w{number}" for number in range(count)], worker_limit=1)
    routing = turn(0, 20, is_named=True, priority=0)
    first = setting.place(routing)
    setting.router.attempts.prefill_done(first)
    holder = next(w for w in setting.workers.all if w is not first.worker)
    holder.recent_prefill.add(200_000, setting.clock.now_s)
    holder.pending_tokens = 7_000
    for worker in (first.worker, holder):
        store(setting, worker, routing.chain.hashes)
    second = setting.place(routing)
    assert (second.worker, second.placement.reason) == (holder, "moved")


def test_a_load_that_nobody_reports_is_read_again_after_some_decisions() -> None:
    """Each decision reads a few of a large fleet again, and one after a worker has joined all."""
    setting = Setting([f"http://w{number}" for number in range(100)])
    setting.place(turn(0, 2, is_named=False, priority=0))
    assert len(setting.router.fleet._shortlist) == 100
    for worker in setting.workers.all:
        worker.pending_tokens += 50_000 * (worker is not setting.workers.all[77])
    chosen = set()
    for session in range(10, 40):
        setting.clock.now_s += REREAD_S
        attempt = setting.place(turn(session, 2, is_named=False, priority=0))
        chosen.add(attempt.worker.slot)
        setting.router.attempts.fail(attempt, by_worker=False)
    assert 77 in chosen
    setting.workers.add("http://new", 5.0)
    setting.place(turn(50, 2, is_named=False, priority=0))
    assert len(setting.router.fleet._shortlist) == 101


@pytest.mark.parametrize("turns", [0.3, 1.9, 16])
def test_all_workers_are_read_again_within_a_second_however_many_decisions_it_has(
    turns: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, read = Setting([f"http://w{number}" for number in range(100)]).router.fleet, list[str]()
    monkeypatch.setattr(fleet, "load_changed", lambda worker, _: read.append(worker.id))
    fleet._reread(10.0)
    read.clear()
    for number in range(1, ceil(100 / turns) + 1):
        fleet._reread(10.0 + number * turns * REREAD_S / 100)
    assert len({*read}) == 100
    assert len(read) <= 101 + turns


def test_a_turn_that_stays_home_views_few_workers_and_lists_those_that_hold_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = Setting([f"http://w{number}" for number in range(100)])
    routing = turn(0, 20, is_named=True, priority=0)
    hashes = routing.chain.hashes
    first = setting.place(routing)
    setting.router.attempts.prefill_done(first)
    for worker in setting.workers.all:
        depth = len(hashes) if worker is first.worker else 2 + (worker.slot == 50)
        store(setting, worker, hashes[:depth])
    setting.router.attempts.succeed(first)
    viewed: set[str] = set()
    view = Worker.view

    def noted(worker: Worker, held: HeldPrefix, session_tokens: int, now_s: float) -> WorkerView:
        viewed.add(worker.id)
        return view(worker, held, session_tokens, now_s)

    monkeypatch.setattr(Worker, "view", noted)
    assert len(setting.place(routing).considered) == 1
    setting.router.lists_others = True
    second = setting.place(routing)
    assert (second.worker, second.placement.reason) == (first.worker, "home")
    assert viewed == {first.worker.id}
    assert len(second.considered) == MOST_LISTED
    assert {view.held_tokens for view in second.considered} == {22_000, 3_000, 2_000}
    assert second.held_at("http://w99") == 2_000
