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
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import requests
from sgl_ext_cpu.node import Node

from bench.lib.arms import rotated, running_arms
from bench.lib.capacity import measured
from bench.lib.engines import chosen, engine_parser
from bench.lib.priority_load import clients, fitted
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
    options = engine_parser(__doc__).parse_args()
    rounds, load = PLANS[options.size]
    # One core computes; clients and tokenizers need the other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tokenizers import Tokenizer  # as local_model: only with an engine

    engines = chosen(options, "tiny")
    voice = Voice(Tokenizer.from_file(str(engines.model / "tokenizer.json")))
    with tempfile.TemporaryDirectory(prefix="sgl-ext-bench-") as name:
        folder = Path(name)
        template = template_without_switch(engines.model, folder / "template.jinja")
        flags = (*FLAGS, "--chat-template", str(template))
        starts = {
            "ours": partial(engines.ours, folder / "ours", *flags),
            "stock": partial(engines.stock, folder / "stock", *flags),
        }
        with running_arms(starts) as nodes:
            run("speculative_prefill", lambda: asyncio.run(measure(nodes, voice, load, rounds)))


if __name__ == "__main__":
    main()
