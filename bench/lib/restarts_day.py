"""A day of recorded sessions on two engines, shortened.

All play at once, while the engines restart one by one twice, and every process is killed once in
between.

A recorded block of 64 tokens is a short word here (`bench/recorded/real_engines.py`), which makes
prompts about a sixteenth as long, and a second of a gap is `_GAP_SCALE` of one. A client whose
request breaks because of the kill sends it again once the servers are back, as agents do.

`cached_over_ideal` is of all turns but each session's first: of the tokens that a turn has in
common with the one before it, how many were cached. `lost` counts requests that broke otherwise.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from bench.lib.clients import MESSAGES, Answer, ask
from bench.lib.restarted_servers import Servers
from bench.lib.script import Size, precondition
from bench.recorded.real_engines import Step, steps
from bench.recorded.sessions import BLOCK_TOKENS, Session

POOL_TOKENS = 98_304
_GAP_SCALE, _MOST_GAP_S = 1 / 8, 10.0
_MOST_BLOCKS = 1_600
_AGAIN_S = 0.5


@dataclass(frozen=True)
class DayPlan:
    """agents: sessions at once. turns: of each."""

    agents: int
    turns: int


DAYS: Mapping[Size, DayPlan] = {
    "full": DayPlan(20, 48),
    "quick": DayPlan(20, 16),
    "brief": DayPlan(12, 10),
    "smallest": DayPlan(3, 6),
}


def plays(sessions: Sequence[Session], plan: DayPlan) -> list[list[Step]]:
    """What each agent sends: the first turns of recorded sessions that fit, chosen by chance."""
    most = _MOST_BLOCKS * BLOCK_TOKENS
    usable = [
        one.conversations[0]
        for one in sessions
        if len(turns := one.conversations[0].turns) >= plan.turns
        and all(turn.prompt_tokens <= most for turn in turns[: plan.turns])
    ]
    precondition(len(usable) >= plan.agents, "there are sessions that are short enough")
    chosen = random.Random(1).sample(usable, plan.agents)
    scale, most_s = _GAP_SCALE, _MOST_GAP_S
    return [
        steps(one, f"{place}", plan.turns, gap_scale=scale, most_gap_s=most_s)
        for place, one in enumerate(chosen)
    ]


@dataclass
class DaySeen:
    """What one arm measured. answers: by the id of the turn. sent_again: after the kill."""

    answers: dict[str, Answer] = field(default_factory=dict)
    lost: int = 0
    sent_again: int = 0

    def common(self, played: Sequence[Sequence[Step]]) -> Iterator[tuple[int, int]]:
        """Of each turn after a session's first: its cached tokens that the turn before had, and how
        many tokens they have in common."""
        for own in played:
            for before, turn in pairwise(own):
                had = self.answers[before.id].prompt_tokens
                ideal = round(had * _common_share(_texts(before), _texts(turn)))
                yield min(self.answers[turn.id].cached_tokens, ideal), ideal


def _texts(step: Step) -> list[str]:
    said = [step.body["system"], *(message["content"] for message in step.body["messages"])]
    return [content[0]["text"] for content in said]


def _common_share(before: Sequence[str], after: Sequence[str]) -> float:
    """Of the text of a prompt, how much the next one begins with."""
    shared = 0
    for one, other in zip(before, after, strict=False):
        if one != other:
            break
        shared += len(one)
    return shared / sum(map(len, before))


class Day:
    """One arm's day."""

    def __init__(self, servers: Servers, played: Sequence[Sequence[Step]]) -> None:
        self._servers = servers
        self._played = played
        self._in_flight: list[str] = []
        self._serve = asyncio.Event()
        self._ends = 0  # how often the servers were killed or came back
        self.seen = DaySeen()

    async def run(self) -> DaySeen:
        self._serve.set()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
            agents = [
                asyncio.create_task(self._agent(http, number, own))
                for number, own in enumerate(self._played)
            ]
            events = (self._roll, self._kill, self._roll)
            for number, event in enumerate(events, 1):
                await self._answered(number / (len(events) + 1), agents)
                await event()
            await asyncio.gather(*agents)
        return self.seen

    async def _answered(self, share: float, agents: Sequence[asyncio.Task[None]]) -> None:
        """Waits until so many of all turns are answered."""
        wanted = share * sum(map(len, self._played))
        while len(self.seen.answers) < wanted:
            await asyncio.sleep(0.1)
            for agent in agents:
                if agent.done():
                    agent.result()  # raises what ended it

    async def _roll(self) -> None:
        await self._servers.restart_one_by_one(lambda url: url not in self._in_flight)

    async def _kill(self) -> None:
        self._serve.clear()
        self._ends += 1
        await asyncio.to_thread(self._servers.kill)
        await asyncio.to_thread(self._servers.start)
        self._ends += 1
        self._serve.set()

    async def _agent(self, http: aiohttp.ClientSession, number: int, own: Sequence[Step]) -> None:
        for step in own:
            await asyncio.sleep(step.gap_s)
            self.seen.answers[step.id] = await self._turn(http, number, step)

    async def _turn(self, http: aiohttp.ClientSession, number: int, step: Step) -> Answer:
        while True:
            await self._serve.wait()
            url, before = self._servers.url(number), self._ends
            self._in_flight.append(url)
            session = {"x-claude-code-session-id": f"session-{number}"}
            answer = await ask(http, url, MESSAGES, step.body, session)
            self._in_flight.remove(url)
            if answer.is_whole:
                return answer
            if self._ends == before:
                self.seen.lost += 1
            else:
                self.seen.sent_again += 1
            await asyncio.sleep(_AGAIN_S)


def compared(
    seen: Mapping[str, DaySeen], played: Sequence[Sequence[Step]], *, ours: str, stock: str
) -> dict[str, Any]:
    """The figures of all arms."""
    theirs = seen[stock].answers
    wrong = {
        name: sum(answer.text != theirs[id].text for id, answer in arm.answers.items())
        for name, arm in seen.items()
    }
    arms: dict[str, dict[str, Any]] = {}
    for name, arm in seen.items():
        pairs = list(arm.common(played))
        arms[name] = {
            "cached_over_ideal": round(sum(c for c, _ in pairs) / sum(i for _, i in pairs), 4),
            "turns": len(arm.answers),
            "prompt_tokens": sum(answer.prompt_tokens for answer in arm.answers.values()),
            "lost": arm.lost,
            "sent_again": arm.sent_again,
            "wrong_answers": wrong[name],
        }
    return {
        "sessions": len(played),
        "cached_over_ideal": arms[ours]["cached_over_ideal"],
        "lost": arms[ours]["lost"],
        "wrong_answers": sum(wrong.values()),
        "arms": arms,
    }
