"""The bench of prefilling ahead: what it sends, what it reads off a stream, what it makes of it."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.lib.capacity import Capacity
from bench.lib.clients import Answer, take
from bench.lib.texts import Texts
from bench.lib.voice import Voice
from bench.speculative_prefill import (
    Load,
    Person,
    Round,
    Stage,
    Turn,
    arm_figures,
    cached_share,
    comparison,
    failed,
)

FEW = Load(people=1, turns=2, system=50, result=60)


class Letters:
    """A tokenizer whose tokens are letters."""

    def encode(self, text: str) -> Any:
        return SimpleNamespace(ids=[ord(letter) for letter in text], tokens=list(text))


def person(arm: str, name: str = "Round 0, person 1") -> Person:
    stage = SimpleNamespace(texts=Texts(), voice=Voice(Letters()))
    return Person(FEW, cast(Stage, stage), arm, name)


def reply(*deltas: dict[str, Any]) -> Answer:
    made = Answer()
    for delta in deltas:
        take(made, {"choices": [{"delta": delta}]})
    take(made, {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": None}})
    return made


def called(name: str = "a") -> Answer:
    first = {"index": 0, "id": name, "function": {"name": "next", "arguments": ""}}
    rest = {"index": 0, "id": None, "function": {"name": None, "arguments": "{}"}}
    thought = {"role": "assistant", "content": "", "reasoning_content": "\n hm"}
    return reply(thought, {"tool_calls": [first]}, {"tool_calls": [rest]})


def played(
    ttft_ms: float, cached: int, *, others_ms: float = 10.0, span_s: float = 2.0, **fields: Any
) -> Round:
    """Turns whose first would spoil any figure that it is part of."""
    first = Turn(1, 500, Answer(600, 0, ttft_ms=9999.0, is_whole=True))
    next_ = Turn(2, 1000, Answer(1100, cached, ttft_ms=ttft_ms, is_whole=True))
    results = [Answer(2000, 1100, ttft_ms=50.0, is_whole=True, answer_tokens=40)] * 2
    counted = {"prefilled_ahead_tokens_total": 700.0, "prefilled_ahead_tokens_used_total": 500.0}
    made = {"warm_ups": [], "counted": counted, **fields}
    return Round([first, next_, next_], results, others_ms=[others_ms] * 4, span_s=span_s, **made)


def test_what_was_streamed_is_sent_back() -> None:
    said = called()
    function = {"name": "next", "arguments": "{}"}
    calls = [{"id": "a", "type": "function", "function": function}]
    assert said.message == {
        "role": "assistant", "content": "", "reasoning_content": "\n hm", "tool_calls": calls
    }  # fmt: skip
    assert said.prompt_tokens == 9
    text = reply({"reasoning_content": " hm"}, {"content": " yes"}, {"content": "."})
    assert text.message == {"role": "assistant", "content": " yes.", "reasoning_content": " hm"}


def converse(arm: str) -> list[dict[str, Any]]:
    one = person(arm)
    bodies = [one.writes(1)[0], one.reads(called())]
    one.hears(reply({"content": " yes."}))
    return [*bodies, one.warm_up(), one.writes(2)[0]]


def test_arms_differ_in_one_word_and_in_what_they_ask_for() -> None:
    off, ours = converse("off"), converse("ours")
    assert [body["nvext"]["agent_hints"]["speculative_prefill"] for body in off + ours] == (
        [False] * 4 + [True] * 4
    )
    for one, other in zip(off, ours, strict=True):
        texts = [[m["content"] for m in body["messages"]] for body in (one, other)]
        assert texts[0][1].removeprefix("off. ") == texts[1][1].removeprefix("ours. ")
        assert [texts[0][0], *texts[0][2:]] == [texts[1][0], *texts[1][2:]]


def test_a_conversation_is_sent_with_all_that_was_said() -> None:
    first, second, warm_up, third = converse("naive")
    roles = ["system", "user", "assistant", "tool", "assistant", "user"]
    for body, count in ((first, 2), (second, 4), (warm_up, 5), (third, 6)):
        assert [message["role"] for message in body["messages"]] == roles[:count]
    assert second["messages"][3]["tool_call_id"] == "a"
    assert warm_up["max_tokens"] == 1
    assert {"tools", "regex"}.isdisjoint(warm_up)
    assert first["tools"] == third["tools"]


def test_a_model_that_calls_no_tool_is_told_of() -> None:
    one = person("off")
    one.writes(1)
    with pytest.raises(RuntimeError, match="did not call"):
        one.reads(reply({"content": " no"}))


SAID = {True: "<think> so</think>[next()]", False: "<think> so</think> done"}


@pytest.mark.parametrize("is_call", SAID)
def test_a_grammar_gives_the_form_of_what_is_said(is_call: bool) -> None:
    form = Voice(Letters()).form(is_call=is_call)
    assert re.fullmatch(form["regex"], SAID[is_call])
    assert not re.fullmatch(form["regex"], SAID[not is_call])
    bias = {chr(int(number)): value for number, value in form["logit_bias"].items()}
    assert bias["<"] > bias["n"] > 0, "a word that could go on must end"


def test_a_persons_message_is_not_certain() -> None:
    voice = Voice(Letters())
    assert voice.own_tokens("four") - voice.own_tokens("") == 4
    assert voice.own_tokens("") == len("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")


def test_no_more_can_be_cached_than_is_certain() -> None:
    turns = [Turn(2, 1000, Answer(1100, cached)) for cached in (1005, 990, 0)]
    assert [cached_share(turn) for turn in turns] == [1.0, 0.99, 0.0]


def test_what_is_not_answered_whole_is_counted_and_left_out() -> None:
    one = played(100.0, 800)
    assert failed(one) == 0
    one.turns.append(Turn(3, 1000, Answer(0, 0, ttft_ms=1.0)))
    one.others_ms.append(float("inf"))
    one.warm_ups.append(Answer(0))
    assert failed(one) == 3
    figures = arm_figures([one])
    assert figures["failed"] == 3
    assert (figures["ttft_p50_ms"], figures["others_ttft_p99_ms"]) == (100.0, 10.0)
    assert figures["others_per_s"]["median"] == 2.0
    assert figures["tokens_per_s"]["median"] == 40.0


def test_arms_are_compared_round_by_round() -> None:
    warm_ups = [Answer(900, 300, is_whole=True)]
    seen = {
        "off": [played(300.0, 700), played(600.0, 700), played(300.0, 700)],
        "ours": [
            played(100.0, 1000, others_ms=11.0),
            played(100.0, 990, span_s=2.5),
            played(75.0, 990),
        ],
        "naive": [played(600.0, 700, warm_ups=warm_ups, span_s=4.0)] * 3,
    }
    found = comparison(seen)
    ratios = found["ttft_p50_ratio"], found["ttft_p50_ours_over_off"]
    assert [one["median"] for one in ratios] == [4.0, 0.25]
    assert found["next_prefix_cached_share"] == found["next_prefix_cached_share_p10"] == 0.99
    assert found["others_ttft_p99_ratio"] == 1.1
    assert found["others_throughput_ratio"]["median"] == 1.0
    assert (found["prefilled_ahead_tokens"], found["wasted_tokens"]) == (2100, 600)
    naive = found["naive"]
    assert (naive["ttft_p50_ratio"]["median"], naive["others_throughput_ratio"]["max"]) == (
        0.5,
        0.5,
    )
    assert (naive["next_prefix_cached_share"], naive["computed_tokens"]) == (0.7, 1800)
    off = found["arms"]["off"]
    assert (off["cold_tokens_p50"], off["result_ttft_p50_ms"], off["failed"]) == (300, 50.0, 0)
    assert off["first_ttft_p50_ms"] == 9999.0


def test_a_faster_engine_has_more_people_if_its_memory_holds_them() -> None:
    load = Load(people=10)

    def people(prefill_per_s: float, pool_tokens: int = 1_000_000) -> int:
        return load.people_for(Capacity(prefill_per_s, 1.0, 8, pool_tokens, 8))

    assert [people(rate) for rate in (1_000, 30_000, 60_000, 1e6)] == [10, 10, 15, 40]
    assert [people(1e6, pool) for pool in (100_000, 300_000)] == [10, 20]
