"""Which request ended an engine, by a made-up clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.suspects import (
    AGAIN,
    ALONE,
    ENDED_S,
    LAST_WAIT_S,
    LIMIT,
    MOST_TRIAL_S,
    PEER_SILENT_S,
    REFUSED,
    REFUSED_S,
    SETTLE_S,
    SUSPECT_S,
    Suspects,
)


class Fleet:
    """Suspects, with what became of them, and engines that show life at each moment."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.suspects = Suspects(self.found.append)
        self.heard: dict[str, float | None] = {}
        self.now_s = 100.0

    def later(self, seconds: float) -> None:
        self.now_s += seconds
        self.suspects.pass_time(self.now_s, lambda name: self.heard.get(name, self.now_s))

    def dies(self, worker: str, *there: tuple[str, float]) -> list[str]:
        """The engine ends with these requests, sent so long ago; what becomes of each."""
        lost = [
            self.suspects.lost(name, worker, self.now_s - ago_s, self.now_s, self.now_s).name
            for name, ago_s in there
        ]
        self.suspects.ended(worker, self.now_s, self.now_s)
        return lost

    def tried(self, request: str, worker: str) -> None:
        """The request's trial begins on an engine."""
        assert self.suspects.may_begin(request, SETTLE_S, 1)
        self.suspects.begin(request)
        self.suspects.sent(request, worker, self.now_s)

    def standing(self, request: str) -> str:
        return self.suspects.standing(request, self.now_s).name


def test_what_came_just_before_the_end_is_suspected_and_the_rest_sent_again() -> None:
    fleet = Fleet()
    assert fleet.dies("a", ("poison", 0.2), ("young", 0.9), ("old", 1.1)) == [
        "ALONE",
        "ALONE",
        "AGAIN",
    ]
    assert fleet.found == ["suspected", "suspected"]


def test_a_second_end_convicts_the_one_on_trial_and_nobody_beside_it() -> None:
    fleet = Fleet()
    fleet.dies("a", ("poison", 0.2), ("old", 5.0))
    fleet.later(SETTLE_S)
    fleet.tried("poison", "b")
    fleet.later(0.3)
    assert fleet.dies("b", ("old", 1.3), ("young", 0.1), ("poison", 0.3)) == [
        "AGAIN",
        "AGAIN",
        "REFUSED",
    ]
    assert [fleet.standing(name) for name in ("poison", "young", "old")] == [
        "REFUSED",
        "AGAIN",
        "AGAIN",
    ]
    fleet.later(REFUSED_S)
    assert fleet.standing("poison") == "AGAIN"
    assert len(fleet.suspects) == 0


def test_those_that_are_lost_after_the_one_on_trial_are_not_blamed_either() -> None:
    fleet = Fleet()
    fleet.dies("a", ("poison", 0.2))
    fleet.later(SETTLE_S)
    fleet.tried("poison", "b")
    assert fleet.dies("b", ("poison", 0.0), ("young", 0.1)) == ["REFUSED", "AGAIN"]
    fleet.later(0.5)
    assert fleet.dies("b", ("another", 0.4)) == ["AGAIN"]


def test_one_is_tried_at_a_time_and_not_at_once() -> None:
    fleet = Fleet()
    fleet.dies("a", ("one", 0.2), ("two", 0.3))
    may_begin = fleet.suspects.may_begin
    assert not may_begin("one", 0.0, 5)
    assert may_begin("one", SETTLE_S, 5)
    fleet.tried("one", "b")
    assert not may_begin("two", SETTLE_S, 5)
    fleet.suspects.answered("one")
    assert fleet.found[-1] == "cleared"
    assert may_begin("two", SETTLE_S, 5)


def test_the_last_engine_is_not_tried_before_another_one_had_time_to_come_back() -> None:
    fleet = Fleet()
    fleet.dies("a", ("one", 0.2))
    assert not fleet.suspects.may_begin("one", LAST_WAIT_S - 1, 0)
    assert fleet.suspects.may_begin("one", LAST_WAIT_S, 0)


def test_a_connection_that_broke_alone_need_not_wait_for_another_engine() -> None:
    fleet = Fleet()
    suspects, now_s = fleet.suspects, fleet.now_s
    assert suspects.lost("one", "a", now_s, now_s, now_s) is ALONE
    suspects.lives("a", now_s - 0.1)
    assert not suspects.may_begin("one", SETTLE_S, 0), "it was asked before"
    suspects.lives("a", now_s + 0.1)
    assert suspects.may_begin("one", SETTLE_S, 0)
    assert not suspects.has_ended("a", now_s + 0.1)


def test_who_is_convicted_for_a_broken_connection_is_pardoned() -> None:
    fleet = Fleet()
    fleet.dies("a", ("one", 0.2))
    fleet.tried("one", "b")
    fleet.suspects.lost("one", "b", fleet.now_s, fleet.now_s, fleet.now_s)
    assert fleet.suspects.is_caught("one", fleet.now_s)
    assert fleet.standing("one") == "ALONE", "a copy waits until it is known what became of b"
    assert not fleet.suspects.may_begin("one", SETTLE_S, 1)
    fleet.suspects.lives("b", fleet.now_s + 0.1)
    assert fleet.standing("one") == "AGAIN"


def test_an_engine_that_ended_and_came_back_pardons_nobody() -> None:
    fleet = Fleet()
    fleet.dies("a", ("one", 0.2))
    fleet.tried("one", "b")
    fleet.dies("b", ("one", 0.2))
    fleet.suspects.lives("b", fleet.now_s + 5)
    assert fleet.standing("one") == "REFUSED"


def test_an_engine_that_lives_clears_its_suspect_after_a_while() -> None:
    fleet = Fleet()
    fleet.dies("a", ("one", 0.2))
    fleet.tried("one", "b")
    fleet.later(0.9)
    assert fleet.standing("one") == "ALONE"
    fleet.later(0.2)
    assert fleet.standing("one") == "AGAIN"
    assert fleet.found == ["suspected", "cleared"]


def test_an_engine_that_shows_no_life_clears_nobody() -> None:
    fleet = Fleet()
    fleet.dies("a", ("freezes", 0.2))
    fleet.tried("freezes", "b")
    fleet.heard["b"] = fleet.now_s + 0.1
    fleet.later(90)
    assert fleet.standing("freezes") == "ALONE"
    fleet.suspects.ended("b", fleet.now_s - 89.9, fleet.now_s)
    assert fleet.standing("freezes") == "REFUSED"


def test_a_trial_has_an_end_even_if_the_engine_has_nothing_to_say() -> None:
    fleet = Fleet()
    fleet.dies("a", ("one", 0.2))
    fleet.tried("one", "b")
    fleet.heard["b"] = fleet.now_s
    fleet.later(MOST_TRIAL_S)
    assert fleet.standing("one") == "AGAIN"


def test_who_is_there_at_two_ends_is_suspected_and_its_trial_lasts_as_long() -> None:
    fleet = Fleet()
    assert fleet.dies("a", ("slow", 5.0), ("beside", 4.0)) == ["AGAIN", "AGAIN"]
    fleet.later(ENDED_S)
    assert fleet.dies("b", ("slow", 5.0)) == ["ALONE"]
    assert fleet.standing("beside") == "AGAIN"
    fleet.tried("slow", "c")
    fleet.later(9.9)
    assert fleet.standing("slow") == "ALONE"
    assert fleet.dies("c", ("slow", 9.9)) == ["REFUSED"]


def test_the_same_request_twice_at_one_end_counts_once() -> None:
    fleet = Fleet()
    assert fleet.dies("a", ("same", 5.0), ("same", 6.0)) == ["AGAIN", "AGAIN"]


def test_who_was_answered_is_forgotten() -> None:
    fleet = Fleet()
    fleet.dies("a", ("one", 5.0))
    fleet.suspects.answered("one")
    assert not fleet.suspects.cases
    fleet.later(ENDED_S)
    assert fleet.dies("b", ("one", 5.0)) == ["AGAIN"]


def test_a_request_whose_client_has_left_is_suspected_too() -> None:
    fleet = Fleet()
    fleet.suspects.left("early", "a", fleet.now_s - 20)
    fleet.suspects.left("poison", "a", fleet.now_s - 0.3)
    fleet.suspects.left("elsewhere", "b", fleet.now_s - 0.3)
    fleet.dies("a")
    standings = [fleet.standing(name) for name in ("early", "poison", "elsewhere")]
    assert standings == ["AGAIN", "ALONE", "AGAIN"]
    fleet.tried("poison", "b")
    fleet.dies("b")
    assert fleet.standing("poison") == "REFUSED"


def test_a_frozen_engine_ended_when_it_last_showed_life() -> None:
    fleet = Fleet()
    stopped_s, now_s = fleet.now_s, fleet.now_s + 60
    fleet.suspects.left("froze it", "a", stopped_s - 0.1)
    fleet.suspects.left("came later", "a", stopped_s + 30)
    fleet.suspects.ended("a", stopped_s, now_s)
    assert fleet.suspects.lost("late", "a", stopped_s + 20, stopped_s, now_s) is AGAIN
    assert fleet.suspects.lost("beside", "a", stopped_s - 9, stopped_s, now_s) is AGAIN
    assert fleet.suspects.standing("froze it", now_s) is ALONE
    assert fleet.suspects.standing("came later", now_s) is AGAIN
    assert fleet.suspects.standing("late", now_s) is AGAIN
    assert len(fleet.suspects) == 2, "what came too late is not counted"


def test_a_trial_that_is_not_sent_is_none() -> None:
    fleet = Fleet()
    fleet.dies("a", ("one", 0.2), ("two", 0.2))
    fleet.suspects.begin("one")
    fleet.dies("b", ("old", 5.0))
    assert fleet.standing("one") == "ALONE"
    fleet.suspects.gives_up("one")
    assert fleet.suspects.may_begin("two", SETTLE_S, 1)
    fleet.tried("two", "c")
    fleet.suspects.gives_up("two")
    fleet.dies("c")
    assert fleet.standing("two") == "REFUSED", "it had been sent"


def test_an_engine_that_has_just_ended_counts_as_none() -> None:
    fleet = Fleet()
    fleet.dies("a", ("one", 5.0))
    assert fleet.suspects.has_ended("a", fleet.now_s)
    assert not fleet.suspects.has_ended("b", fleet.now_s)
    fleet.later(ENDED_S)
    assert not fleet.suspects.has_ended("a", fleet.now_s)


def test_peers_refuse_what_was_convicted_elsewhere_as_long_and_tell_it_no_further() -> None:
    one, two = Fleet(), Fleet()
    one.dies("a", ("poison", 0.2))
    one.tried("poison", "b")
    one.dies("b", ("poison", 0.2))
    one.later(REFUSED_S - 100)
    told = one.suspects.told(one.now_s)
    assert told == {"poison": 100}
    two.suspects.hear("one", told, two.now_s, is_trying=False)
    assert two.standing("poison") == "REFUSED"
    assert two.suspects.told(two.now_s) == {}
    two.later(100)
    assert two.standing("poison") == "AGAIN"


def test_no_trial_begins_while_a_peer_tries_one() -> None:
    """Both could be on the same engine, and one of them would be blamed for the other."""
    fleet = Fleet()
    fleet.dies("a", ("one", 0.2))
    fleet.suspects.hear("peer", {}, fleet.now_s, is_trying=True)
    assert not fleet.suspects.may_begin("one", SETTLE_S, 1)
    fleet.suspects.hear("peer", {}, fleet.now_s, is_trying=False)
    assert fleet.suspects.may_begin("one", SETTLE_S, 1)
    fleet.suspects.hear("peer", {}, fleet.now_s, is_trying=True)
    fleet.later(PEER_SILENT_S)
    assert fleet.suspects.may_begin("one", SETTLE_S, 1), "the peer has ended"


def test_the_table_is_bounded() -> None:
    fleet = Fleet()
    for number in range(LIMIT + 10):
        fleet.dies(f"e{number}", (f"r{number}", 0.1))
    assert len(fleet.suspects) == LIMIT
    assert fleet.standing("r0") == "AGAIN"
    assert fleet.standing(f"r{LIMIT + 9}") == "ALONE"


@given(st.lists(st.floats(0, SUSPECT_S), min_size=1, max_size=30), st.integers(0, 29))
def test_one_killer_among_many_ends_two_engines_and_no_other_is_refused(
    ages_s: list[float], place: int
) -> None:
    fleet = Fleet()
    names = [f"r{number}" for number in range(len(ages_s))]
    killer = names[place % len(names)]
    fleet.dies("a", *zip(names, ages_s, strict=True))
    ends = 1
    for name in names:
        fleet.later(1.0)
        fleet.tried(name, "b")
        if name == killer:
            fleet.later(0.3)
            ends += 1
            assert fleet.dies("b", (name, 0.3), ("beside", 0.1)) == ["REFUSED", "AGAIN"]
        else:
            fleet.suspects.answered(name)
    assert ends == 2
    assert [name for name in names if fleet.standing(name) == REFUSED.name] == [killer]
    assert fleet.suspects.told(fleet.now_s).keys() == {killer}
