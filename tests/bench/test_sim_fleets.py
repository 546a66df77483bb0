"""Fleets in virtual time: their policies, events that come late or not at all, and churn."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bench.lib.script import InvariantBroken
from bench.sim.engine import Engine
from bench.sim.fleets import ARMS, CALLS, Job, check_index, engine, merged, run_job, trace_for
from bench.sim.our_router import OurRouter, OurRouters
from bench.sim.policies import (
    CacheAware,
    Counting,
    DynamoAgentic,
    LeastLoaded,
    LMetric,
    PowerOfTwo,
    RoundRobin,
)
from bench.sim.segments import Line, Load, Stored
from bench.sim.virtual_time import Churn, Feed, Policy, Run
from bench.trace.agents import TraceConfig, first_calls
from bench.trace.calls import Call, Loop
from bench.trace.variants import make_trace
from sgl_ext.reading.segments import Chain

ENGINES = 3
IDLE = Load(0, 0, 0, 0, 100_000)


def call(*hashes: int, agent: int = 0, turn: int = 0) -> Call:
    chain = Chain(hashes, tuple(4_000 * n for n in range(1, len(hashes) + 1)))
    return Call(agent, turn, "lead", "", chain, [], 1_000 * len(hashes), 100)


def engines(count: int = ENGINES) -> list[Engine]:
    return [Engine(engine()) for _ in range(count)]


def placed(policy: Any, *calls: Call, now: float = 0.0) -> list[int]:
    """The workers of calls that all stay under way."""
    found = []
    for each in calls:
        found.append(policy(each, engines(), now))
        policy.begin(each, found[-1], now)
    return found


def simulated(policy: Policy, **options: Any) -> Run:
    """A small trace on three engines, to its end."""
    agents, calls, _, _ = trace_for(ENGINES, 1)
    run = Run(agents, calls, policy, engines(), **options)
    run.all()
    assert run.answered == sum(len(agent.turns) for agent in agents)
    return run


def test_agents_keep_their_first_calls_and_whom_these_start() -> None:
    agents = make_trace(TraceConfig("published_kind", sessions=20, scale=0.02))
    short = first_calls(agents, 6)
    assert {len(agent.turns) for agent in short} <= {*range(7)}
    assert sum(agent.kind == "subagent" for agent in short if agent.turns) > 0
    loop = Loop(short)
    while loop.open:
        now = loop.next_at()
        assert now < math.inf, "no call waits for one that is never made"
        for agent, turn in loop.due(now):
            loop.finished(agent, turn, now)


def test_two_by_chance_and_the_one_with_fewer_requests() -> None:
    policy = PowerOfTwo()
    policy.under_way.update({0: 9})
    assert 0 not in placed(policy, *[call(n) for n in range(6)])


def test_a_long_match_is_followed_and_a_short_one_goes_to_the_smallest_tree() -> None:
    policy = CacheAware()
    first, same, other = placed(policy, call(1, 2, 3), call(1, 2, 3, 4), call(9))
    assert same == first != other
    (short,) = placed(policy, call(1, *range(20, 30)))
    assert short not in (first, other), "a tenth is no reason to follow"
    policy.under_way[first] += 100
    assert placed(policy, call(1, 2, 3)) != [first], "its load differs too much"


def test_a_product_of_tokens_to_prefill_and_requests_under_way() -> None:
    policy = LMetric()
    stored = [Stored(1, None, 1_000), Stored(2, 1, 2_000)]
    policy.event(1, Line([], stored, IDLE), 0.0)
    one, two = placed(policy, call(1, 2, 3), call(1, 2, 4, turn=1))
    assert (one, two) == (1, 0), "(1,000 + 1,000) x 2 is no less than 3,000 x 1"
    policy.first_byte(call(1, 2, 3), 1, 0.1)
    assert placed(policy, call(1, 2, 5, turn=2)) == [1], "1,000 x 2"


def test_prefill_less_cached_blocks_and_the_requests_under_way() -> None:
    """In tokens: 4 x (pending + prompt - 2 x cached) + active ones, and 1,024 for each request."""
    policy = DynamoAgentic()
    stored = [Stored(1, None, 1_000), Stored(2, 1, 2_000)]
    policy.event(1, Line([], stored, IDLE), 0.0)
    first, second, other = call(1, 2, 3), call(1, 2, 4, turn=1), call(8, turn=2)
    assert [16 * policy.cost(first, worker, held) for worker, held in ((0, 0), (1, 2_000))] == [
        4 * 3_000 + 3_000,
        4 * (3_000 - 2 * 2_000) + 3_000,
    ]
    assert placed(policy, first) == [1]
    shared = 4 * (1_000 + 3_000 - 2 * 2_000) + 4_000 + 1_024
    assert 16 * policy.cost(second, 1, 2_000) == shared, "what both have counts once"
    assert placed(policy, second) == [1], "the credit is worth more than the load"
    policy.first_byte(first, 1, 0.1)
    policy.end(first, 1, 0.2)
    assert 16 * policy.cost(other, 1, 0) == 4 * (1_000 + 1_000) + 3_000 + 1_000 + 1_024
    policy.first_byte(second, 1, 0.3)
    policy.end(second, 1, 0.4)
    assert 16 * policy.cost(other, 1, 0) == 4 * 1_000 + 1_000


@pytest.mark.parametrize("policy", [RoundRobin(), LeastLoaded(), PowerOfTwo(), OurRouter(ENGINES)])
def test_workers_that_leave_get_nothing_until_they_are_back(policy: Any) -> None:
    policy.leave(1, 0.0)
    begin = policy.begin if isinstance(policy, Counting) else lambda *_: None
    for turn in range(9):
        worker = policy(call(turn, agent=turn), engines(), 1.0)
        begin(call(turn), worker, 1.0)
        assert worker != 1
    policy.join(1, 2.0)
    workers = set()
    for turn in range(9, 40):
        worker = policy(call(turn, agent=turn), engines(), 60.0)
        begin(call(turn), worker, 60.0)
        workers.add(worker)
    assert workers == {0, 1, 2}


@pytest.mark.parametrize(
    "feed", [Feed(0.5), Feed(2.0), Feed(5.0), Feed(0.05, loss=0.2), Feed(5.0, loss=0.2)]
)
def test_an_index_is_right_after_events_that_came_late_or_not_at_all(feed: Feed) -> None:
    policy = OurRouter(ENGINES)
    run = simulated(policy, feed=feed)
    check_index(policy, run.engines, {})
    policy.index.check()


def test_a_lost_line_ends_a_stream_and_the_next_begins_with_a_snapshot() -> None:
    seen: list[tuple[int, bool, float]] = []

    class Watching(LeastLoaded):
        def event(self, worker: int, line: Line, now: float) -> None:
            seen.append((worker, line.cleared, now))

    simulated(Watching(), feed=Feed(loss=0.2))
    assert any(cleared for _, cleared, _ in seen)
    lines = len(seen)
    seen.clear()
    run = simulated(Watching())
    assert run.lines == len(seen) > lines
    assert not any(cleared for _, cleared, _ in seen)


def test_late_events_cost_little_of_what_is_cached() -> None:
    prompt_share = []
    for lag_s in (0.05, 5.0):
        cached, prompt = simulated(OurRouter(ENGINES), feed=Feed(lag_s)).cached
        prompt_share.append(cached / prompt)
    assert prompt_share[1] > 0.97 * prompt_share[0]


@pytest.mark.parametrize("make", [OurRouter, lambda count: OurRouters(count, 4)])
def test_engines_that_drain_and_come_back_lose_no_call(make: Any) -> None:
    policy = make(ENGINES)
    run = simulated(policy, churn=Churn(every_s=5.0, engines=1, away_s=8.0))
    check_index(policy, run.engines, {})
    assert min(each.finished for each in run.engines) > 0


@pytest.mark.parametrize("shares", [True, False])
def test_calls_come_to_all_balancers_and_each_finds_sessions_of_the_others(shares: bool) -> None:
    policy = OurRouters(ENGINES, 4, shares=shares)
    run = simulated(policy)
    assert all(len(each.decisions_us) > 10 for each in policy.balancers)
    alone = simulated(OurRouter(ENGINES))
    shares = [cached / prompt for cached, prompt in (run.cached, alone.cached)]
    assert shares[0] > 0.97 * shares[1]


def test_the_same_job_gives_the_same_figures() -> None:
    def figures(name: str) -> dict[str, Any]:
        found = merged([run_job(Job(name, ENGINES))])
        timed = ("decision", "processor")
        return {key: value for key, value in found.items() if not key.startswith(timed)}

    for name in ("ours", "ours_churn", "lmetric"):
        assert figures(name) == figures(name)
    assert figures("ours")["share_of_ideal"] > figures("round_robin")["share_of_ideal"]
    assert set(ARMS) >= {"ours_16_balancers", "cache_aware", "power_of_two", "least_loaded"}


def test_calls_that_warm_up_are_answered_and_not_counted() -> None:
    result = run_job(Job("ours", ENGINES))
    agents, calls, ideal, ideal_of_all = trace_for(ENGINES, 1)
    assert max(len(agent.turns) for agent in agents if agent.kind == "lead") == CALLS
    assert len(result.ttft_ms) == ideal.requests < ideal_of_all.requests
    assert ideal_of_all.requests == sum(map(len, calls))
    assert result.cached[1] == ideal.prompt_tokens
    assert result.cached_of_all[1] == ideal_of_all.prompt_tokens


def test_an_index_that_differs_from_the_engines_breaks_an_invariant() -> None:
    policy = OurRouter(ENGINES)
    run = simulated(policy)
    policy.index.clear(0)
    with pytest.raises(InvariantBroken, match="the index holds what engines hold"):
        check_index(policy, run.engines, {})
