"""Does a pinned prefix survive a flood larger than the cache, and what does the flood pay for it?

An agent's conversation has a system prompt of about 9,500 tokens and one more short message
each turn. Each arm is a real engine with a small cache:

    pinned    the system prompt and the last message carry `cache_control`, `/v1/messages`
    unpinned  the same without marks
    priority  no marks; SGLang without the plugin, with `--radix-eviction-policy priority`, and
              turns with a higher `priority`, through `/v1/chat/completions`

The first two arms have a launcher and a balancer of their own. Requests of the third go directly
to its engine, because our cache ignores a request's own priority when it evicts.

Between two turns comes a flood: prompts that are sent once and are together larger than the
cache. Few enough run at once to fit beside the pins: a pin holds against the cache pressure of
other prefixes, never against a live request. In a round, each arm gets a flood alone and then a
flood with one turn in it. One engine works at a time, the order of the arms rotates, and all
arms get the same prompts.

The throughput that pins cost is measured on one engine, because two engines differ by more than
that: pairs of floods, one with the prefix pinned and one after its pins were deleted, in
alternating order. `flood_throughput_ratio` is the median of their ratios.

`cached_share` is the share of the tokens up to a turn's last mark that the next turn finds
cached. At the end the TTL runs out in an idle engine: `pinned_tokens_after_ttl`. One more flood
and turn show which arms still have the prefix: `cached_share_after_ttl`. Last come probes: with
the prefix pinned again, a request that needs nearly all memory is sent. It counts as having
waited on a pin if its TTFT is over 1.5 times that of the same request in the arm without pins.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from sgl_ext_cpu.node import Node

from bench.lib.arms import running_arms
from bench.lib.engines import Engines, chosen, engine_parser
from bench.lib.misroute.figures import counted
from bench.lib.pin_figures import Part, Seen, arm_figures, comparison, left_by
from bench.lib.pin_load import MESSAGES, Answer, Conversation, Flooded, Texts, ask, flood, single
from bench.lib.script import Size, require, run

# A turn comes when about this share of the flood beside it has been answered.
_LEAD = 0.25
# A sleeping scheduler deletes pins when it wakes: both sides of a pair wait longer than that.
_SETTLE_S = 1.5
FLAGS = ("--chunked-prefill-size", "2048")
ARMS = {
    "pinned": (Engines.ours, ("--pin-budget", "0.3334")),
    "unpinned": (Engines.ours, ("--pin-budget", "0.3334")),
    "priority": (Engines.stock, ("--radix-eviction-policy", "priority")),
}
_PROBE_POOLS = 0.93


@dataclass(frozen=True)
class Plan:
    """How much of everything. Floods are measured in pools."""

    turns: int = 10
    alone_pools: float = 1.8
    shared_pools: float = 0.5
    pairs: int = 16
    probes: int = 5
    ttl_s: int = 300
    prefix_tokens: int = 9_500
    pool_tokens: int = 32_768
    connections: int = 6


PLANS: dict[Size, Plan] = {
    "full": Plan(),
    "quick": Plan(4, 0.8, 0.28, 6, 2, 40),
    "brief": Plan(3, 0.8, 0.28, 1, 1, 15),
    "smallest": Plan(3, 0.85, 0.28, 1, 1, 10, 900, 4_096, 2),
}


class Arm:
    """One engine with its conversation."""

    def __init__(
        self, node: Node, conversation: Conversation, http: aiohttp.ClientSession, connections: int
    ) -> None:
        self.node = node
        self.seen = Seen()
        self.turned_s: list[float] = []
        self._conversation = conversation
        self._http = http
        self._connections = connections

    async def turn(self) -> Answer:
        """Sends the conversation's next turn."""
        body = self._conversation.ask()
        self.turned_s.append(time.monotonic())
        return self._noted(await ask(self._http, self.node.url, self._conversation.path, body))

    async def flood(self, prompts: list[str]) -> Flooded:
        """Sends these prompts until all are answered."""
        flooded = await flood(self._http, self.node.url, prompts, self._connections)
        for answer in flooded.answers:
            self._noted(answer)
        return flooded

    async def part(self, alone: list[str], shared: list[str]) -> None:
        """The arm's share of a round."""
        started = time.perf_counter()
        first = await self.flood(alone)
        flooding = asyncio.create_task(self.flood(shared))
        await asyncio.sleep(_LEAD * first.span_s * len(shared) / len(alone))
        self.seen.turns.append(await self.turn())
        second = await flooding
        self.seen.parts.append(Part(first, second, time.perf_counter() - started))

    async def pair(self, with_pins: list[str], without: list[str], *, pins_first: bool) -> None:
        """A flood beside the conversation's pins and a flood without pins, one after the other."""
        ratio = 1.0
        for is_pinned in (True, False) if pins_first else (False, True):
            await self.turn()
            if not is_pinned:
                await self.unpin()
            await asyncio.sleep(_SETTLE_S)
            flooded = await self.flood(with_pins if is_pinned else without)
            rate = flooded.tokens / flooded.span_s
            ratio = ratio * rate if is_pinned else ratio / rate
        self.seen.price.append(ratio)

    async def unpin(self) -> None:
        """Deletes every pin."""
        url = f"{self.node.url}/v1/pins"
        async with self._http.get(url) as answer:
            prefixes = [pin["prefix"] for pin in (await answer.json())["pins"]]
        for prefix in prefixes:
            async with self._http.delete(url, params={"prefix": prefix}) as answer:
                answer.raise_for_status()

    async def probe(self, text: str) -> None:
        """A turn, whose marks pin its whole prompt, and a request that needs nearly all memory."""
        await self.turn()
        body = single(text, answer_tokens=1)
        answer = self._noted(await ask(self._http, self.node.url, MESSAGES, body))
        self.seen.probes.append(answer.ttft_ms)

    async def load(self) -> dict[str, int]:
        """The first load that the engine's events report."""
        url = f"{self.node.engines[0]}/sgl_ext/events"
        async with self._http.get(url) as events:
            async for line in events.content:
                if load := json.loads(line).get("load"):
                    return dict(load)
        raise RuntimeError(f"{url} reports no load")

    async def counted(self, name: str) -> dict[str, int]:
        """A counter of the engine's, by its labels."""
        async with self._http.get(f"{self.node.engines[0]}/metrics") as answer:
            found = counted(await answer.text(), name)
        return {labels: int(value) for labels, value in found.items()}

    def _noted(self, answer: Answer) -> Answer:
        self.seen.aborted += not answer.is_whole
        return answer


class Trial:
    """One run on running nodes, one an arm."""

    def __init__(self, arms: Mapping[str, Arm], texts: Texts, plan: Plan) -> None:
        self._arms = arms
        self._texts = texts
        self._plan = plan

    async def run(self) -> dict[str, Any]:
        """Runs all parts and returns their figures."""
        plan, pinned = self._plan, self._arms["pinned"]
        for arm in self._in_turn(0):
            arm.seen.turns.append(await arm.turn())
        for number in range(1, plan.turns):
            alone = self._flood(f"Round {number}", plan.alone_pools)
            shared = self._flood(f"Round {number}, shared", plan.shared_pools)
            for arm in self._in_turn(number):
                await arm.part(alone, shared)
        every_s = [b - a for a, b in zip(pinned.turned_s, pinned.turned_s[1:], strict=False)]
        slowest_s = round(max(every_s), 1)
        require(slowest_s < plan.ttl_s, "turns come within the TTL", slowest_s=slowest_s)
        for arm in self._arms.values():
            arm.seen.retracted = sum(
                (await arm.counted("sglang:num_retracted_requests_total")).values()
            )
        held = (await pinned.load())["pinned_tokens"]
        require(held > 0, "the flooded engine has pins")
        ended = await pinned.counted("sgl_ext_pins_ended_total")
        await asyncio.sleep(max(0.0, pinned.turned_s[-1] + plan.ttl_s + 2 - time.monotonic()))
        after = (await pinned.load())["pinned_tokens"]
        require(after == 0, "an idle engine ends its pins when their TTL does", pinned=after)
        await self._after_ttl()
        await self._price()
        await self._probe()
        return {
            "turn_every_s": round(statistics.median(every_s), 1),
            "pinned_tokens": held,
            "pins_ended_under_flood": ended,
            "pinned_tokens_after_ttl": after,
            "pins_ended": await pinned.counted("sgl_ext_pins_ended_total"),
        }

    async def _after_ttl(self) -> None:
        prompts = self._flood("After the TTL", 1.1)
        for arm in self._in_turn(0):
            await arm.flood(prompts)
            arm.seen.late = await arm.turn()

    async def _price(self) -> None:
        for number in range(self._plan.pairs):
            floods = [self._flood(f"Pair {number}, {side}", 0.8) for side in ("one", "other")]
            await self._arms["pinned"].pair(floods[0], floods[1], pins_first=number % 2 == 0)

    async def _probe(self) -> None:
        for number in range(self._plan.probes):
            text = self._texts.fresh(f"Probe {number}", int(_PROBE_POOLS * self._plan.pool_tokens))
            pair = [self._arms["pinned"], self._arms["unpinned"]]
            for arm in pair[:: -1 if number % 2 else 1]:
                await arm.probe(text)

    def _flood(self, name: str, pools: float) -> list[str]:
        return self._texts.flood(name, int(pools * self._plan.pool_tokens))

    def _in_turn(self, number: int) -> list[Arm]:
        arms = list(self._arms.values())
        first = number % len(arms)
        return arms[first:] + arms[:first]


async def measure(nodes: Mapping[str, Node], plan: Plan) -> dict[str, Any]:
    """Runs the arms on running nodes and returns the bench's figures."""
    texts = Texts()
    system = fitted(texts, nodes["pinned"], plan.prefix_tokens)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        marks: dict[str, dict[str, Any]] = {
            "pinned": {"ttl": f"{plan.ttl_s}s"},
            "priority": {"priority": 1},
        }
        arms = {
            name: Arm(
                node, Conversation(system, texts, **marks.get(name, {})), http, plan.connections
            )
            for name, node in nodes.items()
        }
        found = await Trial(arms, texts, plan).run()
    seen = {name: arm.seen for name, arm in arms.items()}
    pinned = seen["pinned"]
    left = left_by(pinned.turns)
    figures = {name: arm_figures(each, left) for name, each in seen.items()}
    floods = [flooded for part in pinned.parts for flooded in (part.alone, part.shared)]
    least = min(part.alone.tokens + part.shared.tokens for part in pinned.parts)
    require(least >= plan.pool_tokens, "each flood is larger than the cache", tokens=least)
    found_unpinned = figures["unpinned"]["cached_share"]
    require(found_unpinned < 0.1, "a flood evicts what is not pinned", cached_share=found_unpinned)
    aborted = sum(each.aborted for each in seen.values())
    require(aborted == 0, "every request is answered whole", aborted=aborted)
    return {
        "pool_tokens": plan.pool_tokens,
        "prefix_tokens": left[0],
        "turns": plan.turns,
        "flood_requests": sum(len(flooded.answers) for flooded in floods),
        "flood_over_pool": round(sum(flooded.tokens for flooded in floods) / plan.pool_tokens, 1),
        "pinned_cached_share": figures["pinned"]["cached_share"],
        **comparison(pinned, seen["unpinned"]),
        "aborted": aborted,
        **found,
        "arms": figures,
    }


def fitted(texts: Texts, node: Node, prefix_tokens: int) -> str:
    """Measures how many tokens a word has, and returns a text of so many tokens."""

    def tokens(text: str) -> int:
        counted = node.post(f"{MESSAGES}/count_tokens", single(text))
        counted.raise_for_status()
        return int(counted.json()["input_tokens"])

    words = 4000
    texts.fit(tokens(texts.words("a sample", words)), words)
    start = texts.source[: prefix_tokens * 8]
    return start[: int(len(start) * prefix_tokens / tokens(start))]


def main() -> None:
    options = engine_parser(__doc__).parse_args()
    plan = PLANS[options.size]
    pool = ("--max-total-tokens", str(plan.pool_tokens))
    engines = chosen(options, "tiny")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sgl-ext-bench-")))
        starts = {
            name: partial(start, engines, folder / name, *pool, *FLAGS, *flags)
            for name, (start, flags) in ARMS.items()
        }
        nodes = stack.enter_context(running_arms(starts))
        run("pin_flood", lambda: asyncio.run(measure(nodes, plan)))


if __name__ == "__main__":
    main()
