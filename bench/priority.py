"""How long does a person wait at an engine that batch work drives past its capacity?

80 % of the requests are batch: priority 0, long answers, all sent at once, more than fit. 20 %
are interactive: priority 10, short answers, sent one by one while the batch runs. Arms:

    fcfs            SGLang without the plugin
    stock_priority  the same with `--enable-priority-scheduling --default-priority-value 0` and
                    a preemption threshold of 9; it preempts only to free a slot
    ours            our engine, without the balancer, as the others

There are two loads: in `slots`, small requests use up the slots; in `memory`, large requests
use up the key-value cache. All arms get the same requests, with the priority in the body. In a
round, each arm serves all of them. One engine works at a time, and the order of the arms
rotates. The throughput of the batch is its tokens over the time until all of it is answered.
Ratios are of rounds.

What the engine computes a second is measured first. The batch has as many requests as keep that
engine busy for some seconds, and the run is not valid unless interactive requests found others
waiting at FCFS. `tokens_per_s_ratio` is ours over FCFS while requests do nothing but decode.

`preemptions` is how often requests lost their slot or memory: by our engine, by SGLang's
preemption for a slot, or by its retraction when decoding runs out of memory.
`answered_tokens` is the output they had by then. SGLang computes all of it again; our engine
only what was evicted in the meantime: `recomputed_tokens`. `counters` are the engines' own.

The interactive requests come in shares of the time that the batch takes by itself, which is
measured first. `outputs_identical`: each of our answers equals SGLang's, in one of its two arms.
`outputs_differing` counts ours that differ from each, and `stock` how many differ between the two.

A batch request is starved if its first token comes later than both the bound of aging after it
was sent, (10 - 0 + 1) * aging_s, and the end of all work that was sent by then: the last
interactive answer, and the last first token of the batch.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sgl_ext_cpu.node import Node

from bench.lib.capacity import Capacity, measured
from bench.lib.clients import clients
from bench.lib.engines import OURS, STOCK, Arm, chosen, engine_parser, rotated
from bench.lib.generate import (
    BATCH,
    INTERACTIVE,
    Answer,
    Load,
    play,
    queues_found,
    sent_beside_batch,
)
from bench.lib.script import NotValid, Size, precondition, require, run
from bench.lib.spread import percentiles_ms, ratio_spread, spread
from bench.lib.texts import fitted
from bench.lib.throughput import compared, rates, total_per_s
from sgl_ext.settings.schema import EngineSettings

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


def _waits_ms(answers: Sequence[Answer]) -> list[float]:
    return [answer.wait_s * 1000 for answer in answers if answer.first_s is not None]


_AGING_S = EngineSettings().aging_s
FLAGS = ("--chunked-prefill-size", "2048")
ARMS = {
    "fcfs": STOCK,
    "stock_priority": Arm(
        (
            "--enable-priority-scheduling",
            *("--default-priority-value", "0", "--priority-scheduling-preemption-threshold", "9"),
        )
    ),
    "ours": OURS,
}
_SLOTS = 8
_POOL_TOKENS = 8192
_LIMITS = ("--max-running-requests", str(_SLOTS), "--max-total-tokens", str(_POOL_TOKENS))
_MOST_BATCHES = 12  # so many times the least batch, on any engine
_COUNTERS = (
    "sgl_ext_preempted_requests_total",
    "sgl_ext_recomputed_tokens_total",
    "sglang:num_retracted_requests_total",
    "sglang:num_retracted_output_tokens_total",
)


_LOADS = {
    "slots": Load(16, (300, 400), (300, 8), (0.06, 0.18, 0.3, 0.42)),
    "memory": Load(12, (400, 1000), (1500, 8), (0.15, 0.35, 0.55)),
}
# For the pool of `bench/gpu/groups.py`, which eight of these large requests fill.
_BRIEF_LOADS = {
    "slots": Load(16, (300, 150), (300, 8), (0.06, 0.18, 0.3, 0.42)),
    "memory": Load(12, (4_000, 300), (6_000, 8), (0.15, 0.35, 0.55)),
}
_SMALLEST_LOADS = {
    "slots": Load(12, (60, 60), (60, 8), (0.1, 0.2, 0.3)),
    "memory": Load(10, (700, 300), (1500, 8), (0.15, 0.3)),
}


@dataclass(frozen=True)
class Plan:
    """How much of everything. least_s: for how long the batch keeps the engine busy; 0: as long as
    its least size does.
    """

    rounds: int = 9
    least_s: float = 4.0
    decode_rounds: int = 9
    loads: Mapping[str, Load] = field(default_factory=lambda: _LOADS)


PLANS: dict[Size, Plan] = {
    "full": Plan(),
    "quick": Plan(3, decode_rounds=5),
    "brief": Plan(1, 1.5, 3, _BRIEF_LOADS),
    "smallest": Plan(1, 0, 1, _SMALLEST_LOADS),
}


async def measure(
    nodes: Mapping[str, Node], capacity: Capacity, shape: Load, plan: Plan, *, are_exact: bool
) -> dict[str, Any]:
    """Runs the arms under one load, on engines that run, and returns the figures."""
    texts = fitted(nodes["fcfs"])
    seen: dict[str, list[list[Answer]]] = {name: [] for name in nodes}
    load = fitted_load(shape, capacity, plan.least_s)
    async with clients() as http:
        for name, node in nodes.items():  # warm-up
            await play(http, node.engines[0], load.requests(texts, f"Warm-up of {name}")[-2:])
        before = {name: _counters(node) for name, node in nodes.items()}
        alone = replace(load, offsets=()).requests(texts, "Batch alone")
        taken = await play(http, nodes["fcfs"].engines[0], alone)
        batch_s = max(answer.ended_s or 0.0 for answer in taken)
        for number in range(plan.rounds):
            requests = load.requests(texts, f"Round {number}", batch_s)
            for name in rotated(list(nodes), number):
                seen[name].append(await play(http, nodes[name].engines[0], requests))
    for answers in (each for rounds in seen.values() for each in rounds):
        failed = sum(answer.ended_s is None for answer in answers)
        require(not failed, "every request is answered whole", failed=failed)
    for answers in seen["fcfs"]:
        check_load(answers, capacity)
    counted = {
        name: {one: value - before[name][one] for one, value in _counters(node).items()}
        for name, node in nodes.items()
    }
    found = comparison(seen, counted, _AGING_S)
    differing = found["outputs_differing"]
    is_allowed = found["outputs_identical"] or not are_exact
    require(is_allowed, "answers equal those of SGLang", differing=differing)
    sizes = {"batch_requests": load.batch, "interactive_requests": len(load.offsets)}
    return {"batch_alone_s": round(batch_s, 2), **sizes, **found}


def fitted_load(shape: Load, capacity: Capacity, least_s: float) -> Load:
    """The load with a batch that keeps this engine busy for `least_s` or longer."""
    prompt, answer = shape.batch_tokens
    most = _MOST_BATCHES * shape.batch
    count = capacity.requests_for(least_s, prompt, answer, least=shape.batch, most=most)
    return shape.with_batch(count)


def check_load(answers: Sequence[Answer], capacity: Capacity) -> None:
    """Raises NotValid unless the batch was more than the engine holds, for as long as the
    interactive requests came, and these found others waiting. answers: of FCFS, of a round."""
    batch = [answer for answer in answers if answer.request.priority == BATCH]
    tokens = sum(answer.prompt_tokens + answer.tokens for answer in batch)
    is_past = len(batch) > capacity.slots or tokens > capacity.pool_tokens
    precondition(is_past, "the batch alone is more than the engine holds", tokens=tokens)
    beside, others = sent_beside_batch(answers), len(answers) - len(batch)
    is_beside = 2 * beside >= others
    precondition(is_beside, "interactive requests come while the batch runs", beside=beside)
    queue = statistics.median(queues_found(answers))
    precondition(queue >= 1, "interactive requests find others waiting", queue=queue)


async def calibrate(nodes: Mapping[str, Node]) -> Capacity:
    """What stock SGLang can do here."""
    async with clients() as http:
        return await measured(http, nodes["fcfs"].engines[0], fitted(nodes["fcfs"]), _SLOTS)


async def decode(nodes: Mapping[str, Node], capacity: Capacity, rounds: int) -> dict[str, Any]:
    """Tokens per second of ours and stock, without a queue."""
    urls = {"ours": nodes["ours"].engines[0], "stock": nodes["fcfs"].engines[0]}
    async with clients() as http:
        return await compared(http, urls, fitted(nodes["fcfs"]), capacity, rounds)


def _counters(node: Node) -> dict[str, float]:
    return {name: node.metric(name) for name in _COUNTERS}


def main() -> None:
    options = engine_parser(__doc__).parse_args()
    plan = PLANS[options.size]
    # One core computes; clients and tokenizers need the other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    engines = chosen(options, "tiny")
    with engines.serving(ARMS, *FLAGS, *_LIMITS) as nodes:
        run("priority", partial(measure_all, nodes, plan, are_exact=engines.are_exact))


def measure_all(nodes: Mapping[str, Node], plan: Plan, *, are_exact: bool) -> dict[str, Any]:
    """The figures of each load."""
    capacity = asyncio.run(calibrate(nodes))
    decoding = asyncio.run(decode(nodes, capacity, plan.decode_rounds))
    found: dict[str, Any] = {"capacity": capacity.document(), **decoding}
    for name, load in plan.loads.items():
        try:
            found[name] = asyncio.run(measure(nodes, capacity, load, plan, are_exact=are_exact))
        except NotValid as missed:
            found[name] = {"not_valid": str(missed)}
        print(json.dumps({name: found[name]}), flush=True)
    not_valid = {name: found[name].get("not_valid") for name in plan.loads}
    precondition(not all(not_valid.values()), "a load is more than the engine holds", **not_valid)
    return {**found, "starved": sum(found[name].get("starved", 0) for name in plan.loads)}


if __name__ == "__main__":
    main()
