"""Agents under way at once, in all protocols: with marks, priorities, streams and disconnects.

Each agent has one conversation and repeats it in new sessions until the load ends. What
the client saw of each request is a `Sent`; every whole answer is compared with the oracle's.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from bench.agents.client import Reply, send
from bench.agents.conversations import Conversation, Turn
from bench.agents.judge import Outcome, events_of, outcome_of
from bench.agents.oracle import Oracle

_THINK_S = 0.3
_LOOK_S = 0.05
_BACK_OFF_S = 0.5
_LEAVING = 0.08
_LEAVES_AFTER_S = (0.02, 0.6)


@dataclass(eq=False)
class Sent:
    """A request of the load. outcome: None while it is under way."""

    turn: Turn
    url: str
    continues: bool
    reply: Reply = field(default_factory=Reply)
    outcome: Outcome | None = None
    is_wrong: bool = False
    stored_id: str | None = None
    """With which the next turn continues a response."""

    @property
    def relays(self) -> bool:
        """Whether its answer has begun and not ended."""
        return self.outcome is None and self.reply.first_byte_s is not None

    def waited_s(self, now_s: float) -> float:
        """For its first byte, or for its failure."""
        reply = self.reply
        return (reply.first_byte_s or reply.ended_s or now_s) - reply.sent_s


class MixedLoad:
    """The agents. `url` is where the next requests go; `open` the gate that they go through.

    sent: all requests so far; the caller may clear it. running: those under way.
    """

    def __init__(
        self,
        url: str,
        oracle: Oracle,
        conversations: Sequence[Conversation],
        limit_s: float,
    ) -> None:
        self.url = url
        self.sent: list[Sent] = []
        self.running: set[Sent] = set()
        self.open = asyncio.Event()
        self.open.set()
        self._oracle = oracle
        self._conversations = conversations
        self._limit_s = limit_s
        self._ending = asyncio.Event()

    async def run(self) -> None:
        """Goes on until `end`, and then until the last answer is there."""
        await asyncio.gather(*(self._agent(each) for each in self._conversations))

    async def burst(self, count: int, connections: int, limit_s: float) -> None:
        """Sends so many requests for short answers beside the agents', some at once, and fewer
        if they are not answered in time. Returns after the last answer or the limit."""
        turns = iter(islice(cycle(self._oracle.short_turns), count))
        deadline = time.monotonic() + limit_s

        async def client() -> None:
            for turn in turns:
                if time.monotonic() > deadline:
                    return
                await self._ask(turn, {"x-sgl-ext-priority": "1"}, None, None)

        clients = [asyncio.create_task(client()) for _ in range(connections)]
        await asyncio.wait(clients, timeout=limit_s)

    async def at_rest(self, limit_s: float, url: str = "") -> None:
        """Returns once no request is under way there, or after the limit."""
        for _ in range(round(limit_s / _LOOK_S)):
            if not any(url in (sent.url, "") for sent in self.running):
                break
            await asyncio.sleep(_LOOK_S)

    def end(self) -> None:
        """No further request is sent."""
        self._ending.set()
        self.open.set()

    async def _agent(self, conversation: Conversation) -> None:
        chance = random.Random(f"agent {conversation.number}")
        session = 0
        while not self._ending.is_set():
            session += 1
            headers = {
                "x-sgl-ext-priority": str(conversation.priority),
                "x-sgl-ext-session-id": f"agent {conversation.number}, session {session}",
            }
            stored: str | None = None
            for turn in self._oracle.turns[conversation.number]:
                await asyncio.sleep(chance.expovariate(1 / _THINK_S))
                await self.open.wait()
                if self._ending.is_set():
                    return
                leaves = chance.random() < _LEAVING
                leave_s = chance.uniform(*_LEAVES_AFTER_S) if leaves else None
                sent = await self._ask(turn, headers, stored, leave_s)
                if sent.outcome == "forgotten":
                    sent = await self._ask(turn, headers, None, leave_s)
                if sent.outcome in ("lost", "refused"):
                    await asyncio.sleep(_BACK_OFF_S)
                stored = sent.stored_id

    async def _ask(
        self, turn: Turn, headers: dict[str, str], stored: str | None, leave_s: float | None
    ) -> Sent:
        body = turn.marked if stored is None else turn.continuing(stored)
        sent = Sent(turn, self.url, continues=stored is not None)
        sent.reply.sent_s = time.monotonic()
        self.sent.append(sent)
        self.running.add(sent)
        await send(sent.reply, sent.url, turn.path, body, headers, self._limit_s, leave_s)
        self.running.discard(sent)
        judge(sent, self._oracle)
        return sent


def judge(sent: Sent, oracle: Oracle) -> None:
    """Sets what became of a request that has ended, and drops the body of a right answer."""
    turn, reply = sent.turn, sent.reply
    sent.outcome = outcome_of(reply, turn.path, streams=turn.streams, continues=sent.continues)
    if sent.outcome != "whole":
        return
    sent.is_wrong = not oracle.is_right(turn, reply.body)
    if not sent.is_wrong:
        sent.stored_id = _stored_id(turn, reply.body)
        reply.body = b""


def _stored_id(turn: Turn, body: bytes) -> str | None:
    if "input" not in turn.body:
        return None
    last = list(events_of(body))[-1]["response"] if turn.streams else json.loads(body)
    return str(last["id"])
