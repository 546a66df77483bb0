"""Does a pinned prefix survive a flood larger than the cache, and what does the flood pay for it?

An agent's conversation has a system prompt of about 9,500 tokens and one more short message
each turn. Each arm is a real engine with a small cache:

    pinned          the system prompt and the last message carry `cache_control`
    stock           SGLang without the plugin, no marks
    stock_priority  SGLang with `--radix-eviction-policy priority`, and turns with a higher
                    `priority`
    stock_session   SGLang with `--enable-session-radix-cache`, and turns with a `session_id`
    stock_hicache   SGLang with `--enable-hierarchical-cache`, which keeps in host memory what
                    it evicts

`stock_priority` and `stock_session` use `/v1/chat/completions`, which takes their fields, the
other arms `/v1/messages`.

Between two turns comes a flood: prompts that are sent once and are together larger than the
cache. Few enough run at once to fit beside the pins: a pin holds against the cache pressure of
other prefixes, never against a live request. In a round, each arm gets a flood alone and then a
flood with one turn in it. One engine works at a time, the order of the arms rotates, and all
arms get the same prompts. The run is not valid unless a flood is larger than the cache, makes stock
SGLang evict, and takes its prefix.

The throughput that pins cost is measured on one engine, because two engines differ by more than
that: pairs of floods, one with the prefix pinned and one after its pins were deleted, in
alternating order. `flood_throughput_ratio` is their ratio.

`cached_share` is the share of the tokens up to a turn's last mark that the next turn finds
cached. At the end the TTL runs out in an idle engine, and its pins end. One more flood and turn
show which arms still have the prefix: `cached_share_after_ttl`. Last come probes: with
the prefix pinned again, a request that needs nearly all memory is sent. It counts as having
waited on a pin if its TTFT is over 1.5 times that of the same request at stock SGLang.

The TTL is set from the measured time that the floods of all arms take. `tokens_per_s_ratio` is
our engine over stock while requests do nothing but decode.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from sgl_ext_cpu.node import Node

from bench.lib.capacity import Capacity, measured
from bench.lib.clients import MESSAGES, Answer, ask
from bench.lib.engines import OURS, STOCK, Arm, chosen, engine_parser, pool_tokens, rotated
from bench.lib.pin_load import Conversation, Flooded, flood, single
from bench.lib.script import Size, precondition, require, run
from bench.lib.spread import percentiles_ms, ratio_spread
from bench.lib.texts import Texts
from bench.lib.throughput import compared

_TTL_OVER_FLOODS = 2.5
_EVICTED_SHARE = 0.1
_EVICTED = "sglang:evicted_tokens_total"
FLAGS = ("--chunked-prefill-size", "2048")
ARMS = {
    "pinned": OURS._replace(flags=("--pin-budget", "0.3334")),
    "stock": STOCK,
    "stock_priority": Arm(("--radix-eviction-policy", "priority")),
    "stock_session": Arm(("--enable-session-radix-cache",)),
    "stock_hicache": Arm(("--enable-hierarchical-cache",)),
}
_FIELDS: dict[str, dict[str, Any]] = {
    "stock_priority": {"priority": 1},
    "stock_session": {"session_id": "agent"},
}
_PROBE_POOLS = 0.93


_LONGEST_WAIT = 1.5


@dataclass
class Part:
    """One arm's share of a round: a flood alone, then a flood with a turn in it."""

    alone: Flooded
    shared: Flooded

    @property
    def tokens(self) -> int:
        """Of both floods."""
        return self.alone.tokens + self.shared.tokens


@dataclass
class Seen:
    """What one arm measured.

    turns: the conversation's, up to the last under the flood; `late` is the turn after its TTL.
    price: the rate of a flood beside pins over that of one without, pair by pair.
    probes: TTFTs in milliseconds.
    """

    turns: list[Answer] = field(default_factory=list)
    late: Answer = field(default_factory=Answer)
    parts: list[Part] = field(default_factory=list)
    price: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    aborted: int = 0


def left_by(turns: Sequence[Answer]) -> list[int]:
    """The tokens that each turn left to the next: those up to its last mark."""
    left = [turn.marked_tokens for turn in turns]
    is_marked = all(turn.marked_tokens >= 0.99 * turn.prompt_tokens for turn in turns)
    require(is_marked, "the last mark is in the last message", turns=list(turns))
    return left


def cached_share(turns: Sequence[Answer], left: Sequence[int]) -> float:
    """The same of all turns together."""
    found = [min(turn.cached_tokens, had) for turn, had in zip(turns[1:], left, strict=False)]
    return sum(found) / sum(left[: len(found)])


def arm_figures(seen: Seen, left: Sequence[int]) -> dict[str, Any]:
    """One arm's figures."""
    return {
        "cached_share": round(cached_share(seen.turns, left), 4),
        "cached_share_after_ttl": round(cached_share([seen.turns[-1], seen.late], left[-1:]), 4),
        **percentiles_ms("ttft", [turn.ttft_ms for turn in seen.turns[1:]]),
    }


def waited(probes: Sequence[float], without_pins: Sequence[float]) -> int:
    """How many probes took over 1.5 times as long as their pairs without pins."""
    pairs = zip(probes, without_pins, strict=True)
    return sum(one > _LONGEST_WAIT * other for one, other in pairs)


def comparison(seen: Mapping[str, Seen]) -> dict[str, Any]:
    """What pins give and cost: ratios of paired values, `pinned` over the other."""

    def later_ms(arm: Seen) -> list[float]:
        return [turn.ttft_ms for turn in arm.turns[1:]]

    pinned, stock = seen["pinned"], seen["stock"]
    others = {name: arm for name, arm in seen.items() if arm is not pinned}
    return {
        "ttft_ratio": {
            name: ratio_spread(later_ms(pinned), later_ms(arm)) for name, arm in others.items()
        },
        "flood_throughput_ratio": ratio_spread(pinned.price, [1.0] * len(pinned.price)),
        "waited_on_pin": waited(pinned.probes, stock.probes),
    }


# A turn comes when about this share of the flood beside it has been answered.
_LEAD = 0.25
# A sleeping scheduler deletes pins when it wakes: both sides of a pair wait longer than that.
_SETTLE_S = 1.5


class Flooding:
    """A running engine, its conversation, and what it measured."""

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
        first = await self.flood(alone)
        flooding = asyncio.create_task(self.flood(shared))
        await asyncio.sleep(_LEAD * first.span_s * len(shared) / len(alone))
        self.seen.turns.append(await self.turn())
        second = await flooding
        self.seen.parts.append(Part(first, second))

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

    def _noted(self, answer: Answer) -> Answer:
        self.seen.aborted += not answer.is_whole
        return answer


@dataclass(frozen=True)
class Plan:
    """How much of everything. Floods are measured in pools. ttl_s: at least. arms: None: all."""

    turns: int = 10
    alone_pools: float = 1.8
    shared_pools: float = 0.5
    pairs: int = 16
    probes: int = 5
    ttl_s: int = 60
    prefix_tokens: int = 9_500
    pool_tokens: int = 32_768
    connections: int = 6
    decode_rounds: int = 9
    arms: tuple[str, ...] = tuple(ARMS)

    def for_pool(self, tokens: int) -> Plan:
        """The same at engines of this size, with the two arms that each pair of engines has."""
        prefix_tokens = self.prefix_tokens * tokens // self.pool_tokens
        return replace(
            self, pool_tokens=tokens, prefix_tokens=prefix_tokens, arms=("pinned", "stock")
        )


_FEW = ("pinned", "stock", "stock_session")
PLANS: dict[Size, Plan] = {
    "full": Plan(),
    "quick": Plan(5, 0.8, 0.28, 5, 3, 20, decode_rounds=5),
    "brief": Plan(3, 0.8, 0.28, 2, 2, 15, decode_rounds=3, arms=("pinned", "stock")),
    "smallest": Plan(3, 0.85, 0.28, 1, 1, 15, 900, 4_096, 2, 1, _FEW),
}


class Trial:
    """One run on running nodes, one an arm."""

    def __init__(
        self,
        arms: Mapping[str, Flooding],
        texts: Texts,
        plan: Plan,
        capacity: Capacity,
        http: aiohttp.ClientSession,
    ) -> None:
        self._arms = arms
        self._texts = texts
        self._plan = plan
        self._capacity = capacity
        self._ttl_s = ttl_s(plan, capacity, len(arms))
        self._http = http

    async def run(self) -> dict[str, Any]:
        """Runs all parts and returns their figures."""
        plan, pinned, stock = self._plan, self._arms["pinned"], self._arms["stock"]
        for arm in self._in_turn(0):
            arm.seen.turns.append(await arm.turn())
        evicted = stock.node.metric(_EVICTED)
        for number in range(1, plan.turns):
            alone = self._flood(f"Round {number}", plan.alone_pools)
            shared = self._flood(f"Round {number}, shared", plan.shared_pools)
            for arm in self._in_turn(number):
                await arm.part(alone, shared)
        every_s = [b - a for a, b in zip(pinned.turned_s, pinned.turned_s[1:], strict=False)]
        slowest_s = round(max(every_s), 1)
        precondition(slowest_s < self._ttl_s, "turns come within the TTL", slowest_s=slowest_s)
        evicted = stock.node.metric(_EVICTED) - evicted
        precondition(evicted > 0, "the flood makes stock SGLang evict")
        held = (await pinned.load())["pinned_tokens"]
        require(held > 0, "the flooded engine has pins")
        decoding = await self._decode()
        await asyncio.sleep(max(0.0, pinned.turned_s[-1] + self._ttl_s + 2 - time.monotonic()))
        after = (await pinned.load())["pinned_tokens"]
        require(after == 0, "an idle engine ends its pins when their TTL does", pinned=after)
        await self._after_ttl()
        await self._price()
        await self._probe()
        return {**decoding, "ttl_s": self._ttl_s, "pinned_tokens": held}

    async def _decode(self) -> dict[str, Any]:
        urls = {
            name: self._arms[arm].node.engines[0]
            for name, arm in (("ours", "pinned"), ("stock", "stock"))
        }
        rounds = self._plan.decode_rounds
        return await compared(self._http, urls, self._texts, self._capacity, rounds)

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
            for arm in rotated([self._arms["pinned"], self._arms["stock"]], number):
                await arm.probe(text)

    def _flood(self, name: str, pools: float) -> list[str]:
        return self._texts.flood(name, int(pools * self._plan.pool_tokens))

    def _in_turn(self, number: int) -> list[Flooding]:
        return rotated(list(self._arms.values()), number)


def ttl_s(plan: Plan, capacity: Capacity, arms: int) -> int:
    """A TTL that outlasts the floods between two turns of an arm, on an engine this fast."""
    tokens = arms * (plan.alone_pools + plan.shared_pools) * plan.pool_tokens
    return max(plan.ttl_s, math.ceil(_TTL_OVER_FLOODS * capacity.seconds(tokens, 0)))


async def measure(nodes: Mapping[str, Node], plan: Plan) -> dict[str, Any]:
    """Runs the arms on running nodes and returns the bench's figures."""
    texts = Texts()
    system = fitted(texts, nodes["pinned"], plan.prefix_tokens)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        capacity = await measured(http, nodes["stock"].url, texts)
        pool = capacity.pool_tokens
        require(pool == plan.pool_tokens, "engines have the memory of the plan", tokens=pool)
        ttl = f"{ttl_s(plan, capacity, len(nodes))}s"
        arms = {
            name: Flooding(
                node,
                Conversation(
                    system, texts, ttl=ttl if name == "pinned" else "", more=_FIELDS.get(name)
                ),
                http,
                plan.connections,
            )
            for name, node in nodes.items()
        }
        found = await Trial(arms, texts, plan, capacity, http).run()
    seen = {name: arm.seen for name, arm in arms.items()}
    left = left_by(seen["pinned"].turns)
    figures = {name: arm_figures(each, left) for name, each in seen.items()}
    parts = seen["pinned"].parts
    least = min(part.tokens for part in parts)
    precondition(least >= plan.pool_tokens, "each flood is larger than the cache", tokens=least)
    share = figures["stock"]["cached_share"]
    precondition(share < _EVICTED_SHARE, "a flood takes stock SGLang's prefix", cached_share=share)
    aborted = sum(each.aborted for each in seen.values())
    require(aborted == 0, "every request is answered whole", aborted=aborted)
    return {
        "pool_tokens": plan.pool_tokens,
        "prefix_tokens": left[0],
        "turns": plan.turns,
        "capacity": capacity.document(),
        "flood_over_pool": round(sum(part.tokens for part in parts) / plan.pool_tokens, 1),
        "pinned_cached_share": figures["pinned"]["cached_share"],
        **comparison(seen),
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
    if engines.running:  # of any size
        plan = plan.for_pool(pool_tokens(engines.running_node("stock")))
        engines.running_node("ours").flush()  # of pins
    arms = {name: arm for name, arm in ARMS.items() if name in plan.arms}
    with engines.serving(arms, *pool, *FLAGS) as nodes:
        run("pin_flood", lambda: asyncio.run(measure(nodes, plan)))


if __name__ == "__main__":
    main()
