"""How long agents stay away, by what they do."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.programs.gaps import (
    FACTOR,
    LEAST_S,
    LONGEST_S,
    MOST_ROUNDS,
    MOST_TOOLS,
    Gaps,
    rounds,
)
from scheduler.programs.habits import Habits

TIMES = st.floats(0, 2 * LONGEST_S)


def noted(gaps: Gaps, tool: str, *gaps_s: float, agent: str = "a") -> Gaps:
    for gap_s in gaps_s:
        gaps.note(agent, (tool,), gap_s, {})
    return gaps


@given(st.lists(st.floats(0, 2000), max_size=40))
def test_rounds_are_few_apart_and_within_bounds(gaps: list[float]) -> None:
    found = rounds(gaps)
    assert len(found) <= MOST_ROUNDS
    assert all(LEAST_S <= at < LONGEST_S for at in found)
    assert all(later >= FACTOR * at for at, later in pairwise(found))
    assert set(found) <= set(gaps)


@given(st.lists(st.floats(LEAST_S, LONGEST_S - 1), min_size=1, max_size=40))
def test_at_most_one_gap_in_eight_ends_before_the_first_round(gaps: list[float]) -> None:
    first, *_ = rounds(gaps)
    assert sum(gap < first for gap in gaps) <= len(gaps) / 8


def test_a_tool_with_short_and_long_gaps_has_a_round_for_the_long_ones() -> None:
    assert rounds([0.05] * 8 + [4.0, 5.0, 6.0] + [290.0, 300.0]) == (4.0, 290.0)


def test_gaps_too_short_to_lose_anything_have_no_round() -> None:
    assert rounds([0.05, 0.2, 0.9]) == ()


def test_each_tool_has_its_own_gaps() -> None:
    gaps = noted(noted(Gaps(), "Read", *[0.1] * 4), "Bash", *[20.0] * 4)
    assert gaps.of("b", "Read") == (0.1,) * 4
    assert gaps.of("b", "Bash") == (20.0,) * 4
    assert gaps.of("b", "Grep") == ()


def test_an_agents_own_gaps_count_more_than_those_of_others() -> None:
    gaps = noted(noted(Gaps(), "Bash", *[1.0] * 20), "Bash", *[60.0] * 4, agent="slow")
    assert {*gaps.of("slow", "Bash")} == {60.0}
    assert 1.0 in gaps.of("another", "Bash")


def test_what_a_client_states_tells_tools_apart_that_ran_side_by_side() -> None:
    gaps = Gaps()
    for _ in range(4):
        gaps.note("a", ("Read", "Bash"), 9.0, {"Read": 0.2, "Bash": 8.5})
    assert {*gaps.of("a", "Read")} == {0.2}
    assert {*gaps.of("a", "Bash")} == {9.0}


@pytest.mark.parametrize("stated_s", [-5.0, 1e9, 0.0])
def test_no_tool_ran_longer_than_the_gap(stated_s: float) -> None:
    gaps = Gaps()
    for _ in range(4):
        gaps.note("a", ("Read", "Bash"), 3.0, {"Read": stated_s, "Bash": 3.0})
    assert all(0.0 <= gap_s <= 3.0 for gap_s in gaps.of("a", "Read"))


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.lists(st.text(max_size=90), max_size=MOST_TOOLS + 9),
            st.floats(allow_nan=False),
            st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), max_size=3),
        ),
        max_size=20,
    )
)
def test_whatever_clients_state_the_table_is_bounded(
    steps: list[tuple[str, list[str], float, dict[str, float]]],
) -> None:
    gaps = Gaps(limit=8)
    for agent, tools, gap_s, stated_s in steps:
        gaps.note(agent, tools, gap_s, stated_s)
        assert len(gaps) <= 8
        found = [each_s for tool in tools for each_s in gaps.of(agent, tool)]
        assert all(0 <= each_s <= LONGEST_S for each_s in found)


@given(st.lists(TIMES, max_size=60))
def test_an_agents_next_gap_is_read_from_those_before(gaps_s: list[float]) -> None:
    habits = Habits()
    own: tuple[float, ...] = ()
    for gap_s in gaps_s:
        own = habits.note_gap(own, gap_s)
    found = habits.absence(own)
    assert 0 <= found.soon_s <= found.late_s <= LONGEST_S
    latest = [min(gap_s, LONGEST_S) for gap_s in gaps_s[-32:]]
    if len(latest) >= 4:
        assert sum(gap_s <= found.soon_s for gap_s in latest) >= len(latest) / 2
        assert sum(gap_s <= found.late_s for gap_s in latest) >= len(latest) * 0.9


def test_the_share_that_comes_back_follows_what_came_back_lately() -> None:
    habits = Habits()
    assert habits.share_back == 0.0
    for _ in range(200):
        habits.note(is_back=True)
    assert habits.share_back > 0.95
    for _ in range(200):
        habits.note(is_back=False)
    assert habits.share_back < 0.3
