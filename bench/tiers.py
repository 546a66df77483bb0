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
same turn on an engine that shares nothing (`bench.lib.tiers_moves`).

`wrong_answers` counts greedy answers that differ from those of `stock`. The run is not valid unless
the prefixes are 4 times the cache and fit the host pool, stock SGLang loses them, HiCache brings
some back, and a prefix takes 3 times as long to compute as to read; and of sessions that moved,
unless the tier has what they need and an engine without it has nothing.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from sgl_ext_cpu.node import Node

from bench.lib.arms import rotated, running_arms
from bench.lib.engines import Engines, chosen, engine_parser, model_of
from bench.lib.pin_arm import Arm
from bench.lib.pin_figures import left_by
from bench.lib.pin_load import Conversation, Texts
from bench.lib.priority_load import fitted
from bench.lib.script import Size, precondition, require, run
from bench.lib.tiers_arm import Agents, engine_of, returns
from bench.lib.tiers_figures import (
    HICACHE,
    RELEASE,
    TIERS,
    Seen,
    arm_figures,
    cached_share,
    comparison,
)
from bench.lib.tiers_moves import measure_moves
from bench.lib.tiers_moves import starts as move_starts

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
