"""Preemption: the least important first, few victims, little lost, none in vain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.preemption import (
    EVICT_FIRST,
    EVICT_NORMALLY,
    PreemptionHistory,
    Running,
    eviction_priority,
    victims,
)

NOW_S = 100.0
PRIORITY = 20
GRACE_S = 10.0
MOST_TIMES = 3

crowds = st.lists(
    st.builds(
        Running,
        st.sampled_from([0, 5, 10, 11]),
        st.integers(0, 12),
        st.integers(0, 12),
        st.sampled_from([0.0, 50.0, NOW_S - GRACE_S, 95.0]),
        st.integers(0, MOST_TIMES),
    ),
    max_size=9,
)
needs = st.integers(0, 40)
slot_counts = st.integers(0, 4)


def chosen(running: Sequence[Running], needed_tokens: int, slots: int = 0) -> list[int]:
    return victims(
        running,
        needed_tokens,
        PRIORITY,
        NOW_S,
        threshold=10,
        grace_s=GRACE_S,
        most_times=MOST_TIMES,
        slots=slots,
    )


def usable(running: Sequence[Running]) -> list[int]:
    return [
        position
        for position, one in enumerate(running)
        if one.priority <= PRIORITY - 10
        and one.times_preempted < MOST_TIMES
        and (one.times_preempted == 0 or NOW_S - one.admitted_s >= GRACE_S)
    ]


def suffices(
    running: Sequence[Running], positions: Sequence[int], needed_tokens: int, slots: int
) -> bool:
    freed = sum(running[position].frees_tokens for position in positions)
    return freed >= needed_tokens and len(positions) >= slots


def disturbed(running: Sequence[Running], positions: Sequence[int]) -> tuple[int, ...]:
    """How many of each priority, the highest first: what is to be least."""
    counts = Counter(running[position].priority for position in positions)
    return tuple(counts[priority] for priority in (11, 10, 5, 0))


def lost(running: Sequence[Running], positions: Sequence[int]) -> int:
    return sum(running[position].lost_tokens for position in positions)


def test_only_those_below_the_threshold_are_preempted() -> None:
    running = [Running(11, 100, 1, 0), Running(10, 100, 50, 0)]
    assert chosen(running, 100) == [1]
    assert chosen(running[:1], 100) == []
    assert victims(running, 100, 20, NOW_S, threshold=9, grace_s=GRACE_S) == [1]
    assert victims(running[:1], 100, 20, NOW_S, threshold=9, grace_s=GRACE_S) == [0]


def test_no_need_preempts_no_request() -> None:
    assert chosen([Running(0, 100, 1, 0)], 0) == []
    assert chosen([], 0) == []


def test_no_request_is_preempted_in_vain() -> None:
    running = [Running(0, 100, 1, 0), Running(5, 100, 1, 0)]
    assert chosen(running, 201) == []
    assert chosen(running, 10, slots=3) == []
    assert chosen([], 1) == []


def test_a_preempted_request_is_safe_for_a_while_after_it_runs_again() -> None:
    assert chosen([Running(0, 9, 1, NOW_S, 0)], 9) == [0], "the first time there is no grace"
    assert chosen([Running(0, 9, 1, NOW_S - 9.9, 1)], 9) == []
    assert chosen([Running(0, 9, 1, NOW_S - 10, 1)], 9) == [0]


def test_a_request_that_was_preempted_often_runs_to_its_end() -> None:
    assert chosen([Running(0, 9, 1, 0, 2)], 9) == [0]
    assert chosen([Running(0, 9, 1, 0, 3)], 9) == []


def test_the_least_important_go_even_if_more_is_lost() -> None:
    running = [Running(5, 100, 1, 0), Running(0, 60, 900, 0), Running(0, 60, 900, 0)]
    assert chosen(running, 100) == [1, 2]


def test_less_important_requests_that_do_not_help_stay() -> None:
    running = [Running(0, 5, 1, 0), Running(0, 5, 1, 0), Running(5, 100, 900, 0)]
    assert chosen(running, 100) == [2]
    assert chosen(running, 103) == [0, 2]


def test_of_single_victims_the_one_that_loses_least_is_preempted() -> None:
    running = [Running(0, 500, 90, 0), Running(0, 100, 20, 0), Running(0, 99, 1, 0)]
    assert chosen(running, 100) == [1]


def test_one_large_loss_is_better_than_several_victims() -> None:
    running = [Running(0, 100, 900, 0), Running(0, 60, 1, 0), Running(0, 60, 1, 0)]
    assert chosen(running, 100) == [0]


def test_of_several_victims_those_that_lose_little_are_preempted() -> None:
    running = [Running(0, 70, 70, 0), Running(0, 65, 9, 0), Running(0, 60, 8, 0)]
    assert chosen(running, 120) == [1, 2]


def test_memory_to_spare_is_given_up_once() -> None:
    running = [Running(0, 10, 9, 0), Running(0, 10, 8, 0), Running(0, 9, 1, 0), Running(0, 9, 1, 1)]
    assert chosen(running, 19) == [1, 3]


def test_of_equal_losses_the_last_admitted_is_preempted() -> None:
    assert chosen([Running(0, 10, 5, 3), Running(0, 10, 5, 4), Running(0, 10, 5, 2)], 10) == [1]
    running = [Running(0, 10, 5, 3), Running(0, 10, 5, 4), Running(0, 99, 9, 0)]
    assert chosen(running, 10) == [1]


def test_slots_can_be_freed_without_memory_pressure() -> None:
    running = [Running(0, 90, 9, 0), Running(5, 90, 0, 0), Running(0, 1, 3, 0), Running(0, 1, 4, 0)]
    assert chosen(running, 0, slots=1) == [2]
    assert chosen(running, 0, slots=2) == [2, 3]
    assert chosen(running, 0, slots=4) == [0, 1, 2, 3]


@settings(max_examples=200)
@given(crowds, needs, slot_counts)
def test_victims_free_enough_and_are_as_few_as_possible(
    running: list[Running], needed_tokens: int, slots: int
) -> None:
    found = chosen(running, needed_tokens, slots)
    sets = [
        positions
        for size in range(len(running) + 1)
        for positions in combinations(usable(running), size)
        if suffices(running, positions, needed_tokens, slots)
    ]
    if not sets:
        assert found == []
        return
    assert found == sorted(set(found))
    assert set(found) <= set(usable(running))
    assert suffices(running, found, needed_tokens, slots)
    assert disturbed(running, found) == min(disturbed(running, each) for each in sets)
    for dropped in found:
        fewer = [position for position in found if position != dropped]
        assert not suffices(running, fewer, needed_tokens, slots), "none can be left out"


@settings(max_examples=200)
@given(crowds, needs, slot_counts)
def test_no_victim_could_be_exchanged_for_one_that_loses_less(
    running: list[Running], needed_tokens: int, slots: int
) -> None:
    found = chosen(running, needed_tokens, slots)
    for position in found:
        for other in set(usable(running)) - set(found):
            if running[other].priority == running[position].priority:
                changed = [p for p in found if p != position] + [other]
                assert lost(running, changed) >= lost(running, found) or not suffices(
                    running, changed, needed_tokens, slots
                )


@settings(max_examples=200)
@given(crowds, st.integers(1, 12))
def test_where_one_victim_is_enough_it_loses_least(
    running: list[Running], needed_tokens: int
) -> None:
    able = usable(running)
    lowest = next(
        priority
        for priority in (0, 5, 10, 11)
        if priority == 11
        or suffices(running, [p for p in able if running[p].priority <= priority], needed_tokens, 0)
    )
    alone = [
        position
        for position in able
        if running[position].priority == lowest and running[position].frees_tokens >= needed_tokens
    ]
    if alone:
        (victim,) = chosen(running, needed_tokens)
        assert victim in alone
        assert running[victim].lost_tokens == min(running[p].lost_tokens for p in alone)


@settings(max_examples=60)
@given(crowds.filter(lambda running: len(running) <= 5), needs, slot_counts)
def test_positions_decide_only_between_equal_victims(
    running: list[Running], needed_tokens: int, slots: int
) -> None:
    expected = sorted(running[position] for position in chosen(running, needed_tokens, slots))
    for other in permutations(running):
        assert sorted(other[p] for p in chosen(other, needed_tokens, slots)) == expected


def test_no_request_preempts_another_twice_in_a_row() -> None:
    feuds = PreemptionHistory()
    assert feuds.allows("a", "b")
    feuds.record("a", "b")
    assert not feuds.allows("a", "b")
    assert feuds.allows("b", "a"), "the other way round is another pair"
    assert feuds.allows("c", "b")
    feuds.record("c", "b")
    assert feuds.allows("a", "b"), "there was somebody else in between"
    assert not feuds.allows("c", "b")


def test_the_oldest_preemptions_are_forgotten() -> None:
    feuds = PreemptionHistory(limit=2)
    feuds.record("a", "1")
    feuds.record("a", "2")
    feuds.record("a", "1")
    feuds.record("a", "3")
    assert [feuds.allows("a", victim) for victim in "123"] == [False, True, False]


def test_a_reusable_prompt_is_evicted_normally() -> None:
    assert eviction_priority(is_kept=True, is_last=False, is_answer_kept=True) == (
        EVICT_NORMALLY,
        EVICT_NORMALLY,
    )


@pytest.mark.parametrize(("is_kept", "is_last"), [(False, False), (True, True)])
def test_a_prompt_that_will_not_be_read_again_is_evicted_first(
    is_kept: bool, is_last: bool
) -> None:
    worth = eviction_priority(is_kept=is_kept, is_last=is_last, is_answer_kept=True)
    assert worth == (EVICT_FIRST, EVICT_FIRST)


def test_an_output_that_no_prompt_will_contain_is_evicted_before_its_prompt() -> None:
    worth = eviction_priority(is_kept=True, is_last=False, is_answer_kept=False)
    assert worth.answer < worth.prompt == EVICT_NORMALLY
