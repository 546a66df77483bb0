"""What bench/speculative_prefill sends: people who talk to agents with a tool, and others beside.

A person's turn is what it is with a coding agent: the person writes, the model thinks and calls
the tool, its result is sent back, and the model thinks and answers. All that the model says is
its own (`bench/lib/voice.py`).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.lib.capacity import Capacity
from bench.lib.pin_load import CHAT, Answer, Texts, take
from bench.lib.priority_load import Request
from bench.lib.priority_load import ask as ask_generate
from bench.lib.voice import Voice

_MOST_ANSWER_TOKENS = 200
_BUSY_SHARE = 0.12
_TOOL = {
    "type": "function",
    "function": {
        "name": "next",
        "description": "Returns the next file of the project, from its first line to its last.",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclass(frozen=True)
class Arm:
    """What a person's client does for the next turn.

    is_asked: it asks the engine to prefill that. is_warmed: it sends what it can know of it
    itself: without the tools, for one token, as important as any request.
    """

    is_asked: bool = False
    is_warmed: bool = False


ARMS = {"off": Arm(), "ours": Arm(is_asked=True), "naive": Arm(is_warmed=True)}


@dataclass(frozen=True)
class Load:
    """How much of everything. Sizes are in tokens, times in seconds.

    pause_s: how long a person thinks about an answer, from and to. tool_s: how long the tool
    takes.
    start_s: within which all begin. others_pause_s: between an answer and the next request.
    """

    people: int = 10
    turns: int = 5
    system: int = 300
    first: int = 100
    later: int = 30
    result: int = 1400
    pause_s: tuple[float, float] = (1.0, 5.0)
    tool_s: tuple[float, float] = (1.5, 4.5)
    start_s: float = 2.0
    others: int = 2
    others_prompt: int = 150
    others_answer: int = 2
    others_pause_s: float = 0.5
    most_people: int = 40

    def people_for(self, capacity: Capacity) -> int:
        """How many people take so fast an engine a part of its time, and half of its memory at
        most; the load's at least."""
        turn_s = sum((*self.pause_s, *self.tool_s)) / 2
        # A tool's result is computed when it comes, and again in the next turn, without thinking.
        turn_tokens = 2 * self.result + self.later
        busy = _BUSY_SHARE * capacity.prefill_per_s * turn_s / turn_tokens
        said = self.system + self.first + self.turns * (self.result + self.later)
        return max(self.people, round(min(busy, capacity.pool_tokens / 2 / said, self.most_people)))


@dataclass
class Reply:
    """What a request was answered with, and the message that its client sends back for it."""

    seen: Answer = field(default_factory=Answer)
    content: str = ""
    thought: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def message(self) -> dict[str, Any]:
        said = {"content": self.content, "reasoning_content": self.thought}
        calls = {"tool_calls": list(self.calls.values())} if self.calls else {}
        return {"role": "assistant", **said, **calls}

    def take(self, event: dict[str, Any]) -> None:
        """One event of the stream."""
        take(self.seen, event)
        delta = event["choices"][0]["delta"] if event.get("choices") else {}
        self.content += delta.get("content") or ""
        self.thought += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls") or ():
            call = self.calls.setdefault(part["index"], {"id": part["id"], "type": "function"})
            function = call.setdefault("function", {"name": "", "arguments": ""})
            for name in function:
                function[name] += part["function"].get(name) or ""


@dataclass(frozen=True)
class Turn:
    """The request with which a person writes. number: from 1.

    certain_tokens: of its prompt, those before the person's new message: what can be known
    while the person thinks about it.
    """

    number: int
    certain_tokens: int
    seen: Answer


@dataclass
class Round:
    """What one arm saw in one round.

    results: of the requests that a tool's result ends. warm_ups: of those that are the
    client's own doing. others_ms: waits of unrelated requests for their first token.
    counted: what the engine's counters rose by.
    """

    turns: list[Turn] = field(default_factory=list)
    results: list[Answer] = field(default_factory=list)
    warm_ups: list[Answer] = field(default_factory=list)
    others_ms: list[float] = field(default_factory=list)
    span_s: float = 0.0
    counted: Mapping[str, float] = field(default_factory=dict)


class Person:
    """A person and their agent, as far as the conversation has come.

    Of the same round and number, all arms have the same texts, but for the arm's name, with
    which the first message begins.
    """

    def __init__(self, load: Load, stage: Stage, arm: str, name: str) -> None:
        self.load = load
        self._texts = stage.texts
        self._voice = stage.voice
        self.arm = ARMS[arm]
        self._name = name
        self._messages = [{"role": "system", "content": stage.texts.fresh("Agent", load.system)}]
        self._opening = f"{arm}. "
        self.chance = random.Random(name)

    def writes(self, number: int) -> tuple[dict[str, Any], str]:
        """The request of a turn's beginning, and what the person writes in it."""
        tokens = self.load.later if number > 1 else self.load.first
        text = self._opening + self._texts.fresh(f"{self._name}, turn {number}", tokens)
        self._opening = ""
        self._messages.append({"role": "user", "content": text})
        return self._body(is_call=True), text

    def reads(self, call: Reply) -> dict[str, Any]:
        """The request that sends back what the tool gave. Raises RuntimeError without a call."""
        if len(call.calls) != 1:
            raise RuntimeError(f"the model did not call the tool but said {call}")
        name = call.calls[0]["id"]
        text = self._texts.fresh(f"{self._name}, file {len(self._messages)}", self.load.result)
        result = {"role": "tool", "tool_call_id": name, "content": text}
        self._messages += [call.message, result]
        return self._body(is_call=False)

    def hears(self, answer: Reply) -> None:
        """The end of a turn."""
        self._messages.append(answer.message)

    def warm_up(self) -> dict[str, Any]:
        """What a client can send by itself, that knows nothing of the engine."""
        body = self._body(is_call=False)
        del body["tools"], body["regex"], body["logit_bias"]
        return body | {"max_tokens": 1}

    def _body(self, *, is_call: bool) -> dict[str, Any]:
        hints = {"agent_hints": {"speculative_prefill": self.arm.is_asked}}
        return {
            "model": "tiny",
            "max_tokens": _MOST_ANSWER_TOKENS,
            "temperature": 0,
            "messages": list(self._messages),
            "tools": [_TOOL],
            # SGLang holds a grammar back until a thought has ended, unless there is none.
            "chat_template_kwargs": {"enable_thinking": False},
            "nvext": hints,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._voice.form(is_call=is_call),
        }


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Reply:
    """Sends one request and reads its answer to the end. Its first event is its first token."""
    reply, started = Reply(), time.perf_counter()
    seen = reply.seen
    try:
        async with http.post(url + CHAT, json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    seen.ttft_ms = seen.ttft_ms or (time.perf_counter() - started) * 1000
                    reply.take(json.loads(line[6:]))
                elif line.startswith(b"data: [DONE]"):
                    seen.is_whole = seen.prompt_tokens > 0
    except aiohttp.ClientError:
        seen.is_whole = False
    return reply


@dataclass(frozen=True)
class Stage:
    """Where rounds are played."""

    http: aiohttp.ClientSession
    url: str
    texts: Texts
    voice: Voice

    async def play(self, load: Load, arm: str, name: str) -> Round:
        """All people at once, and the others for as long as one of them talks."""
        seen, started, ended = Round(), time.perf_counter(), asyncio.Event()
        others = asyncio.gather(
            *(
                self._ask_on(load, f"{name}, {arm}, other {n}", seen, ended)
                for n in range(load.others)
            )
        )
        await asyncio.gather(
            *(
                self._talk(Person(load, self, arm, f"{name}, person {n}"), seen)
                for n in range(load.people)
            )
        )
        seen.span_s = time.perf_counter() - started
        ended.set()
        await others
        return seen

    async def _talk(self, person: Person, seen: Round) -> None:
        load, warming = person.load, list[asyncio.Task[Reply]]()
        await asyncio.sleep(person.chance.uniform(0, load.start_s))
        for number in range(1, load.turns + 1):
            body, text = person.writes(number)
            call = await ask(self.http, self.url, body)
            certain = call.seen.prompt_tokens - self.voice.own_tokens(text)
            seen.turns.append(Turn(number, certain, call.seen))
            await asyncio.sleep(person.chance.uniform(*load.tool_s))
            answer = await ask(self.http, self.url, person.reads(call))
            seen.results.append(answer.seen)
            person.hears(answer)
            if person.arm.is_warmed:
                warming.append(asyncio.create_task(ask(self.http, self.url, person.warm_up())))
            if number < load.turns:
                await asyncio.sleep(person.chance.uniform(*load.pause_s))
        seen.warm_ups += [reply.seen for reply in await asyncio.gather(*warming)]

    async def _ask_on(self, load: Load, name: str, seen: Round, ended: asyncio.Event) -> None:
        number = 0
        while not ended.is_set():
            text = self.texts.fresh(f"{name}, {number}", load.others_prompt)
            request = Request(text, load.others_answer)
            answer = await ask_generate(self.http, self.url, request, time.perf_counter())
            seen.others_ms.append(answer.wait_s * 1000)
            number += 1
            await asyncio.sleep(load.others_pause_s)
