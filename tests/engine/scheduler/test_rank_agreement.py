"""All ranks of an engine decide alike, in every iteration, on one machine and on two.

SGLang's own checks are on: a rank tells the others what it matches, locks, stores and evicts, and
the extension adds its pins, victims, slices and orders. Ranks that differ end their engine. So the
engine is driven with everything by which its ranks could part, and must be up at the end.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests
from sgl_ext_cpu.ranks import Ranks, running_ranks

from sgl_ext.pin_mirror import PATH as PINS
from sgl_ext.wire.orders import SETTINGS_PATH
from tests.engine.scheduler.test_event_publisher import text
from tests.waiting import HANG_S

pytestmark = [pytest.mark.engine, pytest.mark.slow]
FLAGS = ("--max-total-tokens", "4096", "--chunked-prefill-size", "256")
CYCLES = 4
ENABLED = "Rank consensus checker is enabled"
SEEN = (
    "sgl_ext_pins_granted_total",
    "sgl_ext_preempted_requests_total",
    "sgl_ext_prefilled_ahead_tokens_total",
)
"""What the load must have something of."""


class Load:
    """Drives one engine. failed: requests without an answer, by what they were."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.failed: Counter[str] = Counter()
        self._http = http
        self._url = url
        self._random = random.Random(1)
        self._talks: list[list[dict[str, Any]]] = [[], [], []]

    async def drive(self) -> None:
        """Prefills ahead, pins, interrupts, preempts and aborts, and changes things in between."""
        between = (self._flush, self._unpin, self._change)
        for cycle in range(CYCLES):
            await self._ahead(cycle)
            await asyncio.gather(*(self._turn(number, cycle) for number in range(3)))
            await self._crowd(cycle)
            await between[cycle % len(between)](cycle)

    async def _ahead(self, cycle: int) -> None:
        guessed = {**self._message(f"ahead {cycle} {text(500)}"), "max_tokens": 4}
        await asyncio.gather(
            self._send("/v1/prefill", guessed), self._generate(f"beside {cycle}", 4, priority=100)
        )
        await self._send("/v1/messages", guessed)

    async def _turn(self, number: int, cycle: int) -> None:
        words = text(300 if not cycle else 20)
        block = {"type": "text", "text": f"session {number}, turn {cycle}: {words}"}
        marked = {**block, "cache_control": {"type": "ephemeral"}}
        messages = self._talks[number]
        body = {"model": "tiny", "max_tokens": 8}
        headers = {"x-sgl-ext-session-id": f"s{number}"}
        turn = {"role": "user", "content": [marked]}
        await self._send("/v1/messages", {**body, "messages": [*messages, turn]}, headers)
        messages += [
            {"role": "user", "content": [block]},
            {"role": "assistant", "content": "an answer"},
        ]

    async def _crowd(self, cycle: int) -> None:
        """Long answers fill the memory, important requests take it, and a client leaves."""
        long = [
            asyncio.create_task(self._generate(f"long {cycle} {n} {text(180)}", 120))
            for n in range(10)
        ]
        await asyncio.sleep(self._random.uniform(0.2, 0.8))
        urgent = [
            asyncio.create_task(self._generate(f"urgent {cycle} {n} {text(600)}", 4, priority=100))
            for n in range(3)
        ]
        long[self._random.randrange(10)].cancel()
        await asyncio.gather(*long, *urgent, return_exceptions=True)

    async def _flush(self, cycle: int) -> None:
        await self._send("/flush_cache", {})

    async def _unpin(self, cycle: int) -> None:
        await self._send(f"{PINS}?session=s1", None, method="DELETE")

    async def _change(self, cycle: int) -> None:
        await self._send(SETTINGS_PATH, {"number": cycle, "values": {"pin_budget": 0.1}})

    @staticmethod
    def _message(words: str) -> dict[str, Any]:
        return {"model": "tiny", "messages": [{"role": "user", "content": words}]}

    async def _generate(self, words: str, tokens: int, priority: int = 0) -> None:
        sampling = {"max_new_tokens": tokens, "ignore_eos": True}
        body = {"text": words, "priority": priority, "sampling_params": sampling}
        await self._send("/generate", body)

    async def _send(
        self,
        path: str,
        body: Any,
        headers: dict[str, str] | None = None,
        method: str = "POST",
    ) -> None:
        url = self._url + path
        try:
            async with self._http.request(method, url, json=body, headers=headers) as answer:
                said = await answer.read()
                if not answer.ok:
                    self.failed[f"{path}: {answer.status} {said[:200]!r}"] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            self.failed[f"{path}: {type(error).__name__}"] += 1


async def driven(ranks: Ranks) -> Counter[str]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
        load = Load(http, ranks.url)
        await load.drive()
        return load.failed


@pytest.mark.parametrize(
    "options",
    [{}, {"nodes": 2}, {"pipeline": True}],
    ids=["one node", "two nodes", "pipeline"],
)
def test_the_ranks_of_an_engine_agree(
    options: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    with running_ranks(tiny_model, tmp_path, *FLAGS, **options) as ranks:
        failed = asyncio.run(driven(ranks))
        logs = "".join(log.read_text(errors="replace") for log in ranks.logs)
        assert logs.count(ENABLED) == 2, "both ranks compare what they do"
        assert not failed, logs[-6000:]
        assert ranks.divergences() == 0
        page = requests.get(f"{ranks.url}/metrics", timeout=HANG_S).text
        rows = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
        for name in SEEN:
            assert sum(float(value) for key, value in rows if key.startswith(name)) > 0, name
