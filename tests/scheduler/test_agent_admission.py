"""Which agents' requests are held back because they do not fit into a worker's memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.agent_admission import (
    BUSY_FROM,
    SMALL_SHARE,
    SPAN_S,
    TYPICAL_TOKENS,
    Demand,
    Pool,
    PrefillPace,
    agents_that_fit,
    has_time,
    is_sent,
    pool_tokens,
)
from scheduler.capacity import CACHED_SHARE


def test_the_share_of_time_and_the_speed_follow_the_reports() -> None:
    pace = PrefillPace()
    for second in range(200):
        pace.report(1000 * second, 250 * second, float(second))
    assert pace.share(199.0) == pytest.approx(0.25, rel=0.1)
    assert pace.tokens_per_s == pytest.approx(4000)
    assert pace.seconds_of(10_000) == pytest.approx(2.5)
    assert pace.share(199.0 + 3 * SPAN_S) < 0.02


def test_nothing_is_known_of_a_worker_that_has_just_begun() -> None:
    pace = PrefillPace()
    pace.report(10**9, 10**9, 0.0)
    assert (pace.share(0.0), pace.seconds_of(1000)) == (0.0, 0.0)
    pace.report(10**9 + 4000, 10**9 + 1000, 1.0)
    assert pace.tokens_per_s == 4000
    pace.report(0, 0, 2.0)
    assert pace.tokens_per_s == 4000, "it was started again"


@given(st.lists(st.tuples(*[st.integers(0, 10**12)] * 2, st.floats(0, 1e6)), max_size=20))
def test_whatever_is_reported_a_share_is_a_share(reports: list[tuple[int, int, float]]) -> None:
    pace = PrefillPace()
    for tokens, busy_ms, now_s in sorted(reports, key=lambda one: one[2]):
        pace.report(tokens, busy_ms, now_s)
        assert 0 <= pace.share(now_s) <= 1
        assert pace.tokens_per_s >= 0


HOLD_S = 30.0
POOL = 10_000
TENANTS = st.sampled_from(["ann", "bob", "eve"])
TOKENS = st.integers(0, 3 * POOL)
USED = st.dictionaries(TENANTS, TOKENS, max_size=3)
WEIGHTS = st.dictionaries(TENANTS, st.floats(0.01, 100), max_size=3)


def demand(own_tokens: int, *, held_tokens: int = 0, tenant: str = "ann") -> Demand:
    return Demand(tenant, own_tokens + held_tokens, held_tokens, own_tokens)


def busy(used: dict[str, int], **about: int) -> Pool:
    """A worker with agents that are awaited."""
    return Pool(POOL, used, **{"less_important": 0, "awaited": 1, **about})


def is_held(
    one: Demand, used: dict[str, int], weights: dict[str, float] | None = None, **about: int
) -> bool:
    return not is_sent(one, busy(used, **about), 0.0, HOLD_S, weights or {})


def test_an_agent_that_does_not_fit_beside_the_others_is_held_back() -> None:
    assert is_held(demand(4001), {"ann": 6000})
    assert not is_held(demand(4000), {"ann": 6000})


def test_a_worker_has_time_if_it_is_idle_or_seldom_computes_prompts() -> None:
    assert has_time(0, pending_tokens=9, prefill_share=1.0)
    assert has_time(9, pending_tokens=0, prefill_share=BUSY_FROM / 2)
    assert not has_time(9, pending_tokens=0, prefill_share=BUSY_FROM)
    assert not has_time(9, pending_tokens=9, prefill_share=BUSY_FROM / 2), "one at a time"


def test_where_no_agent_is_expected_back_nothing_is_held_back() -> None:
    assert not is_held(demand(5000), {"ann": 6000}, awaited=0)


def test_an_agent_whose_prompt_is_in_memory_goes_on() -> None:
    own = 5000
    assert is_held(Demand("ann", own, int(own * CACHED_SHARE) - 1, own), {"ann": 6000})
    assert not is_held(Demand("ann", own, int(own * CACHED_SHARE), own), {"ann": 6000})


def test_what_takes_little_memory_is_sent() -> None:
    assert not is_held(demand(int(SMALL_SHARE * POOL) - 1), {"ann": 2 * POOL})
    assert is_held(demand(int(SMALL_SHARE * POOL)), {"ann": 2 * POOL})
    assert not is_held(demand(POOL + 1), {"ann": 2 * POOL}), "so large a size is wrong"


def test_a_tenants_only_agent_is_sent_however_large_it_is() -> None:
    assert not is_held(demand(2 * POOL), {})
    assert not is_held(demand(2 * POOL), {"bob": POOL})


def test_an_agent_does_not_wait_for_less_important_ones_of_its_tenant() -> None:
    assert not is_held(demand(5000), {"ann": 6000}, less_important=4000)
    assert is_held(demand(5000), {"ann": 4000, "bob": 6000}, less_important=4000)


def test_tokens_in_host_memory_count_with_what_loading_them_saves() -> None:
    assert pool_tokens(1000, 5000, 0.25) == 4000
    assert pool_tokens(1000, 5000, 1.5) == 1000
    assert pool_tokens(1000, 800, 0.25) == 1000, "the host has copies of what is on the device"


@given(TOKENS, USED, st.floats(HOLD_S, 1e6), WEIGHTS)
def test_nothing_is_held_back_for_longer_than_the_bound(
    own_tokens: int, used: dict[str, int], waited_s: float, weights: dict[str, float]
) -> None:
    assert is_sent(demand(own_tokens), busy(used), waited_s, HOLD_S, weights)


@given(TOKENS, USED, WEIGHTS)
def test_whatever_others_claim_an_agent_within_its_tenants_part_is_sent(
    own_tokens: int, used: dict[str, int], weights: dict[str, float]
) -> None:
    part = weights.get("ann", 1.0) / sum(weights.get(one, 1.0) for one in ("ann", "bob", "eve"))
    own = min(used.get("ann", 0), int(part * POOL))
    own_tokens = min(own_tokens, int(part * POOL) - own)
    assert not is_held(demand(own_tokens), used | {"ann": own}, weights)


@given(st.integers(100, 3 * POOL), st.integers(1, 3 * POOL), st.integers(0, 3 * POOL), WEIGHTS)
def test_beyond_its_part_a_tenant_gets_only_what_others_do_not_use(
    own_tokens: int, own: int, others: int, weights: dict[str, float]
) -> None:
    part = weights.get("ann", 1.0) / sum(weights.get(one, 1.0) for one in ("ann", "bob"))
    if own_tokens <= POOL and not is_held(demand(own_tokens), {"ann": own, "bob": others}, weights):
        assert own + own_tokens <= max(POOL - others, part * POOL if others else POOL)


@pytest.mark.parametrize(("weight", "held"), [(1.0, True), (3.0, False)])
def test_a_tenants_part_follows_its_weight(weight: float, held: bool) -> None:
    used = {"ann": 4000, "bob": 5000}
    assert is_held(demand(1500), used, {"ann": weight}) is held


def test_as_many_agents_fit_as_are_like_those_that_are_there() -> None:
    # Four agents of 10,000 tokens: seven more at one worker, none at the full one.
    assert agents_that_fit([70_000, 9_999, 0, -5_000], 40_000, 4) == 7
    assert agents_that_fit([9_999, 9_999], 40_000, 4) == 0, "rests of workers do not add up"
    assert agents_that_fit([2.5 * TYPICAL_TOKENS], 0, 0) == 2
    assert agents_that_fit([], 0, 0) == 0


@given(st.lists(st.floats(-1e6, 1e9), max_size=8), st.integers(0, 10**9), st.integers(0, 1000))
def test_what_fits_has_room(free: list[float], used: int, agents: int) -> None:
    typical = used / agents if agents and used else TYPICAL_TOKENS
    found = agents_that_fit(free, used, agents)
    assert 0 <= found * typical <= sum(max(one, 0) for one in free) * (1 + 1e-9)
