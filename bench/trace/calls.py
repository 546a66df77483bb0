"""A trace in motion: which calls are due, what each of them says, and the best any cache could do.

A conversation's texts do not depend on who computes them or when, so a whole trace
can be written out beforehand: `compile_calls` gives every call with its segments and
blocks, and any number of placements can then be tried on it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.sim.prompts import (
    ANSWER_OPENING,
    BLOCK_TOKENS,
    Blocks,
    answer_to,
    beginning,
    rendered,
)
from bench.trace.agents import Agent, Turn
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.segments import Chain, read_chain

CHAT = "/v1/chat/completions"
MODEL = "sim"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a trace; `keys` are the blocks of its prompt and answer, and may go on."""

    agent: int
    turn: int
    kind: str
    session: str
    chain: Chain
    keys: Sequence[int]
    prompt_tokens: int
    output_tokens: int


class Loop:
    """The closed loop: `due` hands out calls as (agent, turn), `finished` makes the next ones."""

    def __init__(self, agents: Sequence[Agent]) -> None:
        self.agents = agents
        self.open = sum(len(agent.turns) for agent in agents)
        self._due: list[tuple[float, int, int]] = []
        self._held_back: dict[int, tuple[int, set[int]]] = {}  # agent: its turn, whom it awaits
        self._waiter: dict[int, int] = {}  # who awaits an agent
        self._over: set[int] = set()
        for agent in agents:
            if agent.starts_at is not None:
                self._add(agent.starts_at, agent.number, 0)

    def next_at(self) -> float:
        """When the next call is due; infinity if an answer has to come first."""
        return self._due[0][0] if self._due else math.inf

    def due(self, now: float) -> Iterator[tuple[int, int]]:
        """The calls to send by now, each once."""
        while self._due and self._due[0][0] <= now:
            _, agent, turn = heapq.heappop(self._due)
            yield agent, turn

    def finished(self, agent: int, turn: int, now: float) -> None:
        """An answer is complete."""
        self.open -= 1
        turns = self.agents[agent].turns
        for started in turns[turn].starts:
            self._add(now, started, 0)
        if turn + 1 == len(turns):
            self._end(agent, now)
        elif awaited := set(turns[turn + 1].waits_for) - self._over:
            self._held_back[agent] = (turn + 1, awaited)
            self._waiter.update(dict.fromkeys(awaited, agent))
        else:
            self._add(now, agent, turn + 1)

    def _end(self, agent: int, now: float) -> None:
        self._over.add(agent)
        waiter = self._waiter.pop(agent, None)
        if waiter is not None:
            turn, awaited = self._held_back[waiter]
            awaited.remove(agent)
            if not awaited:
                del self._held_back[waiter]
                self._add(now, waiter, turn)

    def _add(self, now: float, agent: int, turn: int) -> None:
        heapq.heappush(self._due, (now + self.agents[agent].turns[turn].gap_s, agent, turn))


class Conversation:
    """An agent's requests, one turn at a time."""

    def __init__(self, agent: Agent) -> None:
        self._tools = agent.tools()
        self._messages = agent.system()

    def ask(self, turn: Turn) -> dict[str, Any]:
        """The body of the next call. Its message lists go on growing; send or read it at once."""
        self._messages.append({"role": "user", "content": turn.text()})
        body: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": turn.answer_tokens,
            "messages": self._messages,
        }
        if self._tools:
            body["tools"] = self._tools
        return body

    def hear(self, answer: str) -> None:
        """The assistant's answer becomes part of the history."""
        self._messages.append({"role": "assistant", "content": answer})


def compile_calls(agents: Sequence[Agent]) -> list[list[Call]]:
    """Every call, by agent and turn."""
    return [_compile(agent) for agent in agents]


def _compile(agent: Agent) -> list[Call]:
    conversation, blocks, read = Conversation(agent), Blocks(), 0
    calls = []
    for place, turn in enumerate(agent.turns):
        body = conversation.ask(turn)
        messages = body["messages"]
        begins = () if read else beginning(body)
        blocks.feed((*begins, *map(rendered, messages[read:]), ANSWER_OPENING))
        prompt_tokens = blocks.tokens
        chain = read_chain(of_path(CHAT), body)
        answer = answer_to(messages[-1]["content"], turn.answer_tokens)
        blocks.feed((answer.encode(),))
        read = len(messages) + 1  # the answer was read here
        conversation.hear(answer)
        calls.append(
            Call(
                agent.number,
                place,
                agent.kind,
                agent.session,
                chain,
                blocks.keys,
                prompt_tokens,
                blocks.tokens - prompt_tokens,
            )
        )
    return calls


@dataclass(frozen=True, slots=True)
class Ideal:
    """What one worker with an infinite cache, and no time to lose, would read from it."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def cached_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def read_write(self) -> float:
        """Tokens read from the cache for each token written to it, answers included."""
        return self.cached_tokens / (self.prompt_tokens - self.cached_tokens + self.output_tokens)


def ideal_of(
    agents: Sequence[Agent],
    calls: Sequence[Sequence[Call]],
    only: Collection[tuple[int, int]] | None = None,
) -> Ideal:
    """Answers every call of a trace at once and adds up. `only` names the calls that are made."""
    loop, held = Loop(agents), set[int]()
    requests = prompt = cached = output = 0
    while loop.open:
        now = loop.next_at()
        for agent, turn in loop.due(now):
            call = calls[agent][turn]
            matched = 0
            for key in call.keys[: (call.prompt_tokens - 1) // BLOCK_TOKENS]:
                if key not in held:
                    break
                matched += 1
            total = call.prompt_tokens + call.output_tokens
            loop.finished(agent, turn, now)
            if only is not None and (agent, turn) not in only:
                continue
            held.update(call.keys[matched : (total - 1) // BLOCK_TOKENS])
            requests += 1
            prompt += call.prompt_tokens
            cached += matched * BLOCK_TOKENS
            output += call.output_tokens
    return Ideal(requests, prompt, cached, output)
