"""Capacity: an engine is sent what it can run and little more, and always at least one request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.capacity import Capacity, InFlight, has_capacity

THRESHOLD = 10


def flying(*requests: tuple[int, int]) -> InFlight:
    """Requests in flight, each a priority and its tokens."""
    here = InFlight()
    for priority, tokens in requests:
        here.add(priority, tokens)
    return here


def room(
    capacity: Capacity,
    here: InFlight,
    priority: int = 0,
    tokens: int = 1,
    elsewhere: tuple[int, int] = (0, 0),
) -> bool:
    return has_capacity(capacity, here, priority, tokens, THRESHOLD, *elsewhere)


@pytest.mark.parametrize(("max_running", "most"), [(1, 2), (8, 9), (16, 18), (64, 72)])
def test_as_many_as_run_at_once_and_a_few_ahead(max_running: int, most: int) -> None:
    here, capacity = InFlight(), Capacity(1_000_000, max_running)
    while room(capacity, here):
        here.add(0, 1)
    assert here.requests == most


def test_tokens_in_flight_and_its_own_have_to_fit() -> None:
    here = flying((0, 600))
    assert room(Capacity(1000, 8), here, tokens=400)
    assert not room(Capacity(1000, 8), here, tokens=401)
    assert not room(Capacity(1000, 8), here, tokens=400, elsewhere=(1, 1))


def test_an_engine_that_queues_is_sent_nothing_more() -> None:
    assert room(Capacity(1000, 16, queued=2), flying((0, 1)))
    assert not room(Capacity(1000, 16, queued=3), flying((0, 1)))


def test_a_request_that_could_preempt_is_sent_to_an_engine_that_queues() -> None:
    full = flying((5, 400), (0, 300), (0, 300))
    assert not room(Capacity(1000, 2, queued=9), full, priority=9)
    assert room(Capacity(1000, 2, queued=9), full, priority=10)
    assert room(Capacity(1000, 2, queued=9), full, priority=10, tokens=600)
    assert not room(Capacity(1000, 2, queued=9), full, priority=10, tokens=601)


def test_requests_of_other_balancers_are_rivals_whatever_their_priority() -> None:
    assert not room(Capacity(1000, 2), flying((0, 1)), priority=100, elsewhere=(3, 0))
    assert not room(Capacity(1000, 2, queued=9), InFlight(), priority=100, elsewhere=(1, 0))


@pytest.mark.parametrize("tokens", [1000, 1001, 1_000_000])
def test_an_idle_engine_has_capacity_for_any_prompt(tokens: int) -> None:
    assert room(Capacity(1000, 2), InFlight(), tokens=tokens)


def test_a_size_beyond_an_engines_memory_counts_as_none() -> None:
    assert room(Capacity(1000, 8), flying((0, 900)), tokens=1001)
    assert Capacity(1000, 8).counted(1001) == 0


def test_another_tenant_s_claims_leave_a_tenant_its_part() -> None:
    here, capacity = InFlight(), Capacity(1000, 16)
    here.add(0, 990, "ann")

    def fits(tokens: int, tenant: str) -> bool:
        return has_capacity(capacity, here, 0, tokens, THRESHOLD, tenant=tenant)

    assert fits(500, "ben")
    assert not fits(501, "ben")
    assert not fits(11, "ann"), "its own claims are its own matter"
    here.add(0, 400, "cat")
    assert fits(334, "ben")
    assert not fits(335, "ben")


def test_a_list_of_prompts_keeps_its_own_tenant_waiting_and_no_other() -> None:
    here = InFlight()
    here.add(0, 100, "ann", prompts=64)

    def has_room(queued: int, tenant: str) -> bool:
        return has_capacity(
            Capacity(1000, 16, queued=queued), here, 0, 10, THRESHOLD, tenant=tenant
        )

    assert has_room(2, "ann")
    assert not has_room(48, "ann")
    assert has_room(48, "ben")
    assert not has_room(66, "ben"), "others queue, too"
    here.add(0, 100, "ben", prompts=9)
    assert not has_room(66, "ben")
    assert has_room(66, "cat")
    here.remove(0, 100, "ben", prompts=9)
    here.remove(0, 100, "ann", prompts=64)
    assert not has_room(3, "cat")


def test_an_answer_cannot_be_longer_than_the_context_leaves() -> None:
    capacity = Capacity(100_000, 8, context=32_000)
    assert capacity.needed(prompt=2_000, uncached=500, output=262_000) == 30_500
    assert capacity.needed(prompt=40_000, uncached=40_000, output=262_000) == 40_000
    assert Capacity(100_000, 8).needed(prompt=2_000, uncached=500, output=262_000) == 98_500


requests = st.lists(st.tuples(st.integers(-30, 30), st.integers(0, 500)), max_size=12)
reports = st.tuples(st.integers(1, 2000), st.integers(1, 12), st.integers(0, 4))
others = st.tuples(st.integers(0, 4), st.integers(0, 500))


@given(requests, st.data())
def test_the_totals_are_those_of_the_requests_in_flight(
    them: list[tuple[int, int]], data: st.DataObject
) -> None:
    here = flying(*them)
    landed = data.draw(st.lists(st.sampled_from(them), unique=True)) if them else []
    for request in landed:
        here.remove(*request)
        them.remove(request)
    assert (here.requests, here.tokens) == (len(them), sum(tokens for _, tokens in them))
    for priority in range(-31, 32, 3):
        above = [tokens for level, tokens in them if level > priority]
        requests, by_tenant = here.above(priority)
        assert (requests, sum(by_tenant.values())) == (len(above), sum(above))


@given(reports, requests, others, st.integers(-30, 30), st.integers(0, 2500))
def test_a_higher_priority_has_capacity_wherever_a_lower_has(
    report: tuple[int, int, int],
    them: list[tuple[int, int]],
    elsewhere: tuple[int, int],
    priority: int,
    tokens: int,
) -> None:
    here = flying(*them)
    found = [
        room(Capacity(*report), here, priority + n, tokens, elsewhere=elsewhere) for n in range(25)
    ]
    assert found == sorted(found)


@given(reports, requests, others, st.integers(-30, 30), st.integers(0, 2500))
def test_capacity_equals_a_plain_reading_of_its_rules(
    report: tuple[int, int, int],
    them: list[tuple[int, int]],
    elsewhere: tuple[int, int],
    priority: int,
    tokens: int,
) -> None:
    memory, max_running, queued = report
    ahead = max(1, max_running // 8)
    rivals = [t for level, t in them if level > priority - THRESHOLD] + [0] * elsewhere[0]
    could_preempt = any(level <= priority - THRESHOLD for level, _ in them)
    own = 0 if tokens > memory else tokens
    # What others have in flight counts as half of the memory at most, as if one tenant had it.
    fits = sum(rivals) + min(elsewhere[1], memory // 2) + own <= memory or not rivals
    all_fit = sum(t for _, t in them) + elsewhere[1] + own <= memory
    fits = fits or (all_fit and queued <= ahead)
    slots = len(rivals) < max_running + ahead
    expected = slots and fits and (queued <= ahead or could_preempt)
    found = room(Capacity(*report), flying(*them), priority, tokens, elsewhere)
    assert found is expected
