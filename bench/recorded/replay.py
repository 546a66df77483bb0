"""Recorded sessions as agents in a closed loop, for engines in virtual time.

The blocks of a prompt become chained keys: a block is the same as another only if all blocks
before it are, too. Blocks of one session keep their numbers apart from those of other sessions.
The first `head_tokens` of a conversation, its tools and instructions, are shared by all
conversations of the same version: a recording does not say this, but it is so in life.

An answer is part of the next prompt where that prompt goes on where this one ended. Then the
engine that wrote the answer holds its blocks.

A simulated block is `grain` recorded ones: the larger, the faster the simulation and the coarser
what a cache holds.
"""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import xxhash

from bench.recorded.sessions import BLOCK_TOKENS, Conversation, Session
from bench.sim.prompts import BYTES_PER_TOKEN
from bench.trace.agents import Agent
from bench.trace.agents import Turn as AgentTurn
from bench.trace.calls import Call
from sgl_ext.reading.segments import Chain

_SIZES = (1, 1, 1)  # an agent here has no text


@dataclass(frozen=True, slots=True)
class Replay:
    """Agents in a closed loop, and the calls of each."""

    agents: tuple[Agent, ...]
    calls: Sequence[Sequence[Call]]


def replay(
    sessions: Sequence[Session],
    at_once: int,
    *,
    grain: int = 16,
    seed: int = 1,
    longest_tokens: int = 0,
    limit_s: float = 0.0,
) -> Replay:
    """`at_once` people who each work through session after session, without an end.

    The first session of each begins at a turn by chance, as on a node that has run for a while:
    all begin within 60 s. limit_s: how long the run will be; no more sessions than that are made.
    longest_tokens: sessions with a longer prompt are left out.
    """
    chance = random.Random(seed)
    usable = [one for one in sessions if not longest_tokens or _longest(one) <= longest_tokens]
    if not usable:
        raise ValueError("no session is short enough")
    order: list[Session] = []
    agents: list[Agent] = []
    made: list[tuple[Conversation, str, int]] = []
    for place in range(at_once):
        lasts_s, starts_at, last = 0.0, chance.uniform(0.0, 60.0), None
        while last is None or lasts_s < limit_s:
            if not order:
                order = chance.sample(usable, len(usable))
            session = order.pop()
            turns = session.conversations[0].turns
            first = chance.randrange(len(turns)) if last is None else 0
            lasts_s += sum(turn.think_s for turn in turns[first + 1 :]) + 5.0
            number = _add(agents, made, session, first, f"{seed} {place} {len(agents)}")
            if last is None:
                agents[number] = replace(agents[number], starts_at=starts_at)
            else:
                agents[last] = _starting(agents[last], number)
            last = number
    return Replay(tuple(agents), _Calls(made, grain))


def _longest(session: Session) -> int:
    return max(
        turn.prompt_tokens + turn.answer_tokens
        for one in session.conversations
        for turn in one.turns
    )


def _add(
    agents: list[Agent],
    made: list[tuple[Conversation, str, int]],
    session: Session,
    first: int,
    name: str,
) -> int:
    """Adds a session's agents, its own first, from the turn `first` on; returns the first's number.
    Sub-agents of turns before that do not run."""
    base = len(agents)
    for place, conversation in enumerate(session.conversations):
        own = replace(
            conversation, turns=conversation.turns[first:] if not place else conversation.turns
        )
        turns: list[AgentTurn] = []
        for number, turn in enumerate(own.turns):
            awaited = tuple(base + other for other in turn.starts) if number else ()
            if awaited:
                turns[-1] = replace(turns[-1], starts=awaited)
            turns.append(
                AgentTurn(
                    "",
                    turn.prompt_tokens,
                    turn.answer_tokens,
                    turn.think_s if number else 0.0,
                    waits_for=awaited,
                )
            )
        agents.append(
            Agent(
                base + place,
                "subagent" if place else "main",
                name,
                None,
                "",
                _SIZES,
                tuple(turns),
            )
        )
        made.append((own, f"{session.number}", place))
    return base


def _starting(agent: Agent, number: int) -> Agent:
    """The agent, with another one that begins when it ends."""
    *before, end = agent.turns
    return replace(agent, turns=(*before, replace(end, starts=(*end.starts, number))))


class _Calls(Sequence[Sequence[Call]]):
    """The calls of each agent, made when the agent begins."""

    def __init__(self, made: Sequence[tuple[Conversation, str, int]], grain: int) -> None:
        self._made = made
        self._grain = grain
        self._of = functools.lru_cache(maxsize=4096)(self._compile)

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, agent):  # type: ignore[no-untyped-def]
        return self._of(agent)

    def _compile(self, agent: int) -> list[Call]:
        conversation, session, place = self._made[agent]
        return compile_calls(conversation, agent, session, is_subagent=place > 0, grain=self._grain)


def compile_calls(
    conversation: Conversation, agent: int, session: str, *, is_subagent: bool, grain: int
) -> list[Call]:
    """A conversation's calls, with the keys of all blocks and the segments between turns.

    session: which recording this is: two people who play the same one share nothing but the head,
    as the agent's number is part of the keys.
    """
    block = BLOCK_TOKENS * grain
    head = conversation.head_tokens // block
    blocks = [_blocks(turn.runs, grain) for turn in conversation.turns]
    first = blocks[0][0] if blocks and blocks[0] else None
    root = xxhash.xxh3_64_intdigest(conversation.version.encode())
    own = xxhash.xxh3_64_intdigest(f"{agent} {session}".encode())
    calls: list[Call] = []
    keys: array[int] = array("Q")
    before: Sequence[int] = []
    ends: list[int] = []  # of segments, in blocks
    for number, turn in enumerate(conversation.turns):
        now = blocks[number]
        shared = common(before, now)
        # Whatever followed the common beginning, an answer too, is not part of this prompt.
        chained = keys[:shared]
        has_head = bool(now) and now[0] == first
        last = chained[-1] if chained else root
        for position in range(shared, len(now)):
            text = position if has_head and position < head else now[position] ^ own
            last = xxhash.xxh3_64_intdigest(text.to_bytes(8, "little"), last)
            chained.append(last)
        ends = [end for end in ends if end <= shared]
        if has_head and head and (not ends or ends[0] != head) and head < len(now):
            ends = [head, *(end for end in ends if end > head)]
        if now and (not ends or ends[-1] < len(now)):
            ends.append(len(now))
        prompt_tokens, answer_tokens = turn.prompt_tokens, turn.answer_tokens
        needed = (prompt_tokens + answer_tokens) // block + 1
        answered = _answered(chained, now, blocks, number, needed, own)
        calls.append(
            Call(
                agent,
                number,
                "subagent" if is_subagent else "main",
                f"{agent}",
                _chain(chained, ends, block, prompt_tokens, has_head=ends[:1] == [head]),
                answered,
                prompt_tokens,
                answer_tokens,
            )
        )
        keys, before = chained, now
    return calls


def _answered(
    chained: array[int],
    now: Sequence[int],
    blocks: Sequence[Sequence[int]],
    number: int,
    needed: int,
    own: int,
) -> array[int]:
    """The keys of a prompt and its answer: as the next prompt has them, if it goes on from here."""
    keys = chained[:]
    after = blocks[number + 1] if number + 1 < len(blocks) else []
    goes_on = common(now, after) == len(now)
    last = keys[-1] if keys else own
    for position in range(len(keys), needed):
        known = goes_on and position < len(after)
        text = after[position] ^ own if known else own ^ (number << 32) ^ position ^ (1 << 63)
        last = xxhash.xxh3_64_intdigest((text & ((1 << 64) - 1)).to_bytes(8, "little"), last)
        keys.append(last)
    return keys


def _blocks(runs: Sequence[tuple[int, int]], grain: int) -> list[int]:
    """Every so-many-th block, named by its last one: a larger block."""
    whole = [first + place for first, count in runs for place in range(count)]
    return whole[grain - 1 :: grain]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many blocks two prompts share from their beginning. Chained numbers would allow a binary
    search, but a recording's need not be."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(place for place in range(length) if one[place] != other[place])


def _chain(
    keys: Sequence[int], ends: Sequence[int], block: int, prompt_tokens: int, *, has_head: bool
) -> Chain:
    """The segments of a prompt, as the balancer reads them: named by the text up to their ends."""
    hashes = tuple(xxhash.xxh3_128_intdigest(keys[end - 1].to_bytes(8, "little")) for end in ends)
    positions = [end * block * BYTES_PER_TOKEN for end in ends]
    if positions:
        positions[-1] = max(positions[-1], prompt_tokens * BYTES_PER_TOKEN)
    return Chain(hashes, tuple(positions), head_segments=int(has_head))
