"""The figures of a run of bench/priority."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.lib.priority_load import BATCH, INTERACTIVE, Answer, queues_found
from bench.lib.spread import percentiles_ms, ratio_spread, spread
from bench.lib.throughput import rates, total_per_s

Rounds = Sequence[Sequence[Answer]]


def of(answers: Sequence[Answer], priority: int) -> list[Answer]:
    """Those of one class."""
    return [answer for answer in answers if answer.request.priority == priority]


def starved(answers: Sequence[Answer], aging_s: float) -> int:
    """How many batch requests waited for their first token past the bound of aging.

    Those that come `patience_s` after one never overtake it. So its first token is due by then, or
    else when of all that had come before every interactive one was answered and every other
    one of the batch has begun.
    """
    patience_s = (INTERACTIVE - BATCH + 1) * aging_s
    found = 0
    for one in of(answers, BATCH):
        bound = one.sent_s + patience_s
        ahead = [
            other.ended_s if other.request.priority > BATCH else other.first_s or 0.0
            for other in answers
            if other is not one and other.sent_s < bound and other.ended_s is not None
        ]
        found += one.sent_s + one.wait_s > max([bound, *ahead])
    return found


def differing(rounds: Rounds, others: Rounds) -> int:
    """How many whole answers are not the same in both, of the same requests."""
    pairs = [
        (one.output_ids, other.output_ids)
        for answers, same in zip(rounds, others, strict=True)
        for one, other in zip(answers, same, strict=True)
        if one.ended_s is not None and other.ended_s is not None
    ]
    return sum(one != other for one, other in pairs)


def unlike_all(rounds: Rounds, *others: Rounds) -> int:
    """How many whole answers equal no other one to the same request.

    A preempted answer goes on after a prefill of what it had, and a batch of another size adds
    numbers in another order. So SGLang has more than one answer to a request: each is right.
    """
    return sum(
        one.ended_s is not None and all(one.output_ids != other.output_ids for other in same)
        for played in zip(rounds, *others, strict=True)
        for one, *same in zip(*played, strict=True)
    )


def arm_figures(rounds: Rounds, aging_s: float) -> dict[str, Any]:
    """One arm's figures."""
    answers = [answer for played in rounds for answer in played]
    return {
        "interactive": percentiles_ms("ttft", _waits_ms(of(answers, INTERACTIVE))),
        "batch": percentiles_ms("ttft", _waits_ms(of(answers, BATCH))),
        **rates(rounds),
        "batch_tokens_per_s": spread(list(map(batch_rate, rounds)), 1),
        "longest_batch_wait_s": longest_wait_s(answers),
        "preemptions": sum(answer.preempted for answer in answers),
        "answered_tokens": sum(answer.answered_tokens for answer in answers),
        "failed": sum(answer.ended_s is None for answer in answers),
        "starved": sum(starved(played, aging_s) for played in rounds),
    }


def batch_rate(answers: Sequence[Answer]) -> float:
    """Tokens of the batch a second, until all of it is done."""
    return total_per_s(of(answers, BATCH))


def interactive_ms(answers: Sequence[Answer]) -> float:
    """The median TTFT of a round's interactive requests."""
    return statistics.median(_waits_ms(of(answers, INTERACTIVE)))


def longest_wait_s(answers: Sequence[Answer]) -> float:
    """The longest wait of the batch for a first token that came."""
    return round(max(_waits_ms(of(answers, BATCH))) / 1000, 2)


def comparison(
    seen: Mapping[str, Rounds], counted: Mapping[str, Mapping[str, float]], aging_s: float
) -> dict[str, Any]:
    """Ours against the others, under one load. counted: by the engines, of each arm."""
    arms = {name: arm_figures(rounds, aging_s) for name, rounds in seen.items()}
    for name, arm in arms.items():
        arm["counters"] = counted[name]
    ours = arms["ours"]
    waits = {name: list(map(interactive_ms, rounds)) for name, rounds in seen.items()}
    batch = {name: list(map(batch_rate, rounds)) for name, rounds in seen.items()}
    stock = [rounds for name, rounds in seen.items() if name != "ours"]
    differs = {name: differing(seen["ours"], seen[name]) for name in seen if name != "ours"}
    wrong = unlike_all(seen["ours"], *stock)
    return {
        "ttft_p50_vs_fcfs": ratio_spread(waits["ours"], waits["fcfs"], 4),
        "ttft_p50_vs_stock_priority": ratio_spread(waits["ours"], waits["stock_priority"], 4),
        "batch_throughput_ratio": ratio_spread(batch["ours"], batch["fcfs"]),
        "queue_found": spread([statistics.median(queues_found(one)) for one in seen["fcfs"]], 1),
        **{name: ours[name] for name in ("longest_batch_wait_s", "preemptions", "starved")},
        "recomputed_tokens": counted["ours"]["sgl_ext_recomputed_tokens_total"],
        "outputs_identical": not wrong and not ours["failed"],
        "outputs_differing": {**differs, "stock": differing(*stock)},
        "arms": arms,
    }


def siege_figures(answers: Sequence[Answer], aging_s: float) -> dict[str, Any]:
    """How the batch fared while interactive requests alone were more than fit."""
    batch = of(answers, BATCH)
    ended = [one.ended_s - one.sent_s for one in batch if one.ended_s is not None]
    return {
        "interactive_requests": len(of(answers, INTERACTIVE)),
        "longest_batch_wait_s": longest_wait_s(answers),
        "longest_batch_s": round(max(ended), 2) if len(ended) == len(batch) else None,
        "batch_preemptions": sum(one.preempted for one in batch),
        "starved": starved(answers, aging_s),
    }


def _waits_ms(answers: Sequence[Answer]) -> list[float]:
    return [answer.wait_s * 1000 for answer in answers if answer.first_s is not None]
