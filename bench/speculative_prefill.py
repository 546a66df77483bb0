"""How much sooner does a person's next turn start if the engine prefills it ahead?

Ten people, and more on a faster engine, talk to agents for five turns each, at the same time. In
a turn the person writes, the model thinks and calls a tool, the tool takes 1.5 to 4.5 s, its
result of 1,300 tokens is sent back, and the model thinks and answers. The person thinks for 1 to
5 s and writes again. The template keeps thinking within a turn and drops it when the person has
written again. So the next prompt differs from the cached one from the turn's first thought on.
Arms:

    off     the client marks no request
    ours    it marks each with `nvext.agent_hints.speculative_prefill`
    naive   after each answer it sends the part of the next turn that it knows, as any client
            can: the messages, without tools, for one token

All arms use the same engine. In `off` and `naive`, requests forbid the engine to prefill ahead
unmarked. A round is each arm, in an order that rotates, with an empty cache: the same texts,
sizes and pauses, except for one word. The model's output follows a grammar
(`bench.lib.voice`). Other clients send short prompts, one at a time with pauses, so
the engine is idle now and then.

TTFTs are of the requests with which a person writes, from the second turn on. The part of such
a prompt before the new message is known while the person thinks. `next_prefix_cached_share` is
how much of that part was cached when the request came (median), and `_p10` the 10th percentile.
Without prefill most of a long conversation is cached too; `cold_tokens_p50` is the rest.

`ttft_p50_ratio` is off / ours: more is better. `ttft_p50_ours_over_off` is its inverse. The
`others_` ratios are ours / off for the other clients' requests: p99 over all rounds, and answers
per second. All ratios but that p99 are of rounds. `wasted_tokens` were computed ahead and used by
no next turn, by the engine's count; they include what is prefilled after a person's last turn.
`naive` has the same figures for that arm, against off.
`tokens_per_s_ratio` is ours over stock SGLang while requests do nothing but decode.

With --full-pool, the memory is full of other sessions' prompts before people talk, and the arms
are shares of it that what is prefilled ahead may take from them: none, 5% and 20%. Figures are
TTFTs as above, and how many of the other sessions' tokens left the cache while people talked;
`others_lost_more_tokens` is that number minus the one without a share.

With --returns, the engine has HiCache and little memory. A session's turn ends with a call of the
tool, and while that runs, other work takes all of the memory. In the arm `ours` the engine loads
the prefix back before the session returns; in `off` the client withdraws (`DELETE /v1/prefill`)
once the answer's turn is prefilled, so that the session's request loads it. Arms get the same
prompts and pauses, each with an empty cache, one after the other. TTFTs are of the returns.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import requests
from sgl_ext_cpu.node import Node

from bench.lib.arms import rotated, running_arms
from bench.lib.capacity import measured
from bench.lib.engines import chosen, engine_parser
from bench.lib.full_pool import SHARES, FullPool, Part, figures
from bench.lib.priority_load import clients, fitted
from bench.lib.returns_load import Came, Returning
from bench.lib.returns_load import Plan as ReturnsPlan
from bench.lib.returns_load import figures as returns_figures
from bench.lib.script import Size, precondition, require, run
from bench.lib.speculative_figures import COMPUTED, comparison
from bench.lib.speculative_load import ARMS, Load, Round, Stage
from bench.lib.throughput import compared
from bench.lib.voice import Voice

FLAGS = ("--tool-call-parser", "pythonic")
_PREFIX = "sgl_ext_"
_COUNTED = (f"{_PREFIX}prefill", f"{_PREFIX}next_turns")
PLANS: dict[Size, tuple[int, Load]] = {
    "full": (9, Load()),
    "quick": (2, Load()),
    "brief": (1, Load(people=6, turns=3, pause_s=(1.0, 2.0), tool_s=(0.5, 1.0), start_s=1.0)),
    "smallest": (
        1,
        Load(
            people=2,
            turns=2,
            result=300,
            pause_s=(1.0, 1.0),
            tool_s=(0.1, 0.2),
            start_s=0.1,
            most_people=2,
        ),
    ),
}
"""Rounds and their load."""
FULL_PLANS: dict[Size, tuple[int, int, Load]] = {
    "full": (5, 64_000, Load(people=4, turns=4)),
    "quick": (2, 64_000, Load(people=4, turns=4)),
    "brief": (1, 64_000, Load(people=4, turns=3)),
    "smallest": (1, 8000, PLANS["smallest"][1]),
}
"""The same while the memory is full, of so many tokens."""
RETURNS_PLANS: dict[Size, ReturnsPlan] = {
    "full": ReturnsPlan(rounds=12),
    "quick": ReturnsPlan(rounds=6),
    "brief": ReturnsPlan(rounds=3, prefixes=(3_000,)),
    "smallest": ReturnsPlan(1, 4_096, (1_000,), (3.0, 3.0)),
}


async def measure(
    nodes: Mapping[str, Node], voice: Voice, load: Load, rounds: int
) -> dict[str, Any]:
    """Runs the arms on our engine, and compares its decoding with stock SGLang's."""
    node = nodes["ours"]
    texts, url = fitted(node), node.engines[0]
    seen: dict[str, list[Round]] = {name: [] for name in ARMS}
    async with clients() as http:
        capacity = await measured(http, nodes["stock"].engines[0], texts)
        urls = {name: each.engines[0] for name, each in nodes.items()}
        decoding = await compared(http, urls, texts, capacity, 2 * rounds + 1)
        load = replace(load, people=load.people_for(capacity))
        stage = Stage(http, url, texts, voice)
        few = Load(people=1, turns=2, pause_s=(0.5, 0.5), tool_s=(0.1, 0.1), start_s=0)
        for name in ARMS:  # warm-up
            await stage.play(few, name, "Warm-up")
        for number in range(rounds):
            for name in rotated(list(ARMS), number):
                node.flush()
                before = counters(url)
                one = await stage.play(load, name, f"Round {number}")
                node.flush()
                one.counted = {k: v - before.get(k, 0) for k, v in counters(url).items()}
                seen[name].append(one)
    found = comparison(seen)
    failed = {name: arm["failed"] for name, arm in found["arms"].items()}
    require(not any(failed.values()), "every request is answered whole", failed=failed)
    ahead = found["prefilled_ahead_tokens"]
    require(ahead > 0, "the engine prefills turns ahead where the client asks for it")
    counted = found["arms"]["off"]["counters"].get(COMPUTED, 0)
    require(counted == 0, "nothing is prefilled ahead where no client asks", tokens=counted)
    cold = found["arms"]["off"]["cold_tokens_p50"]
    precondition(cold > 0, "the next turn has something to prefill ahead", cold_tokens=cold)
    return {"people": load.people, "capacity": capacity.document(), **decoding, **found}


async def measure_full(
    node: Node, voice: Voice, load: Load, rounds: int, pool_tokens: int
) -> dict[str, Any]:
    """Runs the shares on an engine that runs and has this memory, and returns the figures."""
    texts, url = fitted(node), node.engines[0]
    pool = FullPool(node, texts, pool_tokens)
    seen: dict[float, list[Part]] = {share: [] for share in SHARES}
    async with clients() as http:
        stage = Stage(http, url, texts, voice)
        for number in range(rounds):
            for share in rotated(SHARES, number):
                node.flush()
                before = counters(url)
                part = await pool.play(stage, load, share, f"Round {number}")
                part.seen.counted = {k: v - before.get(k, 0) for k, v in counters(url).items()}
                seen[share].append(part)
    found = figures(seen)
    require(not any(arm["failed"] for arm in found.values()), "every request is answered whole")
    return found


async def measure_returns(
    node: Node, voice: Voice, plan: ReturnsPlan, *, are_exact: bool
) -> dict[str, Any]:
    """Runs sessions that return, and returns the figures for each prefix's length."""
    found: dict[str, Any] = {}
    async with clients() as http:
        stage = Stage(http, node.engines[0], fitted(node), voice)
        returning = Returning(node, stage, plan)
        for prefix in plan.prefixes:
            seen: dict[bool, list[Came]] = {False: [], True: []}
            for number in range(-1, plan.rounds):  # the first is warm-up
                for is_loaded in rotated([False, True], number):
                    name = f"Prefix of {prefix}, round {number}"
                    came = await returning.play(name, prefix, is_loaded=is_loaded)
                    if number >= 0:
                        seen[is_loaded].append(came)
            found[f"{prefix}"] = returns_figures(seen[False], seen[True], are_exact=are_exact)
    return found


def counters(url: str) -> dict[str, float]:
    """What the engine counts of prefilling ahead, by name and label."""
    lines = requests.get(f"{url}/metrics", timeout=30).text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line.startswith(_COUNTED)]
    return {name.removeprefix(_PREFIX): float(value) for name, value in pairs}


def template_without_switch(model: Path, path: Path) -> Path:
    """The model's template, but for the switch that ends thinking, which has another name.

    SGLang takes the switch of that name in a request to mean that its grammar is not to wait
    for the end of a thought; the model goes on thinking, in words that the grammar leaves it.
    """
    settings = json.loads((model / "tokenizer_config.json").read_text())
    path.write_text(settings["chat_template"].replace("enable_thinking", "lets_think"))
    return path


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--full-pool", action="store_true", help="with a full cache")
    parser.add_argument("--returns", action="store_true", help="with prefixes that are spilled")
    options = parser.parse_args()
    rounds, load = PLANS[options.size]
    full_rounds, pool_tokens, full_load = FULL_PLANS[options.size]
    returns_plan = RETURNS_PLANS[options.size]
    is_smallest = options.size == "smallest"
    is_full, has_returns = options.full_pool or is_smallest, options.returns or is_smallest
    is_usual = not (options.full_pool or options.returns)
    # One core computes; clients and tokenizers need the other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tokenizers import Tokenizer  # as local_model: only with an engine

    engines = chosen(options, "tiny")
    voice = Voice(Tokenizer.from_file(str(engines.model / "tokenizer.json")))
    with tempfile.TemporaryDirectory(prefix="sgl-ext-bench-") as folder:
        template = template_without_switch(engines.model, Path(folder) / "template.jinja")
        flags = [*FLAGS, "--chat-template", str(template)]
        flags += ["--max-total-tokens", str(pool_tokens)] if is_full else []
        starts: dict[str, Callable[[], AbstractContextManager[Node]]] = {}
        if is_usual or is_full:
            starts["ours"] = partial(engines.ours, Path(folder) / "ours", *flags)
        if is_usual:
            starts["stock"] = partial(engines.stock, Path(folder) / "stock", *flags)
        if has_returns:
            flags += returns_plan.flags
            starts["returns"] = partial(engines.ours, Path(folder) / "returns", *flags)
        with running_arms(starts) as nodes:

            def found() -> dict[str, Any]:
                parts: dict[str, Any] = {}
                if is_usual:
                    parts |= asyncio.run(measure(nodes, voice, load, rounds))
                if is_full:
                    full = measure_full(nodes["ours"], voice, full_load, full_rounds, pool_tokens)
                    parts["full_pool"] = asyncio.run(full)
                if has_returns:
                    exact = engines.are_exact
                    each = measure_returns(nodes["returns"], voice, returns_plan, are_exact=exact)
                    parts["returns"] = asyncio.run(each)
                return parts

            run("speculative_prefill", found)


if __name__ == "__main__":
    main()
