"""When sessions that run tools are expected back, and which prompts wait for them."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.returns import (
    FACTOR,
    LEAD_S,
    LEAST_GAPS,
    LEAST_S,
    LONGEST_S,
    MOST_ROUNDS,
    MOST_TOOLS,
    PRIOR,
    Gaps,
    LastTurns,
    Return,
    Returns,
    UsualGaps,
    rounds,
)
from scheduler.working_set import Habits

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


def test_gaps_too_short_have_no_round() -> None:
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


BASH = ("Bash",)


def learned(*gaps: float, owner: str = "one", session: str = "s", tool: str = "Bash") -> UsualGaps:
    usual = UsualGaps()
    for gap in gaps:
        usual.note(owner, session, (tool,), gap, {})
    return usual


def test_gaps_too_short_to_lose_anything_have_no_round() -> None:
    assert learned(0.05, 0.2, 0.9, 0.1).rounds("one", "s", BASH) == ()


def test_an_unknown_tool_has_the_prior() -> None:
    usual = learned(*[50.0] * (LEAST_GAPS - 1))
    assert usual.rounds("one", "s", BASH) == PRIOR
    assert usual.rounds("one", "s", ()) == ()


def test_a_tool_counts_in_its_session_first_and_then_in_all_of_the_tenant() -> None:
    usual = learned(*[50.0] * LEAST_GAPS)
    assert usual.rounds("one", "s", BASH) == (50,)
    assert usual.rounds("one", "other", BASH) == (50,)
    assert usual.rounds("another", "s", BASH) == PRIOR
    for _ in range(LEAST_GAPS):
        usual.note("one", "other", BASH, 7.0, {})
    assert usual.rounds("one", "other", BASH) == (7,)
    assert usual.rounds("one", "s", BASH) == (50,)


def test_old_gaps_are_forgotten() -> None:
    usual = learned(*[300.0] * 40, *[5.0] * 16)
    assert usual.rounds("one", "s", BASH) == (5,)


def test_of_several_tools_the_longest_counts() -> None:
    usual = learned(*[5.0] * LEAST_GAPS)
    for _ in range(LEAST_GAPS):
        usual.note("one", "s", ("Read",), 60.0, {})
    assert usual.rounds("one", "s", ("Read", "Bash")) == (60,)
    for _ in range(16):  # without durations the gap is the longest tool's
        usual.note("one", "s", ("Read", "Bash"), 70.0, {})
    assert usual.rounds("one", "s", BASH) == (5,)
    assert usual.rounds("one", "s", ("Read",)) == (70,)


def test_stated_durations_divide_a_gap_among_tools() -> None:
    usual = UsualGaps()
    for _ in range(LEAST_GAPS):
        usual.note("one", "s", ("Read", "Bash"), 31.0, {"Read": 2.0, "Bash": 30.0, "Other": 400.0})
    assert usual.rounds("one", "s", ("Read",)) == (2,)
    assert usual.rounds("one", "s", BASH) == (31,)
    assert usual.rounds("one", "s", ("Other",)) == PRIOR


@pytest.mark.parametrize("stated_s", [0.0, 604_800.0, inf])
def test_no_stated_duration_exceeds_what_was_measured(stated_s: float) -> None:
    usual = UsualGaps()
    for _ in range(LEAST_GAPS):
        usual.note("one", "s", ("Read", "Bash"), 31.0, {"Read": stated_s, "Bash": stated_s})
    assert usual.rounds("one", "s", ("Read", "Bash")) == (31,)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["one", "other"]),
            st.text(max_size=200),
            st.lists(st.text(max_size=200), max_size=40),
            st.floats(-1e9, 1e9),
            st.dictionaries(st.text(max_size=200), st.floats(0, 1e9), max_size=40),
        ),
        max_size=30,
    )
)
def test_whatever_one_tenant_states_another_is_expected_as_before(steps: list[Any]) -> None:
    usual = learned(*[50.0] * LEAST_GAPS, owner="mine")
    for owner, session, tools, gap_s, stated_s in steps:
        usual.note(owner, session, tools, gap_s, stated_s)
        assert all(LEAST_S <= at < LONGEST_S for at in usual.rounds(owner, session, tools))
    assert usual.rounds("mine", "s", BASH) == (50,)


def test_what_is_learned_is_bounded() -> None:
    usual = UsualGaps()
    for number in range(2000):
        usual.note("one", f"{number}", (f"tool {number}",), 5.0, {})
    assert len(usual) == 512
    for number in range(100):
        usual.note(f"tenant {number}", "s", BASH, 5.0, {})
    assert len(usual) == 64 * 2


def waiting(
    owner: str = "one",
    *,
    at_s: float = 0.0,
    size: int = 10,
    rounds_s: tuple[float, ...] = (10.0, 100.0),
) -> Return[str]:
    return Return(owner, BASH, at_s, rounds_s, "prompt", size)


def test_a_prompt_is_loaded_shortly_before_each_round() -> None:
    returns: Returns[str] = Returns(1000, 100)
    one = waiting(at_s=50)
    returns.expect("s", one, 50)
    assert returns.due(60 - LEAD_S - 0.01) == []
    assert returns.due(60 - LEAD_S) == [("prompt", one)]
    assert returns.due(60) == []
    assert returns.due(149) == []
    assert len(returns.due(1000)) == 1, "the last round"
    assert (one.prompt, returns.used_bytes, len(returns)) == (None, 10, 1)
    assert returns.due(1001) == []


def test_a_session_that_came_is_not_expected() -> None:
    returns: Returns[str] = Returns(1000, 100)
    one = waiting()
    returns.expect("s", one, 0)
    assert returns.came("s") is one
    assert returns.due(1000) == []
    assert returns.came("s") is None


def test_rounds_that_are_over_when_the_prompt_is_known_load_nothing() -> None:
    returns: Returns[str] = Returns(1000, 100)
    returns.expect("s", waiting(), 50)
    assert returns.due(50) == []
    assert len(returns.due(100)) == 1
    for over in (waiting(), waiting(rounds_s=())):
        returns.expect("s", over, 200)
        assert (over.prompt, returns.due(1000)) == (None, [])


def test_of_too_much_memory_the_tenant_that_has_most_loses_its_oldest() -> None:
    returns: Returns[str] = Returns(100, 10)
    returns.expect("small", waiting("other", size=30), 0)
    dropped = [returns.expect(f"{number}", waiting(size=20), 0) for number in range(5)]
    assert dropped == [0, 0, 0, 1, 1]
    assert [returns.came(name) is None for name in ("small", "0", "1", "2", "3", "4")] == [
        *(False, True, True),
        *(False, False, False),
    ]
    assert returns.expect("huge", waiting(size=500), 0) == 1


def test_a_session_that_never_comes_is_forgotten() -> None:
    returns: Returns[str] = Returns(1000, 100)
    for number in range(3):
        returns.expect(f"{number}", waiting(at_s=number), 2)
    assert returns.expire(LONGEST_S - 1) == 0
    assert returns.expire(LONGEST_S + 1) == 2
    assert len(returns) == 1


def test_sessions_can_be_dropped() -> None:
    returns: Returns[str] = Returns(1000, 100)
    for name in "ab":
        returns.expect(name, waiting(), 0)
    assert returns.drop(lambda prompt: prompt != "prompt") == 0
    assert returns.drop(lambda prompt: prompt == "prompt") == 2
    assert (returns.due(100), len(returns)) == ([], 0)


STEPS = st.tuples(
    st.sampled_from(["expect", "came", "due", "expire", "drop"]),
    st.integers(0, 19),
    st.lists(st.floats(0, 1000), max_size=3),
    st.integers(1, 170),
)


@given(st.lists(STEPS, max_size=60))
def test_the_table_stays_within_its_bounds(steps: list[tuple[str, int, list[float], int]]) -> None:
    returns: Returns[str] = Returns(100, limit=5)
    for number, (step, session, gaps, size) in enumerate(steps):
        now_s = 20.0 * number
        if step == "expect":
            before = len(returns) - (returns.came(f"{session}") is not None)
            one = waiting(f"{session % 3}", at_s=now_s, size=size, rounds_s=rounds(gaps))
            dropped = returns.expect(f"{session}", one, now_s)
            assert len(returns) == before + 1 - dropped
        elif step == "came":
            returns.came(f"{session}")
            assert returns.came(f"{session}") is None
        elif step == "due":
            assert all(one.load_s > now_s for _, one in returns.due(now_s))
        elif step == "drop":
            returns.drop(lambda _: True)
        else:
            returns.expire(now_s)
        assert len(returns) <= 5
        assert returns.used_bytes <= 100


def turned(turns: LastTurns[str], session: str, *times_s: tuple[float, float]) -> None:
    for sent_s, ended_s in times_s:
        turns.ended(session, f"{session} {ended_s:g}", sent_s, ended_s)


def test_the_session_that_usually_comes_back_soonest_is_first() -> None:
    turns = LastTurns[str]()
    turned(turns, "tools", (0, 5), (10, 15), (20, 25))
    turned(turns, "person", (0, 5), (300, 305), (600, 605))
    turned(turns, "new", (606, 610))
    assert turns.soonest_first(612.0) == ["new 610", "person 605", "tools 25"], "tools is overdue"
    turned(turns, "tools", (606, 611))
    assert turns.soonest_first(612.0) == ["new 610", "tools 611", "person 605"]


def test_a_session_that_has_ended_is_not_expected() -> None:
    turns = LastTurns[str](limit=2)
    turned(turns, "a", (0, 1))
    turned(turns, "b", (1, 2))
    turned(turns, "a", (2, 3))
    turned(turns, "c", (3, 4))
    assert turns.soonest_first(4.0) == ["c 4", "a 3"], "b's turn ended longest ago"
    turns.forget("c")
    turns.forget("unknown")
    assert turns.soonest_first(4.0) == ["a 3"]
    turns.clear()
    assert turns.soonest_first(4.0) == []
