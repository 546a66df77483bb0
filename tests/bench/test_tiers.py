"""The bench of tiers: what it sends, what it makes of what it saw, and which loads it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.lib.pin_load import Answer, Flooded, Texts, take
from bench.lib.script import InvariantBroken, NotValid
from bench.tiers import (
    APART,
    ARMS,
    HICACHE,
    PLANS,
    RELEASE,
    SHARED,
    TIERS,
    Moved,
    Plan,
    Round,
    Seen,
    arm_figures,
    cached_share,
    check_load,
    check_moves,
    comparison,
    flags_of,
    move_starts,
    moved_figures,
    returns,
)

PREFIX = 10_000
LEFT = [[PREFIX, PREFIX], [PREFIX, PREFIX]]
SMALL = Plan(5_000, 2)


def answer(cached: int, ttft_ms: float, text: str = "a") -> Answer:
    return Answer(PREFIX, cached, PREFIX, ttft_ms, is_whole=True, text=text)


def flooded(span_s: float) -> Flooded:
    return Flooded([Answer(1000, ttft_ms=40.0, is_whole=True, text="f")], span_s)


def arm(cached: int, ttft_ms: float, *, text: str = "a", unpinned_s: float = 1.0) -> Seen:
    """Two agents who both came back once, in one round."""
    back = [answer(cached, ttft_ms, text), answer(0, 2 * ttft_ms)]
    played = Round(back, [flooded(unpinned_s), flooded(unpinned_s)], 4.0)
    first = answer(0, 900.0)
    return Seen([[first, back[0]], [first, back[1]]], [played], [100.0])


def arms() -> dict[str, Seen]:
    return {
        "stock": arm(0, 400.0),
        HICACHE: arm(8_000, 100.0),
        RELEASE: arm(0, 400.0),
        TIERS: arm(PREFIX + 50, 50.0, unpinned_s=1.25),
    }


def test_what_is_found_counts_up_to_what_the_turn_before_left_marked() -> None:
    assert cached_share(arms()[TIERS].turns, LEFT) == 0.5
    assert cached_share(arms()[HICACHE].turns, LEFT) == 0.4


def test_tiers_are_compared_with_a_released_pin_and_with_hicache() -> None:
    found = comparison(arms(), LEFT)
    assert found["pinned_cached_share"] == 0.5
    assert found["ttft_p50_vs_hicache"]["median"] == 0.5
    assert found["ttft_p50_vs_release"]["median"] == 0.125
    assert found["ttft_mean_vs_hicache"]["median"] == 0.5
    assert found["unpinned_throughput_ratio"]["median"] == 0.8
    assert (found["waited_on_pin"], found["wrong_answers"]) == (0, 0)


def test_an_answer_with_another_text_is_wrong_in_whichever_arm() -> None:
    assert comparison({**arms(), RELEASE: arm(0, 400.0, text="b")}, LEFT)["wrong_answers"] == 1


def test_a_probe_that_takes_longer_than_beside_hicache_waited() -> None:
    seen = arms()
    seen[TIERS].probes, seen[HICACHE].probes = [151.0, 149.0], [100.0, 100.0]
    assert comparison(seen, LEFT)["waited_on_pin"] == 1


def test_an_arm_has_the_times_of_returns_and_the_tokens_of_all() -> None:
    found = arm_figures(arms()[HICACHE], LEFT)
    assert (found["cached_share"], found["ttft_mean_ms"], found["ttft_p99_ms"]) == (0.4, 150, 199)
    assert found["unpinned_ttft_p50_ms"] == 40
    assert found["tokens_per_s"]["median"] == (2 * PREFIX + 2_000) / 4
    assert found["unpinned_tokens_per_s"]["median"] == 1000


def test_agents_come_back_in_the_same_order_in_all_arms() -> None:
    texts = Texts()
    texts.fit(2000, 1000)
    rounds = [list(returns(texts, name, 24, 10, 2_000)) for name in ("one", "one", "other")]
    assert rounds[0] == rounds[1]
    agents = [one.agent for one in rounds[0]]
    assert len({*agents}) == len(agents) == 10
    assert agents != [one.agent for one in rounds[2]]
    unpinned = [prompt for one in rounds[0] for prompt in one.unpinned]
    assert len({*unpinned}) == len(unpinned)


def test_the_load_is_the_one_that_the_bench_is_about() -> None:
    check_load(arms(), LEFT, SMALL)
    with pytest.raises(NotValid, match="4 times the cache"):
        check_load(arms(), LEFT, Plan(5_001, 2))
    with pytest.raises(NotValid, match="room for all"):
        check_load(arms(), LEFT, Plan(5_000, 2, host_pools=3.9))
    with pytest.raises(NotValid, match="stock SGLang loses"):
        check_load({**arms(), "stock": arm(PREFIX, 50.0)}, LEFT, SMALL)
    with pytest.raises(NotValid, match="brings prefixes back"):
        check_load({**arms(), HICACHE: arm(0, 400.0)}, LEFT, SMALL)


def test_arms_that_get_other_prompts_or_no_answer_mean_nothing() -> None:
    other = arm(0, 400.0)
    other.turns[0][0].prompt_tokens += 1
    with pytest.raises(InvariantBroken, match=r"same prompts .*ours"):
        check_load({**arms(), RELEASE: other}, LEFT, SMALL)
    other.turns[0][0].is_whole = False
    with pytest.raises(InvariantBroken, match="answered whole"):
        check_load({**arms(), RELEASE: other}, LEFT, SMALL)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_agents_of_each_plan_fill_the_cache_four_times_and_a_pin_fits_its_budget(
    plan: Plan,
) -> None:
    assert plan.agents * plan.prefix_tokens >= 4 * plan.pool_tokens
    assert plan.prefix_tokens < plan.pool_tokens / 3
    assert plan.returns <= plan.agents


def test_both_arms_with_a_host_cache_have_the_same_one() -> None:
    plan = PLANS["quick"]
    flags = {name: flags_of(name, plan) for name in ARMS}
    budget = ("--host-pin-budget", "0.9")
    assert flags[HICACHE] == tuple(flag for flag in flags[TIERS] if flag not in budget)
    assert flags["stock"] == flags[RELEASE]


def test_texts_of_both_protocols_are_read() -> None:
    seen = Answer()
    for kind in ("text", "thinking"):
        take(seen, {"type": "content_block_delta", "delta": {"type": f"{kind}_delta", kind: "a"}})
    take(seen, {"choices": [{"delta": {"content": "b"}}]})
    take(seen, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {}})
    assert seen.text == "aab"


def moved(cached: int = 9_000, ttft_ms: float = 50.0, **apart: object) -> Moved:
    """One session that moved. apart: what differs where engines share nothing."""
    other = answer(0, 200.0)
    return Moved([answer(cached, ttft_ms)], [replace(other, **apart)])


def test_a_moved_session_is_compared_with_one_that_is_computed_again() -> None:
    check_moves(moved(), are_exact=True)
    found = moved_figures(moved())
    assert found["moved_ttft_vs_recompute"]["median"] == 0.25
    assert (found["moved"]["sessions"], found["moved"]["cached_share"]) == (1, 0.9)


@pytest.mark.parametrize(
    ("sessions", "error", "message"),
    [
        (moved(cached=7_000), NotValid, "the tier has what moves"),
        (moved(cached_tokens=2_500), NotValid, "without a tier all is computed"),
        (moved(is_whole=False), InvariantBroken, "answered whole"),
        (moved(text="b"), InvariantBroken, "loaded prefixes change no answer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_moves_that_show_nothing_are_not_valid_and_other_answers_end_the_run(
    sessions: Moved, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_moves(sessions, are_exact=True)


def test_answers_that_depend_on_the_batch_are_counted() -> None:
    check_moves(moved(text="b"), are_exact=False)
    assert moved_figures(moved(text="b"))["moved"]["wrong_answers"] == 1


def test_the_engines_of_moved_sessions_differ_in_the_shared_tier_alone(tmp_path: Path) -> None:
    made: dict[str, tuple[str, ...]] = {}
    engines = SimpleNamespace(ours=lambda folder, *flags: made.update({folder.name: flags}))
    for start in move_starts(engines, tmp_path, "--max-total-tokens", "4096").values():
        start()
    host = len(made[APART])
    assert made[SHARED][:host] == made[APART]
    assert made[SHARED][host::2] == ("--instances", "--shared-tier-bytes")
