"""What bench.compaction sends, and how it counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.compaction import CLIENTS, LOADS, SUM_UP, Agent, Compaction, differing, figures
from bench.lib.clients import Answer
from bench.lib.texts import Texts


def answered(cached: int, ttft_ms: float, text: str) -> Answer:
    return Answer(prompt_tokens=1_000, cached_tokens=cached, ttft_ms=ttft_ms, content=text)


def seen(summary_s: float, after_ms: float, text: str = "a") -> Compaction:
    after, warm = answered(600, after_ms, text), answered(900, 100.0, text)
    summary = replace(answered(900, 50.0, ""), seconds=summary_s)
    return Compaction(summary, after, warm)


@pytest.mark.parametrize("client", CLIENTS)
def test_arms_get_equal_prompts_and_each_client_its_form(client: str) -> None:
    load, texts = LOADS["smallest"], Texts()
    one, other = (Agent(texts, load, client, "round 1") for _ in range(2))
    messages = [*one.opening, *one.reads()]
    assert messages == [*other.opening, *other.reads()]
    assert one.after(messages) == other.after(messages)
    assert one.after(messages)[-1]["role"] == ("user" if client == "codex" else "tool")
    asked = one.body([*messages, {"role": "user", "content": SUM_UP}], sums_up=True)
    assert ("tools" in asked) == (client != "codex")
    assert "tools" in one.body(messages)


def test_what_a_person_waits_for_is_compared_by_round() -> None:
    found = figures({"ours": [seen(0.88, 120.0)], "stock": [seen(1.76, 240.0)]})
    assert found["wait_vs_stock"]["median"] == 0.5
    ours = found["arms"]["ours"]
    assert ours["ttft_after_over_warm"]["median"] == 1.2
    assert ours["cold_tokens"]["median"] == 400
    assert ours["summary_cached_share"]["median"] == 0.9


def test_answers_that_differ_from_stock_s_are_counted() -> None:
    same, other = seen(1.0, 1.0), seen(1.0, 1.0, "b")
    assert differing({"ours": [same], "stock": [same]}) == 0
    assert differing({"ours": [same, same], "stock": [same, other]}) == 2
