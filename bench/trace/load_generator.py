"""Sends a trace to a router and writes down what came back: the load generator, a process.

    python -m bench.trace.load_generator '{"url": "http://...", "trace": {...}, "limit_s": 60,
        "session_header": "x-session-id" or null}'

The last line of its output is one JSON object, `Outcome`. TTFT runs from the write of
a request to the arrival of its first content. `late_ms` says how much later than
due calls were sent, which is this process's own slowness. After `limit_s` no new
call starts. Every call that fails is an error; there are no retries.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import orjson
import uvloop

from bench.trace.agents import Agent, TraceConfig
from bench.trace.calls import CHAT, Conversation, Loop
from bench.trace.swarm import make_swarm

_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
_CONTENT = re.compile(rb'"content":\s*"[^"]')


@dataclass
class Outcome:
    """One run: the calls that were answered, and what their usage added up to."""

    done: list[tuple[int, int]] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    complete: bool = True
    errors: list[str] = field(default_factory=list)


class Generator:
    """The agents of a trace against one URL, in real time."""

    def __init__(
        self,
        agents: tuple[Agent, ...],
        url: str,
        limit_s: float,
        header: str | None,
    ) -> None:
        self.outcome = Outcome()
        self._agents = agents
        self._url = url + CHAT
        self._header = header
        self._limit_s = limit_s
        self._loop = Loop(agents)
        self._talks: dict[int, Conversation] = {}
        self._wake = asyncio.Event()

    async def run(self) -> Outcome:
        """All calls, or as many as start within the limit."""
        running: set[asyncio.Task[None]] = set()
        self._started = time.perf_counter()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            while self._loop.open and not self.outcome.errors:
                now = self._now()
                if now > self._limit_s:
                    self.outcome.complete = False
                    break
                if self._loop.next_at() <= now:
                    self.outcome.late_ms.append((now - self._loop.next_at()) * 1000)
                for agent, turn in self._loop.due(now):
                    task = asyncio.create_task(self._call(session, agent, turn))
                    running.add(task)
                    task.add_done_callback(running.discard)
                self._wake.clear()
                wait_s = min(self._loop.next_at(), self._limit_s + 0.01) - self._now()
                handle = asyncio.get_running_loop().call_later(max(0, wait_s), self._wake.set)
                await self._wake.wait()
                handle.cancel()
            await asyncio.gather(*running)
        self.outcome.seconds = self._now()
        return self.outcome

    def _now(self) -> float:
        return time.perf_counter() - self._started

    async def _call(self, session: aiohttp.ClientSession, number: int, place: int) -> None:
        agent = self._agents[number]
        turn = agent.turns[place]
        talk = self._talks.get(number)
        if talk is None:
            talk = self._talks[number] = Conversation(agent)
        body = orjson.dumps({**talk.ask(turn), **_STREAMED})
        headers = {"content-type": "application/json"}
        if self._header:
            headers[self._header] = agent.session
        try:
            answer, usage = await self._ask(session, body, headers)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            self.outcome.errors.append(f"agent {number} turn {place}: {error!r}")
            self._wake.set()
            return
        talk.hear(answer)
        if place + 1 == len(agent.turns):
            del self._talks[number]
        found = self.outcome
        found.done.append((number, place))
        found.prompt_tokens += usage["prompt_tokens"]
        found.output_tokens += usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        found.cached_tokens += details.get("cached_tokens") or 0
        self._loop.finished(number, place, self._now())
        self._wake.set()

    async def _ask(
        self, session: aiohttp.ClientSession, body: bytes, headers: dict[str, str]
    ) -> tuple[str, dict[str, Any]]:
        sent, first = time.perf_counter(), 0.0
        received = []
        async with session.post(self._url, data=body, headers=headers) as response:
            if response.status != 200:
                raise ValueError(f"{response.status}: {(await response.text())[:300]}")
            async for data in response.content.iter_any():
                if not first and _CONTENT.search(data):
                    first = time.perf_counter()
                received.append(data)
        texts, usage = [], None
        for line in b"".join(received).split(b"\n"):
            if line.startswith(b"data: {"):
                event = orjson.loads(line[6:])
                if "error" in event:
                    raise ValueError(f"in the stream: {event['error']}")
                texts += [c["delta"].get("content") or "" for c in event["choices"]]
                usage = event.get("usage") or usage
        if usage is None or not first:
            raise ValueError("a stream ended without content or usage")
        self.outcome.ttft_ms.append((first - sent) * 1000)
        return "".join(texts), usage


def main() -> None:
    task = json.loads(sys.argv[1])
    agents = make_swarm(TraceConfig(**task["trace"]))
    generator = Generator(agents, task["url"], task["limit_s"], task["session_header"])
    print(json.dumps(asdict(uvloop.run(generator.run()))))


if __name__ == "__main__":
    main()
