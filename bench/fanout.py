"""What do sub-agents that start at the same time, with the same cold prefix, compute and wait for?

Eight requests go to one engine at the same time. They share a prefix of 20K tokens that is not
cached, and each ends in a few words of its own. Arms:

    stock   SGLang without the plugin
    ours    our engine, without the balancer, as stock

A round sends the same texts to both arms, one after the other, in alternating order.
`prefilled_over_ideal` is the computed tokens over the least that must be computed: the prefix
once, and the end of each request. Chunks have the size that SGLang chooses on a GPU of 80 GB.
The prefix is longer on an engine that prefills it in less than half a second. TTFTs are of all
requests of all rounds, and ratios of each round. `tokens_per_s_ratio` is ours over stock while
requests do nothing but decode.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_ext_cpu.node import Node

from bench.lib.capacity import Capacity, measured
from bench.lib.clients import clients
from bench.lib.engines import OURS, STOCK, chosen, engine_parser, rotated
from bench.lib.generate import Answer, Request, play
from bench.lib.script import Size, precondition, require, run
from bench.lib.spread import percentiles_ms, ratio_spread, spread
from bench.lib.texts import fitted
from bench.lib.throughput import compared

_OWN_TOKENS = 50
_ANSWER_TOKENS = 8
FLAGS = ("--chunked-prefill-size", "8192", "--max-total-tokens", "196608")
_PREFIX_S, _MOST_PREFIX_TOKENS = 0.5, 60_000
_COUNTER = "sgl_ext_prefixes_awaited_total"


@dataclass(frozen=True)
class Plan:
    """How many rounds, requests at once, and at least how many tokens of their common prefix."""

    rounds: int
    agents: int = 8
    prefix_tokens: int = 20_000
    decode_rounds: int = 3


PLANS: dict[Size, Plan] = {
    "full": Plan(7, decode_rounds=9),
    "quick": Plan(3, decode_rounds=5),
    "brief": Plan(2),
    "smallest": Plan(1, 4, 3_000, 1),
}


@dataclass(frozen=True)
class Burst:
    """The answers of one round on one engine."""

    prefix_tokens: int
    answers: tuple[Answer, ...]

    @property
    def prefilled_over_ideal(self) -> float:
        """The tokens computed over those of the prefix, once, and of all the ends."""
        sizes = [answer.prompt_tokens for answer in self.answers]
        computed = sum(sizes) - sum(answer.cached_tokens for answer in self.answers)
        return computed / (self.prefix_tokens + sum(size - self.prefix_tokens for size in sizes))

    @property
    def ttft_ms(self) -> list[float]:
        return [1000 * answer.wait_s for answer in self.answers]


async def measure(nodes: Mapping[str, Node], plan: Plan, *, are_exact: bool) -> dict[str, Any]:
    """Runs both arms on engines that run, and returns the figures."""
    texts = fitted(nodes["ours"])
    seen: dict[str, list[Burst]] = {name: [] for name in nodes}
    urls = {name: node.engines[0] for name, node in nodes.items()}
    async with clients() as http:
        capacity = await measured(http, urls["stock"], texts)
        prefix_tokens = fitted_prefix(plan, capacity)
        decoding = await compared(http, urls, texts, capacity, plan.decode_rounds)
        for number in range(plan.rounds):
            prefix = texts.fresh(f"Round {number}", prefix_tokens)
            sent = [
                Request(f"{prefix} {texts.fresh(f'Agent {n}', _OWN_TOKENS)}", _ANSWER_TOKENS)
                for n in range(plan.agents)
            ]
            for name in rotated(list(urls), number):
                answers = await play(http, urls[name], sent)
                (alone,) = await play(http, urls[name], [Request(prefix, _ANSWER_TOKENS)])
                seen[name].append(Burst(alone.prompt_tokens, tuple(answers)))
                check(seen[name][-1], prefix_tokens)
    found = figures(seen)
    differing = found["outputs_differing"]
    is_allowed = differing == 0 or not are_exact
    require(is_allowed, "both arms give the same answers", differing=differing)
    sizes = {"prefix_tokens": prefix_tokens, "capacity": capacity.document()}
    return found | {"awaited": nodes["ours"].metric(_COUNTER)} | sizes | decoding


def fitted_prefix(plan: Plan, capacity: Capacity) -> int:
    """So many tokens that the engine prefills them for half a second, or the plan's."""
    least = plan.prefix_tokens
    return capacity.prompt_for(_PREFIX_S, least=least, most=max(least, _MOST_PREFIX_TOKENS))


def check(burst: Burst, prefix_tokens: int) -> None:
    """The requests were at the engine at once, their prefix was as long as planned, and cold."""
    is_whole = all(answer.ended_s is not None for answer in burst.answers)
    require(is_whole, "every request is answered whole")
    first_answered_s = min(answer.sent_s + answer.wait_s for answer in burst.answers)
    last_sent_s = max(answer.sent_s for answer in burst.answers)
    precondition(last_sent_s < first_answered_s, "all requests are sent before one is answered")
    tokens = burst.prefix_tokens
    precondition(tokens > 0.8 * prefix_tokens, "the prefix is as long as planned", tokens=tokens)
    over_ideal = burst.prefilled_over_ideal
    precondition(over_ideal > 0.9, "the common prefix is cold", prefilled_over_ideal=over_ideal)


def figures(seen: Mapping[str, Sequence[Burst]]) -> dict[str, Any]:
    """Both arms, and ours against stock."""
    arms = {
        name: {
            **percentiles_ms("ttft", [ttft_ms for burst in bursts for ttft_ms in burst.ttft_ms]),
            "prefilled_over_ideal": spread([burst.prefilled_over_ideal for burst in bursts], 4),
        }
        for name, bursts in seen.items()
    }
    middles = {n: [statistics.median(b.ttft_ms) for b in bursts] for n, bursts in seen.items()}
    differing = sum(
        one.output_ids != other.output_ids
        for ours, stock in zip(seen["ours"], seen["stock"], strict=True)
        for one, other in zip(ours.answers, stock.answers, strict=True)
    )
    return {
        "prefilled_over_ideal": arms["ours"]["prefilled_over_ideal"],
        "ttft_p50_vs_stock": ratio_spread(middles["ours"], middles["stock"]),
        "outputs_differing": differing,
        "arms": arms,
    }


def main() -> None:
    options = engine_parser(__doc__).parse_args()
    # One core computes; clients and tokenizers need the other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    engines, plan = chosen(options, "tiny"), PLANS[options.size]
    with engines.serving({"stock": STOCK, "ours": OURS}, *FLAGS) as nodes:
        run("fanout", lambda: asyncio.run(measure(nodes, plan, are_exact=engines.are_exact)))


if __name__ == "__main__":
    main()
