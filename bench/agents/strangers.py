"""Requests that never come twice: each with a session, a prompt and a pin of its own.

They make every table grow that a client's string can grow. Their answers are judged by their
form only: no oracle has them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import aiohttp

from bench.agents.client import Reply, send
from bench.agents.judge import MESSAGES, outcome_of
from bench.lib.pin_load import Texts

_PROMPT_WORDS = 60
_CONTEXT_EVERY = 5
_PAUSE_S = 0.2
_LIMIT_S = 120.0
_MARK = {"cache_control": {"type": "ephemeral", "ttl": "1m"}}


class Strangers:
    """Sends one request after another. outcomes: counted; `contexts` are registered, too."""

    def __init__(self, url: str, model: str, texts: Texts) -> None:
        self.outcomes: Counter[str] = Counter()
        self._url = url
        self._model = model
        self._texts = texts
        self._ending = asyncio.Event()

    def end(self) -> None:
        """No further request is sent."""
        self._ending.set()

    async def run(self) -> None:
        """Goes on until `end`."""
        async with aiohttp.ClientSession() as http:
            for number in itertools.count():
                if self._ending.is_set():
                    return
                await self._ask(number)
                if number % _CONTEXT_EVERY == 0:
                    await self._register(http, number)
                await asyncio.sleep(_PAUSE_S)

    async def _ask(self, number: int) -> None:
        text = self._texts.fresh(f"Stranger {number}", _PROMPT_WORDS)
        block = {"type": "text", "text": text, **_MARK}
        body = {
            "model": self._model,
            "max_tokens": 4,
            "stream": True,
            "messages": [{"role": "user", "content": [block]}],
        }
        headers = {"x-sgl-ext-session-id": f"stranger {number}", "user-agent": f"agent/{number}"}
        reply = await send(Reply(), self._url, MESSAGES, body, headers, _LIMIT_S)
        self.outcomes[outcome_of(reply, MESSAGES, streams=True, continues=False)] += 1

    async def _register(self, http: aiohttp.ClientSession, number: int) -> None:
        content = self._texts.words(f"context {number}", _PROMPT_WORDS)
        block = {"id": "rules", "layer": "stable", "content": content}
        async with http.post(f"{self._url}/v1/contexts", json={"blocks": [block]}) as answer:
            self.outcomes["context" if answer.ok else f"context {answer.status}"] += 1
