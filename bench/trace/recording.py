"""A trace written out as records: when each call is sent, and which blocks its prompt has.

Agents call in a closed loop, a record has a time. So each answer is taken to last `FIRST_S`, and
`TOKEN_S` for each token of output: a fast engine without a queue.

Blocks have the same id if their tokens and all tokens before them are the same. A prompt's last
block is shorter than the others, and its id is used once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from bench.sim.prompts import BLOCK_TOKENS
from bench.trace.agents import TRACE_BLOCK_TOKENS, Agent
from bench.trace.calls import Call, Loop
from bench.trace.mooncake import Record

FIRST_S, TOKEN_S = 0.5, 0.02
_KEYS = TRACE_BLOCK_TOKENS // BLOCK_TOKENS


def records_of(agents: Sequence[Agent], calls: Sequence[Sequence[Call]]) -> list[Record]:
    """All calls of a trace, the earliest first; `calls` are `compile_calls(agents)`."""
    loop, ids = Loop(agents), _Ids()
    ends: list[tuple[float, int, int]] = []
    records: list[Record] = []
    while loop.open:
        if ends and ends[0][0] <= loop.next_at():
            now, agent, turn = heapq.heappop(ends)
            loop.finished(agent, turn, now)
            continue
        now = loop.next_at()
        for agent, turn in loop.due(now):
            call = calls[agent][turn]
            blocks, tokens = ids.of(call), call.output_tokens
            records.append(
                Record(round(now * 1000) / 1000, call.prompt_tokens, tokens, blocks, call.session)
            )
            heapq.heappush(ends, (now + FIRST_S + tokens * TOKEN_S, agent, turn))
    return records


def ideal_share(records: Sequence[Record]) -> float:
    """The share of prompt tokens that a cache without bounds reads, by whole blocks.

    Answers are not in it: a trace in Mooncake's format does not say what they consist of.
    """
    held: set[int] = set()
    prompt = cached = 0
    for record in records:
        matched = 0
        for block in record.blocks:
            if block not in held:
                break
            matched += 1
        held.update(record.blocks)
        prompt += record.input_tokens
        cached += min(matched * TRACE_BLOCK_TOKENS, record.input_tokens)
    return cached / prompt


class _Ids:
    """Small numbers for blocks, in the order in which they come up."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._next = 0

    def of(self, call: Call) -> tuple[int, ...]:
        whole, rest = divmod(call.prompt_tokens, TRACE_BLOCK_TOKENS)
        found = []
        for place in range(_KEYS - 1, whole * _KEYS, _KEYS):
            key = call.keys[place]
            if key not in self._known:
                self._known[key] = self._new()
            found.append(self._known[key])
        return (*found, self._new()) if rest else tuple(found)

    def _new(self) -> int:
        self._next += 1
        return self._next - 1
