"""Whose memory is taken first."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from scheduler.programs.eviction import Held, first_to_go, is_wanted, worth
from scheduler.programs.programs import Outlook


def outlook(chance: float, soon_s: float, *, has_ended: bool = False) -> Outlook:
    return Outlook(chance, soon_s, 2 * soon_s, has_ended)


ENDED, PERSON = outlook(0.0, inf, has_ended=True), outlook(0.6, 30.0)
TOOL, SLOW_TOOL, QUEUED = outlook(0.95, 2.0), outlook(0.95, 60.0), outlook(1.0, 0.0)


def test_what_ends_goes_before_what_waits_and_what_is_here_goes_last() -> None:
    known = (ENDED, SLOW_TOOL, PERSON, TOOL, QUEUED)
    worths = [worth(one, "expected") for one in known]
    assert worths == sorted(worths)
    assert len(set(worths)) == len(known)
    assert worth(None, "expected") == 0


def test_with_ended_agents_alone_the_others_are_equal() -> None:
    assert worth(ENDED, "ended") < worth(PERSON, "ended") == worth(QUEUED, "ended")


def test_a_pin_is_wanted_as_long_as_its_agent_is_likely_to_return() -> None:
    unlikely = outlook(0.2, 30.0)
    wanted = [is_wanted(one, "expected") for one in (TOOL, PERSON, unlikely, ENDED, None)]
    assert wanted == [True, True, False, False, True]
    assert [is_wanted(one, "ended") for one in (unlikely, ENDED)] == [True, False]
    assert is_wanted(ENDED, "off")


def test_no_more_goes_than_is_needed_and_the_least_worth_first() -> None:
    held = [Held("tool", 0.4, 1.0), Held("ended", 0.0, 9.0), Held("person", 0.02, 5.0)]
    tokens = {"tool": 100, "ended": 50, "person": 70}
    assert first_to_go(held, 50, tokens.__getitem__) == {"ended"}
    assert first_to_go(held, 51, tokens.__getitem__) == {"ended", "person"}
    assert first_to_go(held, 1000, tokens.__getitem__) == set(tokens)
    assert first_to_go(held, 0, tokens.__getitem__) == set()


def test_of_equals_the_least_recently_used_goes() -> None:
    held = [Held("new", 1.0, 9.0), Held("old", 1.0, 1.0)]
    assert first_to_go(held, 1, lambda _: 1) == {"old"}


HELD = st.builds(Held, st.text(max_size=3), st.floats(0, inf), st.floats(0, 99))


@given(st.lists(HELD, unique_by=lambda one: one.name), st.integers(0, 500))
def test_whoever_goes_is_worth_no_more_than_whoever_stays(held: list[Held], wanted: int) -> None:
    def tokens(name: str) -> int:
        return 10 * len(name)

    going = first_to_go(held, wanted, tokens)
    assert going == first_to_go(reversed(held), wanted, tokens)
    gone = [one.worth for one in held if one.name in going]
    kept = [one.worth for one in held if one.name not in going]
    assert not gone or not kept or max(gone) <= min(kept)
    assert sum(map(tokens, going)) >= wanted or not kept
