"""One engine of bench/pin_flood with its conversation."""

from __future__ import annotations

import asyncio
import json
import re
import time

import aiohttp
from sgl_ext_cpu.node import Node

from bench.lib.pin_figures import Part, Seen
from bench.lib.pin_load import MESSAGES, Answer, Conversation, Flooded, ask, flood, single

# A turn comes when about this share of the flood beside it has been answered.
_LEAD = 0.25
# A sleeping scheduler deletes pins when it wakes: both sides of a pair wait longer than that.
_SETTLE_S = 1.5


class Arm:
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
            page = await answer.text()
        found = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", page, re.MULTILINE)
        return {labels: int(float(value)) for labels, value in found}

    async def total(self, name: str) -> int:
        """A counter of the engine's, summed over its labels."""
        return sum((await self.counted(name)).values())

    def _noted(self, answer: Answer) -> Answer:
        self.seen.aborted += not answer.is_whole
        return answer
