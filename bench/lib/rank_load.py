"""What bench/rank_agreement sends: everything by which the ranks of an engine could part.

A cycle has four parts. In the first, a prompt is prefilled ahead in slices, and a request comes in
between. In the second, conversations with marks have a turn each, which makes and reads pins. In
the third, an important request interrupts a prompt that is computed in chunks. In the fourth,
important requests come while long answers fill the memory, so that requests are preempted; a client
leaves. Between two cycles, the cache is emptied, a session is unpinned, or settings change.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

import aiohttp

from bench.lib.pin_load import MESSAGES, Conversation, Texts, single
from bench.lib.priority_load import BATCH, GENERATE, INTERACTIVE, Request
from sgl_ext.pin_mirror import PATH as PINS
from sgl_ext.wire.orders import SETTINGS_PATH

_PREFILL, _FLUSH = "/v1/prefill", "/flush_cache"
_CONVERSATIONS, _TURNS = 3, 8
_SYSTEM_TOKENS = 400
_BATCH, _BATCH_TOKENS, _ANSWER_TOKENS = 10, 250, 120
_LONG_TOKENS = 1800  # of several chunks
_URGENT, _URGENT_TOKENS = 3, 900
_GUESSED_TOKENS = 700


class RankLoad:
    """Drives one engine. `sent` counts requests by kind, and `failed` those without an answer."""

    def __init__(self, http: aiohttp.ClientSession, url: str, seed: int) -> None:
        self.sent: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._http = http
        self._url = url
        self._seed = seed
        self._random = random.Random(seed)
        self._texts = Texts()
        self._texts.fit(3, 1)
        self._conversations = [self._conversation(n) for n in range(_CONVERSATIONS)]
        self._settings = 0

    async def drive(self, seconds: float) -> None:
        """Runs cycles for so long, or until a request gets no answer."""
        end, cycle = time.monotonic() + seconds, 0
        between = (self._flush, self._unpin, self._change)
        while time.monotonic() < end and not self.failed:
            await self._ahead(cycle)
            await self._talk(cycle)
            await self._interrupt(cycle)
            await self._crowd(cycle)
            await between[cycle % len(between)]()
            cycle += 1
        self.sent["cycles"] += cycle

    def _conversation(self, number: int) -> Conversation:
        name = f"{self._seed}, {number}, {self._random.random()}"
        return Conversation(self._texts.fresh(name, _SYSTEM_TOKENS), self._texts, ttl="5m")

    async def _talk(self, cycle: int) -> None:
        if cycle % _TURNS == _TURNS - 1:
            self._conversations[cycle // _TURNS % _CONVERSATIONS] = self._conversation(cycle)
        await asyncio.gather(
            *(
                self._post("turns", MESSAGES, talk.ask(), {"x-sgl-ext-session-id": f"s{number}"})
                for number, talk in enumerate(self._conversations)
            )
        )

    async def _interrupt(self, cycle: int) -> None:
        name = f"{self._seed}, long {cycle}"
        long = Request(self._texts.fresh(name, _LONG_TOKENS), 4, BATCH)
        work = asyncio.create_task(self._post("long", GENERATE, long.body))
        await asyncio.sleep(self._random.uniform(0.02, 0.2))
        await self._post("urgent", GENERATE, Request(f"Urgent: {name}", 4, INTERACTIVE).body)
        await work

    async def _crowd(self, cycle: int) -> None:
        name = f"{self._seed}, cycle {cycle}"
        batch = [
            Request(self._texts.fresh(f"{name}, {n}", _BATCH_TOKENS), _ANSWER_TOKENS, BATCH)
            for n in range(_BATCH)
        ]
        urgent = [
            Request(self._texts.fresh(f"{name}, urgent {n}", _URGENT_TOKENS), 4, INTERACTIVE)
            for n in range(_URGENT)
        ]
        works = [asyncio.create_task(self._post("batch", GENERATE, r.body)) for r in batch]
        await asyncio.sleep(self._random.uniform(0.2, 0.8))
        works += [asyncio.create_task(self._post("urgent", GENERATE, r.body)) for r in urgent]
        await asyncio.sleep(self._random.uniform(0.1, 0.5))
        works[self._random.randrange(_BATCH)].cancel()  # its client leaves
        self.sent["left"] += 1
        await asyncio.gather(*works, return_exceptions=True)

    async def _ahead(self, cycle: int) -> None:
        name = f"{self._seed}, ahead {cycle}"
        guessed = single(self._texts.fresh(name, _GUESSED_TOKENS))
        work = asyncio.create_task(self._post("prefills", _PREFILL, guessed))
        await asyncio.sleep(self._random.uniform(0.0, 0.3))
        await self._post("interruptions", GENERATE, Request(name, 4).body)
        await work
        await self._post("turns", MESSAGES, guessed)

    async def _flush(self) -> None:
        await self._post("flushes", _FLUSH, {})

    async def _unpin(self) -> None:
        session = f"s{self._random.randrange(_CONVERSATIONS)}"
        await self._send("unpins", "DELETE", f"{PINS}?session={session}", None, {})

    async def _change(self) -> None:
        self._settings += 1
        values = {"pin_budget": self._random.choice([0.1, 0.3, 0.6])}
        await self._post("settings", SETTINGS_PATH, {"number": self._settings, "values": values})

    async def _post(
        self, kind: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        await self._send(kind, "POST", path, body, headers or {})

    async def _send(
        self, kind: str, method: str, path: str, body: Any, headers: dict[str, str]
    ) -> None:
        self.sent[kind] += 1
        try:
            async with self._http.request(
                method, self._url + path, json=body, headers=headers
            ) as answer:
                await answer.read()
                if answer.status >= 500:
                    self.failed[f"{kind}: {answer.status}"] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            self.failed[f"{kind}: {type(error).__name__}"] += 1
