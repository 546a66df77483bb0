"""What is known of agents: what they do, whose they are, and whether they return."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.programs.agent import Doing
from scheduler.programs.compaction import HEAD_TOKENS, head_of
from scheduler.programs.gaps import LONGEST_S
from scheduler.programs.programs import (
    COMPACTED,
    MOST_IN_SESSION,
    MOST_TENANTS,
    PARENT,
    Programs,
    Request,
)

TOOL, TASK = ("Bash",), ("Task",)


class Story:
    """Agents of one session, on a clock that goes on by a second with each step."""

    def __init__(self, **usual: Any) -> None:
        self.programs = Programs()
        self.now_s = 0.0
        self._usual = {"session": "s", **usual}

    def asks(self, name: str, **more: Any) -> Any:
        self.now_s += 1
        change = self.programs.request(Request(name, **{**self._usual, **more}), self.now_s)
        self.programs.check()
        return change

    def hears(self, name: str, *tools: str, at_s: float | None = None) -> None:
        self.now_s += 1
        self.programs.computed(name, self.now_s)
        self.programs.answered(name, tools, self.now_s if at_s is None else at_s)

    def turn(self, name: str, *tools: str, **more: Any) -> Any:
        change = self.asks(name, **more)
        self.hears(name, *tools)
        return change

    def outlook(self, name: str, after_s: float = 0.0) -> Any:
        return self.programs.outlook(name, self.now_s + after_s)

    def doing(self, name: str) -> Doing:
        agent = self.programs.agent(name)
        assert agent is not None
        return agent.doing


def test_how_many_do_what_is_counted() -> None:
    story = Story()
    story.turn("lead", *TASK)
    story.asks("first")
    story.turn("second")
    assert story.programs.doing() == {Doing.CALLING: 1, Doing.COMPUTING: 1, Doing.TALKING: 1}


def test_calls_will_be_followed_by_a_request_and_a_text_may_be() -> None:
    story = Story()
    story.turn("calls", *TOOL)
    story.turn("talks", session="t")
    calls, talks = story.outlook("calls"), story.outlook("talks")
    assert calls.chance > 0.9 > talks.chance > 0.3
    assert calls.soon_s < talks.soon_s
    assert (calls.has_ended, talks.has_ended) == (False, False)
    story.asks("calls", brings_results=True)
    assert story.outlook("calls") == (1.0, 0.0, 0.0, False)
    assert story.outlook("nobody") is None


def test_until_an_answer_is_known_its_agent_may_do_either() -> None:
    story = Story()
    story.asks("a")
    story.programs.computed("a", story.now_s)
    assert story.doing("a") is Doing.OPEN
    assert 0.5 < story.outlook("a").chance < 1


def test_a_report_that_comes_after_the_next_request_changes_nothing() -> None:
    story = Story()
    story.turn("a", *TOOL)
    story.asks("a", brings_results=True)
    story.programs.answered("a", (), story.now_s)
    assert story.doing("a") is Doing.COMPUTING


HEADERS = {"id": "agent-1", "is_subagent": True}


@pytest.mark.parametrize("known_by", [HEADERS, {**HEADERS, "parent_id": "lead-thread"}, {}])
def test_a_subagent_has_ended_once_its_parent_goes_on_with_its_answer(
    known_by: dict[str, Any],
) -> None:
    story = Story()
    story.turn("lead", *TASK)
    story.turn("child", *TOOL, **known_by)
    story.turn("child", brings_results=True, **known_by)
    assert story.doing("child") is Doing.TALKING
    assert story.outlook("child").chance < 0.1
    change = story.asks("lead", brings_results=True)
    assert change.ended == (("child", PARENT),)
    assert story.outlook("child").has_ended
    assert story.outlook("child").chance == 0


def test_a_subagent_that_still_runs_tools_in_the_background_has_not_ended() -> None:
    story = Story()
    story.turn("lead", *TASK)
    story.turn("child", *TOOL, **HEADERS)
    assert story.asks("lead", brings_results=True).ended == ()
    assert story.doing("child") is Doing.CALLING


def test_a_person_who_interrupts_ends_no_subagent() -> None:
    story = Story()
    story.turn("lead", *TASK)
    story.turn("child", **HEADERS)
    assert story.asks("lead").ended == ()


def test_a_subagent_of_a_subagent_is_ended_by_its_own_parent() -> None:
    story = Story()
    story.turn("lead", *TASK)
    story.turn("child", *TASK, id="c", is_subagent=True)
    story.turn("grandchild", id="g", parent_id="c", is_subagent=True)
    assert story.asks("child", brings_results=True, id="c").ended == (("grandchild", PARENT),)


def test_agents_of_other_sessions_and_tenants_are_not_related() -> None:
    story = Story()
    story.turn("lead", *TASK)
    story.turn("other session", session="t")
    story.turn("other tenant", owner="them")
    story.turn("no session", session="")
    assert story.asks("lead", brings_results=True).ended == ()


def test_a_conversation_that_begins_while_no_tool_runs_is_no_subagent() -> None:
    story = Story()
    story.turn("lead")
    story.turn("second")
    agent = story.programs.agent("second")
    assert agent is not None
    assert (agent.is_subagent, agent.parent) == (False, "")


def test_a_last_request_and_a_revived_agent() -> None:
    story = Story()
    story.turn("a", is_last=True)
    assert story.outlook("a").has_ended
    story.turn("a", *TOOL)
    assert not story.outlook("a").has_ended


def test_a_compacted_conversation_takes_the_place_of_the_former() -> None:
    story = Story()
    story.turn("before", *TOOL)
    story.turn("child", *TOOL, **HEADERS)
    change = story.asks("after", is_compacted=True)
    assert change.ended == (("before", COMPACTED),)
    assert story.doing("child") is Doing.CALLING


def test_without_a_header_a_prompt_that_shrinks_to_its_head_shows_a_compaction() -> None:
    story = Story()
    story.turn("before", head=7, tokens=1000)
    change = story.asks("after", head=7, tokens=400)
    assert change.ended == (("before", COMPACTED),)
    assert not change.is_shorter


@pytest.mark.parametrize(
    ("calls", "more"),
    [
        ((), {"head": 8, "tokens": 400}),
        ((), {"head": 7, "tokens": 600}),
        ((), {"head": 0, "tokens": 400}),
        ((), {"head": 7, "tokens": 400, "session": "t"}),
        ((), {"head": 7, "tokens": 400, "id": "child", "is_subagent": True}),
        (TOOL, {"head": 7, "tokens": 400}),
    ],
    ids=["another head", "as long", "unknown head", "another session", "sub-agent", "runs tools"],
)
def test_other_conversations_end_no_other(calls: tuple[str, ...], more: dict[str, Any]) -> None:
    story = Story()
    story.turn("before", *calls, head=7, tokens=1000)
    assert story.asks("after", **more).ended == ()


def test_of_several_conversations_of_a_session_none_is_ended_by_a_short_one() -> None:
    """A client may name all its conversations alike."""
    story = Story()
    story.turn("a", head=7, tokens=1000)
    story.turn("b", head=7, tokens=1000)
    assert story.asks("c", head=7, tokens=400).ended == ()


def test_a_conversation_may_go_on_with_what_is_left_of_its_prompt() -> None:
    story = Story()
    assert not story.turn("a", *TOOL, head=7, tokens=1000).is_shorter
    assert not story.turn("a", *TOOL, head=7, tokens=1100).is_shorter
    change = story.turn("a", *TOOL, head=7, tokens=500)
    assert (change.is_shorter, change.ended) == (True, ())
    assert not story.turn("a", *TOOL, head=7, tokens=550).is_shorter


def test_a_prompt_has_a_head_if_it_is_long_enough() -> None:
    tools = list(range(HEAD_TOKENS))
    long, other = [*tools, *[1] * HEAD_TOKENS], [*tools, *[2] * HEAD_TOKENS]
    assert head_of(long) == head_of(other) != 0
    assert head_of(long) != head_of([9, *long])
    assert head_of(tools) == 0


def test_the_longer_an_agent_is_away_the_less_it_is_expected() -> None:
    story = Story()
    story.turn("a", *TOOL)
    chances = [story.outlook("a", after_s).chance for after_s in (0, 5, 50, 500)]
    assert chances == sorted(chances, reverse=True)
    for _ in range(8):
        story.turn("quick", *TOOL)
        story.asks("quick", brings_results=True)
    assert story.outlook("a", 1e6).chance < chances[0]


def test_a_request_that_is_never_answered_holds_nothing_for_long() -> None:
    story = Story()
    story.asks("a")
    assert story.outlook("a", 59.0).chance == 1
    assert story.outlook("a", 61.0).chance < 0.9
    story.hears("a", *TOOL)
    assert story.doing("a") is Doing.CALLING


def test_what_agents_do_is_learned_from_what_they_did() -> None:
    story = Story(session="")
    for number in range(60):
        story.turn(f"talks {number}")
        story.now_s += 2 * LONGEST_S
    change = story.turn("talks")
    assert change.gone == (Doing.TALKING,)
    assert story.outlook("talks").chance < 0.1
    assert len(story.programs) == 1


def test_calls_that_the_engine_cannot_read_are_learned_from_their_results() -> None:
    story = Story()
    story.turn("a")
    assert story.doing("a") is Doing.TALKING
    story.turn("a", brings_results=True)
    assert story.doing("a") is Doing.OPEN


def test_of_too_many_agents_the_largest_tenant_loses_its_oldest() -> None:
    programs = Programs(limit=8)
    programs.request(Request("few", owner="few"), 0.0)
    for number in range(50):
        programs.request(Request(f"many {number}", owner="many", session="s"), float(number))
        programs.check()
    assert programs.agent("few") is not None
    assert programs.agent("many 0") is None
    assert programs.agent("many 49") is not None


def test_a_session_and_the_number_of_tenants_are_bounded() -> None:
    programs = Programs()
    for number in range(MOST_IN_SESSION + 9):
        programs.request(Request(f"a{number}", session="s", id=f"{number}"), float(number))
    assert len(programs) == MOST_IN_SESSION
    for number in range(MOST_TENANTS + 9):
        programs.request(Request(f"t{number}", owner=f"{number}"), float(number))
    programs.check()
    assert len(programs) == MOST_TENANTS


NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
REQUESTS = st.builds(
    Request,
    name=NAMES,
    session=st.sampled_from(["", "s", "t"]),
    id=st.sampled_from(["", "1", "2"]),
    parent_id=st.sampled_from(["", "1", "2", "3"]),
    is_subagent=st.booleans(),
    brings_results=st.booleans(),
    stated_s=st.dictionaries(st.sampled_from(["Bash", ""]), st.floats(0, 1e6), max_size=2),
    is_last=st.booleans(),
    is_compacted=st.booleans(),
    head=st.integers(0, 1),
    tokens=st.integers(0, 100),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("request"), REQUESTS),
        st.tuples(st.just("computed"), NAMES),
        st.tuples(st.just("answered"), NAMES, st.sampled_from([(), TOOL, TASK])),
        st.tuples(st.just("wait"), st.floats(0, LONGEST_S)),
    ),
    max_size=60,
)


@given(STEPS)
def test_whatever_clients_do_the_tables_agree_and_chances_are_chances(
    steps: list[tuple[Any, ...]],
) -> None:
    """Names are of one tenant, as a digest of tenant and conversation is."""
    programs, now_s = Programs(limit=4), 0.0
    for kind, *given_ in steps:
        now_s += 0.5
        if kind == "request":
            seen = replace_owner(given_[0])
            programs.request(seen, now_s)
            assert programs.outlook(seen.name, now_s) == (1.0, 0.0, 0.0, False)
        elif kind == "computed":
            programs.computed(given_[0], now_s)
        elif kind == "answered":
            programs.answered(*given_, now_s)
        else:
            now_s += given_[0]
        programs.check()
        for name in "abcde":
            outlook = programs.outlook(name, now_s)
            if outlook is not None:
                assert 0 <= outlook.chance <= 1
                assert 0 <= outlook.soon_s <= outlook.late_s
                assert outlook.has_ended == (outlook.chance < 0.05)


def replace_owner(seen: Request) -> Request:
    return seen._replace(owner="x" if seen.name in "ab" else "y")
