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
    rest,
    rounds,
)
from scheduler.programs.habits import OPEN, PERSON, Habits

TIMES = st.floats(0, 2 * LONGEST_S)


def noted(habits: Habits, tool: str, *gaps_s: float, agent: str = "a") -> Habits:
    for gap_s in gaps_s:
        habits.gaps.note(agent, (tool,), gap_s, {})
    return habits


def test_the_rest_of_a_gap_is_read_from_longer_ones() -> None:
    gaps = [1.0, 2.0, 4.0, 8.0, 100.0]
    assert rest(gaps, 0.0).soon_s == 4.0
    assert rest(gaps, 3.0).soon_s == 5.0
    assert rest(gaps, 3.0).late_s == 97.0


@given(st.lists(TIMES, min_size=1, max_size=40), TIMES, TIMES)
def test_the_longer_an_agent_is_away_the_fewer_gaps_are_longer(
    gaps: list[float], one_s: float, other_s: float
) -> None:
    early, late = (rest(gaps, passed_s) for passed_s in sorted((one_s, other_s)))
    assert 0 < late.share <= early.share < 1
    assert 0 <= early.soon_s <= early.late_s


def test_a_gap_that_outlasts_all_others_may_last_as_long_again() -> None:
    assert rest([1.0, 2.0], 30.0).soon_s == 30.0


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


def test_each_tool_has_its_own_gaps_and_a_person_has_others() -> None:
    habits = noted(noted(Habits(), "Read", *[0.1] * 4), "Bash", *[20.0] * 4)
    assert habits.absence("b", ("Read",), 0.0).soon_s == 0.1
    assert habits.absence("b", ("Bash",), 0.0).soon_s == 20.0
    unknown = habits.absence("b", ("Grep",), 0.0).soon_s
    assert unknown < habits.absence("b", (PERSON,), 0.0).soon_s


def test_an_agent_waits_for_the_longest_of_its_tools() -> None:
    habits = noted(noted(Habits(), "Read", *[0.1] * 4), "Bash", *[20.0] * 4)
    assert habits.absence("b", ("Read", "Bash"), 0.0) == habits.absence("b", ("Bash",), 0.0)


def test_an_agents_own_gaps_count_more_than_those_of_others() -> None:
    habits = noted(noted(Habits(), "Bash", *[1.0] * 20), "Bash", *[60.0] * 4, agent="slow")
    assert habits.absence("slow", ("Bash",), 0.0).soon_s == 60.0
    assert habits.absence("another", ("Bash",), 0.0).soon_s == 1.0


def test_what_a_client_states_tells_tools_apart_that_ran_side_by_side() -> None:
    habits = Habits()
    for _ in range(4):
        habits.gaps.note("a", ("Read", "Bash"), 9.0, {"Read": 0.2, "Bash": 8.5})
    assert habits.absence("a", ("Read",), 0.0).soon_s == 0.2
    assert habits.absence("a", ("Bash",), 0.0).soon_s == 9.0


@pytest.mark.parametrize("stated_s", [-5.0, 1e9, 0.0])
def test_no_tool_ran_longer_than_the_gap(stated_s: float) -> None:
    habits = Habits()
    for _ in range(4):
        habits.gaps.note("a", ("Read", "Bash"), 3.0, {"Read": stated_s, "Bash": 3.0})
    assert 0.0 <= habits.absence("a", ("Read",), 0.0).soon_s <= 3.0


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
    habits = Habits()
    habits.gaps = Gaps(limit=8)
    for agent, tools, gap_s, stated_s in steps:
        habits.gaps.note(agent, tools, gap_s, stated_s)
        assert len(habits.gaps) <= 8
        found = habits.absence(agent, tools[:MOST_TOOLS], 1.0)
        assert 0 < found.share < 1
        assert 0 <= found.soon_s <= found.late_s <= 10 * LONGEST_S


def test_nothing_called_is_an_open_gap() -> None:
    habits = Habits()
    assert habits.absence("a", (), 0.0) == habits.absence("a", (OPEN,), 0.0)
