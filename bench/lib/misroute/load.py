"""Conversations that share a system prompt and grow, each a session of its own, under way at once.

A turn goes through `/v1/messages` or `/v1/chat/completions`, by session, and streams or
not, by chance. What the client saw of each is a `Sent`. Nothing is sent twice: a request
that fails ends its conversation, and the session begins another one.

With a trace the conversations are its agents', in their order, each begun by a session that has
none. Pauses are the trace's, or `think_s` where it has none; after its end it begins again.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from bench.trace.agents import Agent
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.segments import Chain, read_chain

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
_SYSTEM_BYTES = 6000
_NO_SYSTEM = "You read files."
_TURNS = (3, 9)
_WORDS_A_MESSAGE = (60, 200)
_ANSWER_TOKENS = (4, 8, 16, 64)
_ANSWER = "I have read it, and I will go on with the next file of the list."
_HEADERS = {"content-type": "application/json"}
_PROMPT = re.compile(rb'"prompt_tokens":\s*(\d+)')
_INPUT = re.compile(rb'"input_tokens":\s*(\d+)')
_CACHED = re.compile(rb'"cached_tokens":\s*(\d+)')
_READ = re.compile(rb'"cache_read_input_tokens":\s*(\d+)')
_ENDS = (b"data: [DONE]", b'"type":"message_stop"', b'"type": "message_stop"')


@dataclass
class Sent:
    """A request as its client saw it. Times are seconds of the wall clock.

    cached_tokens: as the answer's usage has them. Through `/v1/messages` SGLang leaves out a 0.
    """

    phase: str
    chain: Chain
    streams: bool
    sent_s: float
    ended_s: float = 0.0
    outcome: str = "unfinished"  # then "answered", "lost" before its first byte, or "cut" after it
    prompt_tokens: int = 0
    cached_tokens: int = 0
    why: str = ""


@dataclass(frozen=True)
class Ask:
    """A message of a conversation, sent after a pause."""

    pause_s: float
    text: str
    answer_tokens: int


@dataclass(frozen=True)
class Talk:
    """A conversation to have."""

    system: str
    asks: Sequence[Ask]


class Load:
    """The sessions. `phase` names what is done to the engines meanwhile; `open` is the gate
    through which every request goes."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        sessions: int,
        think_s: float,
        seed: int,
        trace: Sequence[Agent] = (),
    ) -> None:
        self.sent: list[Sent] = []
        self.phase = ""
        self.open = asyncio.Event()
        self.open.set()
        self._url = url
        self._model = model
        self._sessions = sessions
        self._think_s = think_s
        self._seed = seed
        self._ending = asyncio.Event()
        words = " ".join(
            path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py"))
        )
        self._system = words[:_SYSTEM_BYTES]
        self._words = words.split()
        self.traced = self._traced_talks(trace) if trace else None

    async def run(self) -> None:
        """Goes on until `end`, and then until the last answer is there."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            await asyncio.gather(*(self._session(http, at) for at in range(self._sessions)))

    def end(self) -> None:
        """No further turn begins."""
        self._ending.set()
        self.open.set()

    async def _session(self, http: aiohttp.ClientSession, number: int) -> None:
        chance = random.Random(self._seed * 1000 + number)
        path = (CHAT, MESSAGES)[number % 2]
        for talk in self.traced or self._own_talks(number, chance):
            messages: list[dict[str, Any]] = []
            for ask in talk.asks:
                await asyncio.sleep(ask.pause_s)
                await self.open.wait()
                if self._ending.is_set():
                    return
                messages.append({"role": "user", "content": ask.text})
                if not await self._ask(http, path, talk.system, messages, ask, chance):
                    break
                messages.append({"role": "assistant", "content": _ANSWER})

    def _own_talks(self, number: int, chance: random.Random) -> Iterator[Talk]:
        for begun in count(1):
            asks = []
            for turn in range(chance.randint(*_TURNS)):
                words = chance.choices(self._words, k=chance.randint(*_WORDS_A_MESSAGE))
                text = f"Session {number}.{begun}, turn {turn}. " + " ".join(words)
                pause_s = chance.expovariate(1 / self._think_s)
                asks.append(Ask(pause_s, text, chance.choice(_ANSWER_TOKENS)))
            yield Talk(self._system, asks)

    def _traced_talks(self, agents: Sequence[Agent]) -> Iterator[Talk]:
        while True:
            for agent in agents:
                asks = [
                    Ask(turn.gap_s or self._think_s, turn.text(), turn.answer_tokens)
                    for turn in agent.turns
                ]
                yield Talk(agent.opening() or _NO_SYSTEM, asks)

    async def _ask(
        self,
        http: aiohttp.ClientSession,
        path: str,
        system: str,
        messages: list[dict[str, Any]],
        ask: Ask,
        chance: random.Random,
    ) -> bool:
        """Sends one turn; whether it was answered."""
        streams = chance.random() < 0.5
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": ask.answer_tokens,
            "temperature": 0,
            "stream": streams,
            "messages": messages,
        }
        if path == MESSAGES:
            body["system"] = system
        else:
            body["messages"] = [{"role": "system", "content": system}, *messages]
            if streams:
                body["stream_options"] = {"include_usage": True}
        sent = Sent(self.phase, read_chain(of_path(path), body), streams, time.time())
        self.sent.append(sent)
        received: list[bytes] = []
        try:
            data = json.dumps(body).encode()
            async with http.post(self._url + path, data=data, headers=_HEADERS) as answer:
                status = answer.status
                async for part in answer.content.iter_any():
                    received.append(part)
            whole = b"".join(received)
            if status != 200:
                sent.outcome, sent.why = "lost", f"{status}: {whole[:200]!r}"
            elif streams and not any(end in whole for end in _ENDS):
                sent.outcome, sent.why = "cut", repr(whole[-200:])
            else:
                sent.outcome = "answered"
                sent.prompt_tokens, sent.cached_tokens = _usage(whole)
        except (aiohttp.ClientError, TimeoutError) as error:
            sent.outcome, sent.why = "cut" if received else "lost", repr(error)
        sent.ended_s = time.time()
        return sent.outcome == "answered"


def _usage(answer: bytes) -> tuple[int, int]:
    """Prompt tokens, and those of them that were cached, in whichever protocol's words."""
    prompt, new, cached, read = (
        max(map(int, pattern.findall(answer)), default=0)
        for pattern in (_PROMPT, _INPUT, _CACHED, _READ)
    )
    return (prompt, cached) if prompt else (new + read, read)
