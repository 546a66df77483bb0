"""The bench of pins: what it makes of what it saw, and what it reads off a stream."""

from __future__ import annotations

from typing import Any

import pytest

from bench.lib.capacity import Capacity
from bench.lib.clients import Answer, take
from bench.lib.pin_load import Conversation, Flooded
from bench.lib.script import InvariantBroken
from bench.lib.texts import Texts
from bench.pin_flood import (
    Part,
    Plan,
    Seen,
    arm_figures,
    cached_share,
    comparison,
    left_by,
    ttl_s,
    waited,
)


def turn(prompt: int, cached: int, ttft_ms: float = 300.0) -> Answer:
    return Answer(prompt, cached, prompt - 5, ttft_ms, is_whole=True)


def flooded(span_s: float) -> Flooded:
    return Flooded([Answer(1000, 0, 0, 50.0, is_whole=True), Answer(1000)], span_s)


TURNS = [turn(10_000, 3), turn(10_100, 9_995), turn(10_200, 10_097)]


def test_what_is_found_is_counted_up_to_the_last_mark() -> None:
    left = left_by(TURNS)
    assert cached_share(TURNS, left) == 1.0
    assert cached_share([*TURNS[:2], turn(10_200, 0)], left) == pytest.approx(9995 / 20_090)


def test_a_ttl_outlasts_the_floods_of_all_arms() -> None:
    plan = Plan(alone_pools=0.8, shared_pools=0.2, pool_tokens=10_000, ttl_s=10)
    slow, fast = (Capacity(rate, 1.0, 8, 10_000, 8) for rate in (1_000, 100_000))
    assert (ttl_s(plan, slow, 4), ttl_s(plan, fast, 4)) == (100, 10)


def test_marks_that_were_not_found_are_no_hits() -> None:
    with pytest.raises(InvariantBroken, match="last mark"):
        left_by([Answer(10_000, 0, 500)])


def test_a_request_that_ended_badly_adds_nothing_to_the_flood() -> None:
    assert Part(flooded(0.5), flooded(0.25)).tokens == 2000


def test_ratios_are_by_pairs() -> None:
    pinned, unpinned = (
        Seen(
            TURNS,
            turn(10_300, 1),
            [Part(flooded(1.0), flooded(1.0))],
            [0.9, 1.2, 0.99],
            probes,
        )
        for probes in ([1500.0, 1501.0], [1000.0, 1000.0])
    )
    found = comparison({"pinned": pinned, "stock": unpinned})
    price = {"median": 0.99, "min": 0.9, "max": 1.2, "rounds": 3, "crosses_1": True}
    assert found["flood_throughput_ratio"] == price
    assert found["ttft_ratio"]["stock"]["rounds"] == 2
    assert found["waited_on_pin"] == waited(pinned.probes, unpinned.probes) == 1
    figures = arm_figures(pinned, left_by(TURNS))
    assert figures["cached_share"] == 1.0
    assert figures["cached_share_after_ttl"] == 0.0001
    assert figures["ttft_p50_ms"] == 300.0


@pytest.mark.parametrize("arm", [{"ttl": "5m"}, {}, {"more": {"session_id": "agent"}}])
def test_all_arms_say_the_same(arm: dict[str, Any]) -> None:
    texts = Texts()
    plain, other = Conversation("system", texts), Conversation("system", texts, **arm)
    for _ in range(3):
        bodies = plain.ask(), other.ask()
    said = [[spoken(message["content"]) for message in body["messages"]] for body in bodies]
    assert said[0] == said[1][-5:]
    assert str(bodies[1]).count("cache_control") == (2 if "ttl" in arm else 0)
    assert bodies[1].get("session_id") == arm.get("more", {}).get("session_id")


def spoken(content: Any) -> str:
    return content if isinstance(content, str) else content[0]["text"]


def test_a_flood_has_its_size_and_no_two_prompts_alike() -> None:
    texts = Texts()
    texts.fit(2000, 1000)
    prompts = texts.flood("Round 1", 30_000)
    assert sum(2 * len(prompt.split()) for prompt in prompts) == pytest.approx(30_000, rel=0.06)
    assert len(set(prompts)) == len(prompts)
    assert prompts == texts.flood("Round 1", 30_000)


def test_both_protocols_streams_are_read() -> None:
    usage = {
        "input_tokens": 5, "cache_read_input_tokens": 70, "cache_creation_input_tokens": 25
    }  # fmt: skip
    seen = Answer()
    take(seen, {"type": "message_start", "message": {"usage": usage}})
    take(seen, {"type": "content_block_delta", "delta": {"thinking": "hm "}})
    take(seen, {"type": "content_block_delta", "delta": {"text": "a"}})
    take(seen, {"type": "message_delta", "usage": {"output_tokens": 8}})
    assert not seen.is_whole
    take(seen, {"type": "message_stop"})
    assert seen == Answer(100, 70, 95, is_whole=True)
    assert seen.text == "hm a"
    seen = Answer()
    take(seen, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    assert not seen.text
    take(seen, {"choices": [{"delta": {"reasoning_content": "a"}}]})
    details = {"prompt_tokens_details": {"cached_tokens": 70}}
    take(seen, {"choices": [], "usage": {"prompt_tokens": 100, **details}})
    assert seen == Answer(100, 70)
    assert seen.text == "a"
