"""The bench of priorities: what it makes of what it saw, and what it reads off a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.lib.capacity import Capacity
from bench.lib.generate import (
    BATCH,
    INTERACTIVE,
    Answer,
    Load,
    Request,
    queues_found,
    sent_beside_batch,
)
from bench.lib.script import NotValid
from bench.lib.texts import Texts
from bench.priority import (
    check_load,
    comparison,
    differing,
    fitted_load,
    starved,
    unlike_all,
)

AGING_S = 1.0
BOUND_S = 11.0


def answer(
    priority: int, sent_s: float, first_s: float | None, ended_s: float | None, **seen: Any
) -> Answer:
    request = Request("text", 100, priority, sent_s)
    return Answer(request, sent_s, first_s, ended_s, tokens=100, **seen)


def played(wait_s: float, batch_s: float, **seen: Any) -> list[Answer]:
    batch = [answer(BATCH, 0, 1.0, batch_s, **seen) for _ in range(4)]
    return [*batch, answer(INTERACTIVE, 1, 1 + wait_s, 2 + wait_s)]


def event(tokens: int, preempted: int = 0) -> bytes:
    meta = {"num_retractions": preempted, "prompt_tokens": 300, "completion_tokens": tokens}
    line = {"text": "a", "output_ids": list(range(tokens)), "meta_info": meta}
    return json.dumps(line, separators=(",", ":")).encode()


def test_what_a_preempted_request_had_been_answered_with() -> None:
    seen = Answer(Request("text", 6), sent_s=1.0)
    seen.take(b'{"error":{"message":"no"}}', 1.5)
    assert seen.wait_s == float("inf")
    for now_s, (tokens, preempted) in enumerate([(1, 0), (3, 0), (4, 1), (5, 2), (6, 2)], 2):
        assert seen.ended_s is None
        seen.take(event(tokens, preempted), float(now_s))
    assert (seen.wait_s, seen.ended_s) == (1.0, 6.0)
    assert (seen.preempted, seen.answered_tokens) == (2, 3 + 4)
    assert seen.output_ids == list(range(6))


CAPACITY = Capacity(prefill_per_s=1000, decode_per_s=100, streams=2, pool_tokens=700, slots=3)


def test_a_faster_engine_gets_a_larger_batch_and_keeps_a_fifth_interactive() -> None:
    shape = Load(16, (300, 300), (300, 8), (0.1, 0.2, 0.3, 0.4))
    assert fitted_load(shape, CAPACITY, 5.0) == shape
    fast = Capacity(100_000, 2_400, 8, 8192, 8)
    load = fitted_load(shape, fast, 4.0)
    assert load.batch == 32  # each takes 0.128 s
    assert len(load.offsets) == 8
    assert (load.offsets[0], load.offsets[-1]) == (0.1, pytest.approx(0.4))
    assert fitted_load(shape, fast, 1000.0).batch == 12 * 16


def test_a_round_without_a_queue_is_not_valid() -> None:
    waiting = [answer(BATCH, 0, 1.0 + n, 8.0, prompt_tokens=100) for n in range(4)]
    asking = answer(INTERACTIVE, 2.5, 5.0, 6.0)
    assert queues_found([*waiting, asking]) == [2]
    assert sent_beside_batch([*waiting, asking]) == 1
    check_load([*waiting, asking], CAPACITY)
    late = answer(INTERACTIVE, 9.0, 9.5, 9.6)
    with pytest.raises(NotValid, match="while the batch runs"):
        check_load([*waiting, late], CAPACITY)
    with pytest.raises(NotValid, match="find others waiting"):
        check_load([*waiting, answer(INTERACTIVE, 4.5, 5.0, 6.0)], CAPACITY)
    with pytest.raises(NotValid, match="more than the engine holds"):
        check_load([*waiting[:3], asking], CAPACITY)


def test_who_waits_beyond_the_bound_and_all_that_was_ahead_is_starved() -> None:
    late = answer(BATCH, 5, 5 + BOUND_S + 1, 40.0)
    assert starved([late], AGING_S) == 1
    assert starved([late], 2 * AGING_S) == 0
    ahead = answer(INTERACTIVE, 4 + BOUND_S, 16.0, late.first_s)
    assert starved([late, ahead], AGING_S) == 0
    after = answer(INTERACTIVE, 5 + BOUND_S, 16.0, late.first_s)
    assert starved([late, after], AGING_S) == 1
    assert starved([answer(BATCH, 0, None, None)], AGING_S) == 1


def test_arms_are_compared_by_medians_over_rounds() -> None:
    seen = {
        "fcfs": [played(4.0, 10.0), played(4.0, 20.0), played(4.0, 10.0)],
        "stock_priority": [played(2.0, 10.0)] * 3,
        "ours": [played(0.5, 10.0, preempted=1, answered_tokens=9), *[played(0.5, 12.5)] * 2],
    }
    counted = {name: {"sgl_ext_recomputed_tokens_total": 5.0} for name in seen}
    found = comparison(seen, counted, AGING_S)
    waits = [found[name]["median"] for name in ("ttft_p50_vs_fcfs", "ttft_p50_vs_stock_priority")]
    assert waits == [0.125, 0.25]
    assert found["batch_throughput_ratio"] == {
        "median": 1.0, "min": 0.8, "max": 1.6, "rounds": 3, "crosses_1": True
    }  # fmt: skip
    assert (found["preemptions"], found["recomputed_tokens"], found["starved"]) == (4, 5, 0)
    assert found["longest_batch_wait_s"] == 1.0
    assert found["outputs_identical"]
    assert found["arms"]["fcfs"]["interactive"] == {"ttft_p50_ms": 4000, "ttft_p99_ms": 4000}
    assert found["arms"]["ours"]["batch_tokens_per_s"]["median"] == 32.0


def test_an_answer_that_differs_is_found() -> None:
    one, other = played(1.0, 8.0), played(1.0, 8.0, output_ids=[1])
    assert differing([one], [one]) == 0
    assert differing([one], [other]) == 4
    assert differing([one], [[answer(BATCH, 0, None, None), *other[1:]]]) == 3


def test_an_answer_is_right_if_it_is_one_of_those_that_sglang_gives() -> None:
    one, other, third = (played(1.0, 8.0, output_ids=[n]) for n in range(3))
    assert unlike_all([one], [other], [one]) == 0
    assert unlike_all([third], [other], [one]) == 4
    seen = {"fcfs": [other], "stock_priority": [one], "ours": [one]}
    counted = {name: {"sgl_ext_recomputed_tokens_total": 0.0} for name in seen}
    found = comparison(seen, counted, AGING_S)
    assert found["outputs_identical"]
    assert found["outputs_differing"] == {"fcfs": 4, "stock_priority": 0, "stock": 4}
    assert not comparison({**seen, "ours": [third]}, counted, AGING_S)["outputs_identical"]


def test_a_fifth_is_interactive_and_no_two_prompts_are_alike() -> None:
    texts, load = Texts(), Load(16, (30, 40), (50, 8), (1.0, 2.0, 3.0, 4.0))
    requests = load.requests(texts, "Round 1")
    assert requests == load.requests(texts, "Round 1")
    assert len({request.text for request in requests}) == 20
    assert [request.body["priority"] for request in requests] == [0] * 16 + [10] * 4
    assert requests[-1].at_s == 4.0
    assert requests[-1].body["sampling_params"]["max_new_tokens"] == 8
