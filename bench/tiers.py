"""Does a pin that had to leave the device come back from host memory, and what does that save?

Agents have prefixes that are together 4 times as large as the KV cache, all pinned for an hour,
and the host pool has room for all of them. In each round some of the agents come back, in an order
by chance: some soon, others after a long gap. Before each of these turns comes unpinned work, by
default as many tokens as a prefix has. Each arm is a real engine, and gets the same prompts:

    stock          SGLang without the plugin, no marks
    stock_hicache  SGLang with `--enable-hierarchical-cache`, no marks
    ours           our engine without a host cache: under pressure a pin is released
    ours_tiers     our engine with the host cache of `stock_hicache`: a pin moves there

One engine works at a time, and the order of the arms rotates. `cached_share` is the share of the
tokens that an agent's last turn left marked that its next turn finds cached, and
`pinned_cached_share` is that of `ours_tiers`. TTFTs are of the agents who came back.
`unpinned_throughput_ratio` compares the unpinned work of the same rounds with that of
`stock_hicache`.

Last come probes: a request that needs nearly all memory, while prefixes are pinned. It counts as
having waited on a pin if its TTFT is over 1.5 times that at `stock_hicache`.

Then other engines answer: does a session that moves to another engine wait less if the engines have
a shared tier? `moved_ttft_vs_recompute` is the TTFT of its next turn there, against that of the
same turn on an engine that shares nothing (`measure_moves`).

`wrong_answers` counts greedy answers that differ from those of `stock`. The run is not valid unless
the prefixes are 4 times the cache and fit the host pool, stock SGLang loses them, HiCache brings
some back, and a prefix takes 3 times as long to compute as to read; and of sessions that moved,
unless the tier has what they need and an engine without it has nothing.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from sgl_ext_cpu.node import Node

from bench.lib.arms import rotated, running_arms
from bench.lib.engines import Engines, chosen, engine_parser, model_of
from bench.lib.pin_arm import Arm
from bench.lib.pin_figures import left_by, waited
from bench.lib.pin_load import Answer, Conversation, Flooded, Texts
from bench.lib.priority_load import fitted
from bench.lib.script import Size, precondition, require, run
from bench.lib.spread import percentiles_ms, ratio_spread, spread

# The figures of a run of bench/tiers.

RELEASE, HICACHE, TIERS = "ours", "stock_hicache", "ours_tiers"
"""The arms that are compared: ours without tiers releases a pin under pressure."""


@dataclass
class Round:
    """One arm's share of a round: the agents who returned, and the unpinned prompts before each.

    span_s: of all of it, without the pauses.
    """

    returns: list[Answer] = field(default_factory=list)
    unpinned: list[Flooded] = field(default_factory=list)
    span_s: float = 0.0

    @property
    def ttft_ms(self) -> list[float]:
        """Of the agents' turns."""
        return [answer.ttft_ms for answer in self.returns]

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens that were answered a second, of agents and of unpinned work."""
        unpinned = sum(flooded.tokens for flooded in self.unpinned)
        return (unpinned + sum(answer.prompt_tokens for answer in self.returns)) / self.span_s

    @property
    def unpinned_per_s(self) -> float:
        """The unpinned work's tokens, a second of the time that it took."""
        tokens = sum(flooded.tokens for flooded in self.unpinned)
        return tokens / sum(flooded.span_s for flooded in self.unpinned)


@dataclass
class Seen:
    """What one arm measured.

    turns: of each agent, the first one included. probes: TTFTs in milliseconds.
    """

    turns: list[list[Answer]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)

    @property
    def answers(self) -> list[Answer]:
        """All answers but those of probes."""
        unpinned = [one for played in self.rounds for one in played.unpinned]
        return [
            *(answer for turns in self.turns for answer in turns),
            *(answer for flooded in unpinned for answer in flooded.answers),
        ]


def cached_share(turns: Sequence[Sequence[Answer]], left: Sequence[Sequence[int]]) -> float:
    """The share of what each turn of each agent left marked that the agent's next turn found
    cached. left: the tokens that each turn left, by agent."""
    pairs = [
        (min(turn.cached_tokens, had), had)
        for agent, marked in zip(turns, left, strict=True)
        for turn, had in zip(agent[1:], marked, strict=False)
    ]
    return sum(found for found, _ in pairs) / sum(had for _, had in pairs)


def arm_figures(seen: Seen, left: Sequence[Sequence[int]]) -> dict[str, Any]:
    """One arm's figures. TTFTs of agents are of their returns alone."""
    unpinned = [
        answer.ttft_ms
        for played in seen.rounds
        for flooded in played.unpinned
        for answer in flooded.answers
    ]
    ttft = [value for played in seen.rounds for value in played.ttft_ms]
    return {
        "cached_share": round(cached_share(seen.turns, left), 4),
        **percentiles_ms("ttft", ttft),
        "ttft_mean_ms": round(statistics.mean(ttft), 1),
        "tokens_per_s": spread([played.tokens_per_s for played in seen.rounds], 0),
        **percentiles_ms("unpinned_ttft", unpinned),
        "unpinned_tokens_per_s": spread([played.unpinned_per_s for played in seen.rounds], 0),
    }


def wrong_answers(ones: Sequence[Answer], others: Sequence[Answer]) -> int:
    """How many answers have another text than those to the same prompts."""
    return sum(one.text != other.text for one, other in zip(ones, others, strict=True))


def comparison(seen: Mapping[str, Seen], left: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The arm with tiers against the others: ratios of its rounds to theirs."""
    p50, mean = (
        {name: [middle(played.ttft_ms) for played in arm.rounds] for name, arm in seen.items()}
        for middle in (statistics.median, statistics.mean)
    )
    unpinned = {name: [r.unpinned_per_s for r in arm.rounds] for name, arm in seen.items()}
    answers = {name: arm.answers for name, arm in seen.items()}
    return {
        "pinned_cached_share": round(cached_share(seen[TIERS].turns, left), 4),
        "ttft_p50_vs_hicache": ratio_spread(p50[TIERS], p50[HICACHE]),
        "ttft_p50_vs_release": ratio_spread(p50[TIERS], p50[RELEASE]),
        "ttft_mean_vs_hicache": ratio_spread(mean[TIERS], mean[HICACHE]),
        "ttft_mean_vs_release": ratio_spread(mean[TIERS], mean[RELEASE]),
        "unpinned_throughput_ratio": ratio_spread(unpinned[TIERS], unpinned[HICACHE]),
        "waited_on_pin": waited(seen[TIERS].probes, seen[HICACHE].probes),
        "probe_ttft_ratio": ratio_spread(seen[TIERS].probes, seen[HICACHE].probes),
        "wrong_answers": sum(wrong_answers(each, answers["stock"]) for each in answers.values()),
    }


# One engine of bench/tiers with its agents.

TTL = "1h"


@dataclass(frozen=True)
class Return:
    """An agent comes back: its number, and the unpinned prompts that are sent before its turn."""

    agent: int
    unpinned: Sequence[str]


def returns(
    texts: Texts, name: str, agents: int, count: int, unpinned_tokens: int
) -> Iterator[Return]:
    """A round: some of the agents, in an order by chance that is the same for the same name. So
    some come back soon, and others have a long gap."""
    for number, agent in enumerate(random.Random(name).sample(range(agents), count)):
        yield Return(agent, texts.flood(f"{name}, {number}", unpinned_tokens))


class Agents:
    """A running engine, its agents' conversations, and what it measured.

    node: with the engine's own address. is_marked: whether prompts have cache marks.
    """

    def __init__(
        self,
        node: Node,
        systems: Sequence[str],
        texts: Texts,
        http: aiohttp.ClientSession,
        *,
        is_marked: bool,
        connections: int,
    ) -> None:
        self.seen = Seen(turns=[[] for _ in systems])
        self.engine = self._talking(node, "", texts, http, is_marked, connections)
        self._agents = [
            self._talking(node, system, texts, http, is_marked, connections) for system in systems
        ]

    @staticmethod
    def _talking(
        node: Node,
        system: str,
        texts: Texts,
        http: aiohttp.ClientSession,
        is_marked: bool,
        connections: int,
    ) -> Arm:
        conversation = Conversation(system, texts, ttl=TTL if is_marked else "")
        return Arm(node, conversation, http, connections)

    async def begin(self) -> None:
        """Each agent's first turn."""
        for agent in range(len(self._agents)):
            await self._turn(agent)

    async def play(self, back: Sequence[Return], pause_s: float) -> None:
        """A round: before each turn comes unpinned work, and then the engine idles for so long."""
        played, paused_s, started = Round(), 0.0, time.perf_counter()
        for one in back:
            played.unpinned.append(await self.engine.flood(list(one.unpinned)))
            idle = time.perf_counter()
            await asyncio.sleep(pause_s)
            paused_s += time.perf_counter() - idle
            played.returns.append(await self._turn(one.agent))
        played.span_s = time.perf_counter() - started - paused_s
        self.seen.rounds.append(played)

    async def probe(self, text: str) -> None:
        """A request that needs nearly all memory, after an agent's turn has pinned its prompt."""
        agent = self._agents[0]
        await agent.probe(text)
        require(agent.seen.aborted == 0, "every request is answered whole")
        self.seen.probes.append(agent.seen.probes[-1])

    async def _turn(self, number: int) -> Answer:
        answer = await self._agents[number].turn()
        self.seen.turns[number].append(answer)
        return answer


def engine_of(node: Node) -> Node:
    """A node's engine by itself, without the balancer."""
    (url,) = node.engines
    return replace(node, url=url)


# Sessions that move to another engine of their node: the last part of bench/tiers.
#
# Two nodes have engines with the same host cache. The two engines of `shared` have a tier in
# common. A session's first turn goes to one of them, and its next turn to the other, which loads
# the prefix. The engine of `apart` has no such tier and has not seen the session: sent the same
# next turn, it computes the prefix. One engine works at a time, and the nodes take turns at being
# the first.

SHARED, APART = "shared", "apart"
_MOVES_HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--page-size", "64")
_TIER_BYTES = 1 << 30
# An engine stores pages after it has answered.
_SETTLE_S = 1.0
_FOUND_SHARE = 0.8  # what is not found is the end of a page, and the new turn


@dataclass
class Moved:
    """Turns of sessions that moved, on each node in the same order."""

    shared: list[Answer] = field(default_factory=list)
    apart: list[Answer] = field(default_factory=list)


def move_starts(
    engines: Engines, folder: Path, *flags: str
) -> dict[str, Callable[[], AbstractContextManager[Node]]]:
    """How to start the nodes. flags: of the engines of both."""
    both = (*_MOVES_HOST, *flags)
    own = {SHARED: ("--instances", "2", "--shared-tier-bytes", str(_TIER_BYTES)), APART: ()}
    return {name: partial(engines.ours, folder / name, *both, *more) for name, more in own.items()}


async def measure_moves(
    nodes: Mapping[str, Node], sessions: int, tokens: int, *, are_exact: bool
) -> dict[str, Any]:
    """The figures of so many sessions, whose prefixes have so many tokens."""
    texts, moved = fitted(nodes[APART]), Moved()
    sides = {SHARED: moved.shared, APART: moved.apart}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
        for number in range(sessions + 1):
            system = texts.fresh(f"Session {number}", tokens)
            for name in rotated(list(sides), number):
                answer = await _move(nodes[name], system, texts, http)
                if number:  # the first requests of an engine are slower than all others
                    sides[name].append(answer)
    check_moves(moved, are_exact=are_exact)
    return moved_figures(moved)


async def _move(node: Node, system: str, texts: Texts, http: aiohttp.ClientSession) -> Answer:
    """A session's second turn, at a node's last engine; its first one was at the engine before."""
    *before, last = (replace(node, url=url, engines=(url,)) for url in node.engines)
    conversation = Conversation(system, texts)
    if before:
        await Arm(before[0], conversation, http, 1).turn()
        await asyncio.sleep(_SETTLE_S)
    else:
        conversation.ask()
    return await Arm(last, conversation, http, 1).turn()


def check_moves(moved: Moved, *, are_exact: bool) -> None:
    """Raises InvariantBroken if the nodes did not answer alike, and NotValid if a session found
    little with a shared tier, or something without one."""
    answers = [*moved.shared, *moved.apart]
    broken = sum(not answer.is_whole for answer in answers)
    require(broken == 0, "every request is answered whole", broken=broken)
    wrong = wrong_answers(moved.shared, moved.apart)
    require(wrong == 0 or not are_exact, "loaded prefixes change no answer", wrong=wrong)
    found = [answer.cached_tokens / answer.prompt_tokens for answer in moved.shared]
    precondition(min(found) >= _FOUND_SHARE, "the tier has what moves", least_share=min(found))
    most = max(answer.cached_tokens / answer.prompt_tokens for answer in moved.apart)
    precondition(most < 1 - _FOUND_SHARE, "without a tier all is computed", most_share=most)


def moved_figures(moved: Moved) -> dict[str, Any]:
    """What a session that moves finds, and how long it waits."""
    loaded, computed = (
        [answer.ttft_ms for answer in answers] for answers in (moved.shared, moved.apart)
    )
    tokens = sum(answer.prompt_tokens for answer in moved.shared)
    return {
        "moved_ttft_vs_recompute": ratio_spread(loaded, computed),
        "moved": {
            "sessions": len(loaded),
            "prompt_tokens": round(tokens / len(loaded)),
            "cached_share": round(sum(a.cached_tokens for a in moved.shared) / tokens, 4),
            "wrong_answers": wrong_answers(moved.shared, moved.apart),
            **percentiles_ms("ttft", loaded),
            **percentiles_ms("computed_ttft", computed),
        },
    }


_WORKING_SET = 4
_MARGIN = 1.05  # texts have about as many tokens as planned
_TTL_S = 3600.0
_LOST_SHARE = 0.5
_PROBE_POOLS = 0.93
FLAGS = ("--chunked-prefill-size", "2048")
_HOST = ("--enable-hierarchical-cache", "--hicache-write-policy", "write_through")
ARMS: dict[str, tuple[Callable[..., AbstractContextManager[Node]], tuple[str, ...]]] = {
    "stock": (Engines.stock, ()),
    HICACHE: (Engines.stock, _HOST),
    RELEASE: (Engines.ours, ()),
    TIERS: (Engines.ours, (*_HOST, "--host-pin-budget", "0.9")),
}


@dataclass(frozen=True)
class Plan:
    """How much of everything. host_pools: the host pool, in device pools. unpinned: between two
    turns, in prefixes. least_gain: how much longer a prefix takes to compute than to read."""

    pool_tokens: int = 32_768
    agents: int = 24
    rounds: int = 9
    returns: int = 16
    probes: int = 5
    moves: int = 9
    host_pools: float = 6.0
    unpinned: float = 1.0
    pause_s: float = 0.1
    least_gain: float = 3.0
    connections: int = 2

    @property
    def prefix_tokens(self) -> int:
        """Of each agent."""
        return math.ceil(_MARGIN * _WORKING_SET * self.pool_tokens / self.agents)

    @property
    def unpinned_tokens(self) -> int:
        """Between two turns."""
        return int(self.unpinned * self.prefix_tokens)


PLANS: dict[Size, Plan] = {
    "full": Plan(),
    "quick": Plan(16_384, rounds=3, returns=6, probes=2, moves=3),
    "brief": Plan(16_384, rounds=2, returns=6, probes=1, moves=2),
    "smallest": Plan(4_096, 16, 2, 5, 1, 1, least_gain=0),
}


class Trial:
    """One run on running nodes, one an arm."""

    def __init__(
        self, nodes: Mapping[str, Node], texts: Texts, plan: Plan, http: aiohttp.ClientSession
    ) -> None:
        self._nodes = nodes
        self._texts = texts
        self._plan = plan
        self._http = http
        systems = [texts.fresh(f"Agent {n}", plan.prefix_tokens) for n in range(plan.agents)]
        self.arms = {
            name: Agents(
                engine_of(node),
                systems,
                texts,
                http,
                is_marked=name in (RELEASE, TIERS),
                connections=plan.connections,
            )
            for name, node in nodes.items()
        }

    async def run(self) -> dict[str, Any]:
        """Runs all parts and returns what is not in the arms."""
        plan, began = self._plan, time.monotonic()
        gain = await self._gain()
        for arm in self.arms.values():
            await arm.begin()
        for number in range(plan.rounds):
            name = f"Round {number}"
            back = list(returns(self._texts, name, plan.agents, plan.returns, plan.unpinned_tokens))
            for arm in rotated(list(self.arms.values()), number):
                await arm.play(back, plan.pause_s)
        span_s = round(time.monotonic() - began)
        precondition(span_s < _TTL_S, "the rounds end within the TTL", span_s=span_s)
        found: dict[str, Any] = {"computed_over_read": gain, "pinned_tokens": {}}
        for name in (RELEASE, TIERS):
            held = (await self.arms[name].engine.load())["pinned_tokens"]
            require(held > 0, "the engine has pins", arm=name)
            found["pinned_tokens"][name] = held
        for number in range(plan.probes):
            text = self._texts.fresh(f"Probe {number}", int(_PROBE_POOLS * plan.pool_tokens))
            for name in rotated([TIERS, HICACHE], number):
                await self.arms[name].probe(text)
        return found

    async def _gain(self) -> float:
        """How much longer a prefix takes to compute than to read from the device, at stock."""
        gains = {}
        for name, node in self._nodes.items():
            # The first requests of an engine are slower than all others.
            for session in ("Warm-up", "Gain"):
                system = self._texts.fresh(session, self._plan.prefix_tokens)
                talk = Conversation(system, self._texts)
                one = Arm(engine_of(node), talk, self._http, 1)
                cold, read = await one.turn(), await one.turn()
                gains[name] = round(cold.ttft_ms / read.ttft_ms, 2)
        gain = gains["stock"]
        wanted = "computing a prefix takes longer than all else of a turn"
        precondition(gain >= self._plan.least_gain, wanted, computed_over_read=gain)
        return gain


async def measure(nodes: Mapping[str, Node], plan: Plan, *, are_exact: bool) -> dict[str, Any]:
    """Runs the arms on running nodes and returns the bench's figures."""
    texts = fitted(nodes["stock"])
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
        trial = Trial(nodes, texts, plan, http)
        found = await trial.run()
    seen = {name: arm.seen for name, arm in trial.arms.items()}
    left = [left_by(turns) for turns in seen[TIERS].turns]
    check_load(seen, left, plan)
    figures = comparison(seen, left)
    is_allowed = figures["wrong_answers"] == 0 or not are_exact
    require(is_allowed, "answers equal those of stock", wrong=figures["wrong_answers"])
    return {
        "pool_tokens": plan.pool_tokens,
        "agents": plan.agents,
        "prefix_tokens": left[0][0],
        "working_set_over_pool": round(working_set(left) / plan.pool_tokens, 2),
        "host_over_pool": plan.host_pools,
        **figures,
        **found,
        "arms": {name: arm_figures(arm, left) for name, arm in seen.items()},
    }


def working_set(left: list[list[int]]) -> int:
    """The tokens that agents had pinned when they began."""
    return sum(marked[0] for marked in left)


def check_load(seen: Mapping[str, Seen], left: list[list[int]], plan: Plan) -> None:
    """Raises InvariantBroken if arms differ in more than their caches, and NotValid if the load
    was not the one that the bench is about."""
    broken = sum(not answer.is_whole for arm in seen.values() for answer in arm.answers)
    require(broken == 0, "every request is answered whole", broken=broken)
    tokens = {name: [answer.prompt_tokens for answer in arm.answers] for name, arm in seen.items()}
    differing = [name for name, each in tokens.items() if each != tokens["stock"]]
    require(not differing, "all arms get the same prompts", differing=differing)
    pool, wanted = plan.pool_tokens, working_set(left)
    is_large = wanted >= _WORKING_SET * pool
    precondition(is_large, f"prefixes are {_WORKING_SET} times the cache", tokens=wanted, pool=pool)
    last, host = sum(marked[-1] for marked in left), int(plan.host_pools * pool)
    precondition(last <= host, "the host pool has room for all prefixes", tokens=last, host=host)
    shares = {name: round(cached_share(arm.turns, left), 3) for name, arm in seen.items()}
    precondition(shares["stock"] < _LOST_SHARE, "stock SGLang loses prefixes", **shares)
    precondition(shares[HICACHE] > shares["stock"], "HiCache brings prefixes back", **shares)


def flags_of(arm: str, plan: Plan) -> tuple[str, ...]:
    """The flags of an arm's engine."""
    flags = ("--max-total-tokens", str(plan.pool_tokens), *FLAGS, *ARMS[arm][1])
    return (*flags, "--hicache-ratio", f"{plan.host_pools:g}") if arm in (HICACHE, TIERS) else flags


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--unpinned", type=float, help="unpinned work before a turn, in prefixes")
    parser.add_argument("--host-pools", type=float, help="the host pool, in device pools")
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in ("unpinned", "host_pools")}
    plan = replace(
        PLANS[options.size], **{name: value for name, value in given.items() if value is not None}
    )
    engines = chosen(options, model_of(options.size, "bench"))
    with tempfile.TemporaryDirectory(prefix="sgl-ext-bench-") as folder:
        run("tiers", lambda: measure_all(engines, plan, Path(folder)))


def measure_all(engines: Engines, plan: Plan, folder: Path) -> dict[str, Any]:
    """Starts the arms of each part and returns the bench's figures."""
    arms = {
        name: partial(start, engines, folder / name, *flags_of(name, plan))
        for name, (start, _) in ARMS.items()
    }
    with running_arms(arms) as nodes:
        found = asyncio.run(measure(nodes, plan, are_exact=engines.are_exact))
    size = "--max-total-tokens", str(plan.pool_tokens)
    with running_arms(move_starts(engines, folder, *size, *FLAGS)) as nodes:
        moves = measure_moves(nodes, plan.moves, plan.prefix_tokens, are_exact=engines.are_exact)
        return found | asyncio.run(moves)


if __name__ == "__main__":
    main()
