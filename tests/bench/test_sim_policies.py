"""Policies of other routers in the simulator: whom they choose."""

from __future__ import annotations

from typing import Any

from bench.sim.engine import Engine
from bench.sim.policies import CacheAware, DynamoAgentic, LMetric
from bench.sim.segments import Line, Load, Stored
from bench.trace.calls import Call
from sgl_ext.reading.segments import Chain

IDLE = Load(0, 0, 0, 0, 100_000)


def call(*hashes: int, agent: int = 0, turn: int = 0) -> Call:
    chain = Chain(hashes, tuple(4_000 * n for n in range(1, len(hashes) + 1)))
    return Call(agent, turn, "lead", "", chain, [], 1_000 * len(hashes), 100)


def engines() -> list[Engine]:
    return [Engine() for _ in range(3)]


def placed(policy: Any, *calls: Call, now: float = 0.0) -> list[int]:
    """The workers of calls that all stay under way."""
    found = []
    for each in calls:
        found.append(policy(each, engines(), now))
        policy.begin(each, found[-1], now)
    return found


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
