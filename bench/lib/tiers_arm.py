"""One engine of bench/tiers with its agents."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import aiohttp
from sgl_ext_cpu.node import Node

from bench.lib.pin_arm import Arm
from bench.lib.pin_load import Answer, Conversation, Texts
from bench.lib.script import require
from bench.lib.tiers_figures import Round, Seen

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
