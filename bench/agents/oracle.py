"""The right answers: those of SGLang as it is, asked before the faults."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from sgl_ext_cpu.node import FORKING
from sgl_ext_cpu.nursery import Nursery

from bench.agents.client import Reply, send
from bench.agents.conversations import Conversation, Turn
from bench.agents.judge import Answer, outcome_of, read_answer
from bench.lib.script import require

_LIMIT_S = 300.0


@dataclass
class Oracle:
    """Every turn of every conversation, and its answer by name."""

    turns: dict[int, list[Turn]] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)

    def is_right(self, turn: Turn, body: bytes) -> bool:
        """Whether a whole answer is the one that a stock engine gives."""
        try:
            answer = read_answer(turn.path, body, streams=turn.streams)
        except (ValueError, LookupError):
            return False
        return answer.content == self.answers[turn.name].content

    @property
    def short_turns(self) -> list[Turn]:
        """The turns with the shortest answers."""
        turns = sorted(chain(*self.turns.values()), key=lambda t: self.answers[t.name].tokens)
        return turns[: len(self.turns) // 2]

    @property
    def last_turns(self) -> list[Turn]:
        """The longest prompt of each conversation."""
        return [turns[-1] for turns in self.turns.values()]


async def ask_stock(url: str, conversations: Sequence[Conversation]) -> Oracle:
    """Asks a stock engine for every turn's answer. Raises InvariantBroken if one is missing."""
    oracle = Oracle()
    await asyncio.gather(*(_ask(oracle, url, each) for each in conversations))
    return oracle


async def _ask(oracle: Oracle, url: str, conversation: Conversation) -> None:
    answered: list[Answer] = []
    turns = oracle.turns[conversation.number] = []
    for number in range(conversation.turns):
        turn = conversation.turn(number, answered)
        reply = await send(Reply(), url, turn.path, _for_stock(turn.body), {}, _LIMIT_S)
        outcome = outcome_of(reply, turn.path, streams=turn.streams, continues=False)
        why = reply.failure or reply.body[-300:]
        require(outcome == "whole", "a stock engine answers every turn", turn=turn.name, why=why)
        answered.append(read_answer(turn.path, reply.body, streams=turn.streams))
        oracle.answers[turn.name] = answered[-1]
        turns.append(turn)


def _for_stock(body: dict[str, Any]) -> dict[str, Any]:
    """Of `max_output_tokens` SGLang generates two fewer; our engine generates all."""
    if "max_output_tokens" not in body:
        return body
    return body | {"store": False, "max_output_tokens": body["max_output_tokens"] + 2}


def from_nursery(stack: ExitStack) -> dict[str, str]:
    """The variables with which engines start soon: they are forked from a nursery, the caller's
    if it has one, until the stack closes."""
    shared = {**FORKING, "OMP_NUM_THREADS": "1"}
    if "SGLEXT_CPU_NURSERY" in os.environ:
        return shared
    return {**shared, **stack.enter_context(Nursery(environment=shared)).environment}
