"""What the agents of each worker use."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.working_set import GROWTH, LEAST_LEASE_S, MOST_LEASE_S, WorkingSet

REFILL_S = 30.0
GAP_S = 2.0


class Agents:
    """Agents of ann at worker 0, which computes all its memory in REFILL_S."""

    def __init__(self, limit: int = 100, refill_s: float = REFILL_S) -> None:
        self.set = WorkingSet(limit)
        self.now_s = 0.0
        self.refill_s = refill_s

    def asks(
        self, agent: int, tokens: int = 1000, *, held: int = 0, tenant: str = "ann", **more: Any
    ) -> None:
        about = {"worker": 0, "refill_s": self.refill_s, "now_s": self.now_s, **more}
        self.set.begin(agent, tenant, prompt_tokens=tokens, held_tokens=held, **about)

    def hears(self, agent: int, **more: Any) -> None:
        self.set.end(agent, self.now_s, self.refill_s, **more)

    def turns(self, agent: int, count: int, *, gap_s: float = GAP_S, **more: Any) -> None:
        """Turns that are answered at once."""
        for turn in range(count):
            self.now_s += gap_s if turn else 0.0
            self.asks(agent, **more)
            self.hears(agent)

    def used(self, worker: int = 0, besides: int = 99) -> dict[str, int]:
        self.set.check()
        return {owner: tokens for owner, tokens in self.set.used(worker, besides).items() if tokens}

    def after(self, passed_s: float) -> dict[str, int]:
        self.now_s += passed_s
        self.set.expire(self.now_s)
        return self.used()


AWAITED = int(GROWTH * 1000)


def test_an_agent_counts_while_it_computes() -> None:
    agents = Agents()
    agents.asks(1)
    assert agents.after(1e6) == {"ann": 1000}
    agents.hears(1)
    assert agents.used() == {}, "no agent of its tenant has come back yet"


def test_an_agent_that_comes_back_is_awaited_as_long_as_most_of_its_gaps() -> None:
    agents = Agents()
    agents.turns(1, 9)
    assert agents.after(GAP_S - 0.1) == {"ann": AWAITED}
    assert agents.set.awaited(0, besides=99) == AWAITED
    assert agents.set.awaited(0, besides=1) == 0
    assert agents.after(0.1) == {}


def test_an_agent_is_not_kept_for_longer_than_computing_it_again_takes() -> None:
    agents = Agents(refill_s=GAP_S)
    agents.turns(1, 9)
    assert agents.used() == {}
    agents.asks(1)
    assert (agents.used(), agents.set.awaited(0, 99)) == ({"ann": 1000}, 0)


def test_without_a_known_speed_none_is_awaited() -> None:
    agents = Agents(refill_s=0.0)
    agents.turns(1, 9)
    assert agents.used() == {}


def test_new_agents_are_kept_once_most_of_their_tenant_come_back() -> None:
    agents = Agents()
    for agent in range(4):
        agents.turns(agent, 3)
    assert agents.after(MOST_LEASE_S) == {}
    agents.turns(9, 1)
    assert agents.used() == {"ann": AWAITED}
    agents.turns(10, 1, tenant="bob")
    assert "bob" not in agents.used(), "of whose agents nothing is known"


def test_of_requests_that_nothing_follows_nothing_is_awaited() -> None:
    agents = Agents()
    agents.turns(0, 3)
    for agent in range(1, 9):
        agents.turns(agent, 1)
    agents.after(MOST_LEASE_S)
    agents.turns(9, 1)
    assert agents.used() == {}


def test_a_prefix_that_others_had_first_counts_once() -> None:
    agents = Agents()
    agents.asks(1, held=800)
    assert agents.used() == {"ann": 200}
    agents.hears(1)
    agents.asks(1, 1500, held=1000)
    assert agents.set.own_tokens(1, 2000, 2000) == 1200
    assert agents.set.own_tokens(2, 2000, 1900) == 100


def test_an_agent_that_is_held_back_leaves_its_memory_to_others() -> None:
    agents = Agents()
    agents.turns(1, 9)
    agents.set.waits(1)
    assert (agents.used(), agents.set.awaited(0, 99), 1 in agents.set) == ({}, 0, True)
    agents.asks(1)
    agents.set.waits(1)
    assert agents.used() == {"ann": AWAITED}, "another request of it computes"


def test_an_agent_counts_where_its_last_request_went() -> None:
    agents = Agents()
    agents.asks(1)
    agents.asks(1, worker=3)
    assert (agents.used(), agents.used(3)) == ({}, {"ann": 1000})
    agents.set.forget_worker(3)
    assert (agents.used(3), len(agents.set)) == ({}, 0)


def test_who_asks_does_not_compete_with_itself() -> None:
    agents = Agents()
    agents.asks(1)
    assert agents.used(besides=1) == {}


def test_a_tenants_less_important_agents_are_known() -> None:
    agents = Agents()
    agents.asks(1, priority=-5)
    agents.asks(2, 100, priority=-7)
    agents.asks(3, 10, tenant="bob", priority=-7)
    lower = agents.set.less_important
    assert lower(0, "ann", 0, 99) == 1100
    assert lower(0, "ann", 0, 1) == 100
    assert lower(0, "ann", -5, 1) == 100
    assert lower(0, "ann", -7, 99) == 0


def test_whoever_says_that_it_ended_counts_until_its_answer() -> None:
    agents = Agents()
    agents.asks(1)
    agents.asks(1)
    agents.hears(1, is_last=True)
    assert agents.used() == {"ann": 1000}, "another request of it computes"
    agents.hears(1, is_last=True)
    assert (agents.used(), len(agents.set)) == ({}, 0)


def test_of_too_many_agents_the_tenant_that_has_most_loses_the_most_silent() -> None:
    agents = Agents(limit=3)
    agents.asks(0, 10, tenant="bob")
    for agent in (1, 2, 3):
        agents.asks(agent, 10)
    assert [agent in agents.set for agent in range(4)] == [True, False, True, True]
    assert agents.used() == {"ann": 20, "bob": 10}


@pytest.mark.parametrize(("gap_s", "least_s"), [(0.01, LEAST_LEASE_S / 2), (25.0, 24.0)])
def test_a_lease_has_bounds(gap_s: float, least_s: float) -> None:
    agents = Agents()
    agents.turns(1, 9, gap_s=gap_s)
    assert agents.after(least_s) == {"ann": AWAITED}
    assert agents.after(REFILL_S) == {}


STEPS = st.tuples(
    st.sampled_from(["begin", "end", "last", "waits", "expire", "forget"]),
    st.integers(0, 9),
    st.sampled_from(["ann", "bob"]),
    st.integers(0, 2),
    st.integers(0, 2000),
    st.one_of(st.just(0.0), st.floats(0, 30)),
)


def test_many_turns_at_once_leave_a_short_list() -> None:
    agents = Agents()
    agents.turns(1, 300, gap_s=0.0)
    agents.set.check()


@given(st.lists(STEPS, max_size=60))
def test_the_sums_are_right_and_the_tables_bounded(steps: list[Any]) -> None:
    working_set, now_s = WorkingSet(limit=5), 0.0
    for step, agent, tenant, worker, tokens, passed_s in steps:
        now_s += passed_s
        if step == "begin":
            about = tokens, tokens // 3, now_s, agent - 5, REFILL_S
            working_set.begin(agent, tenant, worker, *about)
        elif step in ("end", "last"):
            working_set.end(agent, now_s, REFILL_S, is_last=step == "last")
        elif step == "waits":
            working_set.waits(agent)
        elif step == "forget":
            working_set.forget_worker(worker)
        else:
            working_set.expire(now_s)
        working_set.check()
