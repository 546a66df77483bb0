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
Ratios are medians over rounds.

`preemptions` is how often requests lost their slot or memory: by our engine, by SGLang's
preemption for a slot, or by its retraction when decoding runs out of memory.
`answered_tokens` is the output they had by then. SGLang computes all of it again; our engine
only what was evicted in the meantime: `recomputed_tokens`. `counters` are the engines' own.

The interactive requests come in shares of the time that the batch takes by itself, which is
measured first. `outputs_identical`: our answers equal those of FCFS, which preempts no request.

A batch request is starved if its first token comes later than both the bound of aging after it
was sent, (10 - 0 + 1) * aging_s, and the end of all work that was sent by then: the last
interactive answer, and the last first token of the batch. Rounds end long before that bound. So
without `--quick` there is a siege too: more interactive requests than fit, without a pause and
for longer than the bound, beside two batch requests. Only our engine has that bound; the result
of SGLang's priorities is reported for comparison.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from sgl_ext_cpu.node import Node

from bench.lib.arms import running_arms
from bench.lib.engines import Engines, chosen, engine_parser
from bench.lib.pin_load import Texts
from bench.lib.priority_figures import comparison, siege_figures
from bench.lib.priority_load import BATCH, INTERACTIVE, Answer, Load, Request, fitted, play, siege
from bench.lib.script import Size, require, run
from sgl_ext.settings.schema import EngineSettings

_AGING_S = EngineSettings().aging_s
FLAGS = ("--chunked-prefill-size", "2048")
ARMS = {
    "fcfs": (Engines.stock, ()),
    "stock_priority": (
        Engines.stock,
        (
            "--enable-priority-scheduling",
            *("--default-priority-value", "0", "--priority-scheduling-preemption-threshold", "9"),
        ),
    ),
    "ours": (Engines.ours, ()),
}
_SLOTS = 8
_POOL_TOKENS = 8192
_LIMITS = ("--max-running-requests", str(_SLOTS), "--max-total-tokens", str(_POOL_TOKENS))
_BESIEGERS = 6 * _SLOTS  # enough that some always wait
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
_BRIEF_LOADS = {
    "slots": Load(16, (300, 150), (300, 8), (0.06, 0.18, 0.3, 0.42)),
    "memory": Load(12, (400, 600), (1500, 8), (0.15, 0.35, 0.55)),
}
_SMALLEST_LOADS = {
    "slots": Load(12, (60, 60), (60, 8), (0.1, 0.2, 0.3)),
    "memory": Load(10, (700, 300), (1500, 8), (0.15, 0.3)),
}


@dataclass(frozen=True)
class Plan:
    """How much of everything. siege_s: past the bound of aging; 0: none."""

    rounds: int = 9
    siege_s: float = (INTERACTIVE - BATCH + 1) * _AGING_S + 20
    loads: Mapping[str, Load] = field(default_factory=lambda: _LOADS)


PLANS: dict[Size, Plan] = {
    "full": Plan(),
    "quick": Plan(2, 0),
    "brief": Plan(1, 0, _BRIEF_LOADS),
    "smallest": Plan(1, 0, _SMALLEST_LOADS),
}


async def measure(
    nodes: Mapping[str, Node], load: Load, plan: Plan, *, are_exact: bool
) -> dict[str, Any]:
    """Runs the arms under one load, on engines that run, and returns the figures."""
    texts = fitted(nodes["fcfs"])
    seen: dict[str, list[list[Answer]]] = {name: [] for name in nodes}
    before = {name: _counters(node) for name, node in nodes.items()}
    async with _clients() as http:
        for name, node in nodes.items():  # warm-up
            await play(http, node.engines[0], load.requests(texts, f"Warm-up of {name}")[-2:])
        alone = replace(load, offsets=()).requests(texts, "Batch alone")
        taken = await play(http, nodes["fcfs"].engines[0], alone)
        batch_s = max(answer.ended_s or 0.0 for answer in taken)
        for number in range(plan.rounds):
            requests = load.requests(texts, f"Round {number}", batch_s)
            for name in _in_turn(nodes, number):
                seen[name].append(await play(http, nodes[name].engines[0], requests))
    for answers in (each for rounds in seen.values() for each in rounds):
        failed = sum(answer.ended_s is None for answer in answers)
        require(not failed, "every request is answered whole", failed=failed)
    sent = [answer.request for answer in seen["fcfs"][0] if answer.request.priority == BATCH]
    tokens = sum(load.batch_tokens[0] + request.answer_tokens for request in sent)
    is_past = len(sent) > _SLOTS or tokens > _POOL_TOKENS
    require(is_past, "the batch alone is more than the engine holds", tokens=tokens)
    beside = min(sent_beside_batch(answers) for answers in seen["fcfs"])
    require(beside > 0, "interactive requests come while the batch runs")
    counted = {
        name: {one: value - before[name][one] for one, value in _counters(node).items()}
        for name, node in nodes.items()
    }
    found = comparison(seen, counted, _AGING_S)
    differing = found["outputs_differing"]
    is_allowed = found["outputs_identical"] or not are_exact
    require(is_allowed, "answers equal those of SGLang", differing=differing)
    return {"batch_alone_s": round(batch_s, 2), **found}


def sent_beside_batch(answers: Sequence[Answer]) -> int:
    """How many interactive requests were sent while a batch request had still to be answered."""
    ends = [answer.ended_s or 0.0 for answer in answers if answer.request.priority == BATCH]
    return sum(answer.sent_s < max(ends) for answer in answers if answer.request.priority != BATCH)


async def besiege(nodes: Mapping[str, Node], load: Load, span_s: float) -> dict[str, Any]:
    """The batch's figures while interactive requests alone are more than fit."""
    texts = fitted(nodes["fcfs"])
    async with _clients() as http:
        return {
            name: siege_figures(
                await _besieged(http, nodes[name].engines[0], load, texts, span_s), _AGING_S
            )
            for name in ("ours", "stock_priority")
        }


def _clients() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=600)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


def _counters(node: Node) -> dict[str, float]:
    return {name: node.metric(name) for name in _COUNTERS}


async def _besieged(
    http: aiohttp.ClientSession, url: str, load: Load, texts: Texts, span_s: float
) -> list[Answer]:
    batch = [Request(request.text, 32, at_s=1.0) for request in load.requests(texts, "Siege")[:2]]

    def interactive(number: int) -> Request:
        return load.interactive(texts, f"Siege, interactive {number}")

    return await siege(http, url, batch, interactive, _BESIEGERS, span_s)


def _in_turn(nodes: Mapping[str, Node], number: int) -> list[str]:
    names = list(nodes)
    first = number % len(names)
    return names[first:] + names[:first]


def arms(engines: Engines, folder: Path) -> dict[str, Callable[[], AbstractContextManager[Node]]]:
    """What starts the engine of each arm."""
    return {
        name: partial(start, engines, folder / name, *FLAGS, *_LIMITS, *flags)
        for name, (start, flags) in ARMS.items()
    }


def main() -> None:
    options = engine_parser(__doc__).parse_args()
    plan = PLANS[options.size]
    # One core computes; clients and tokenizers need the other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    engines = chosen(options, "tiny")
    with (
        tempfile.TemporaryDirectory(prefix="sgl-ext-bench-") as folder,
        running_arms(arms(engines, Path(folder))) as nodes,
    ):
        run("priority", partial(measure_all, nodes, plan, are_exact=engines.are_exact))


def measure_all(nodes: Mapping[str, Node], plan: Plan, *, are_exact: bool) -> dict[str, Any]:
    """The figures of each load, and of the siege."""
    found: dict[str, Any] = {}
    for name, load in plan.loads.items():
        found[name] = asyncio.run(measure(nodes, load, plan, are_exact=are_exact))
        print(json.dumps({name: found[name]}), flush=True)
    if plan.siege_s:
        found["siege"] = asyncio.run(besiege(nodes, plan.loads["slots"], plan.siege_s))
    ours = [found["slots"], found["memory"], found.get("siege", {}).get("ours", {})]
    return {**found, "starved": sum(one.get("starved", 0) for one in ours)}


if __name__ == "__main__":
    main()
