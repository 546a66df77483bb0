"""Recorded sessions on two real engines with a small model: SGLang as it is, and ours.

Engines this small cannot hold prompts of 122K tokens. So a recorded block of 64 tokens is one short
word here, and a second of a gap is `_GAP_SCALE` of one. Which blocks a prompt shares with the one
before, how it grows, and how gaps and sizes differ from turn to turn is as recorded. Answers are
short. Sub-agents are left out.

Both arms play the same sessions one after the other, in another order each round, each time from an
empty cache: people who need more memory at once than an engine has.
Requests are Anthropic messages, with the marks that Claude Code sets: at the end of the system text
and at the end of the last message. Greedy answers to the same prompt are compared, whatever was
cached, held back or pinned: `wrong_answers` counts those that differ.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_ext_cpu.node import Node, local_model

from bench.lib.clients import MESSAGES, Answer, ask, clients
from bench.lib.engines import OURS, STOCK, Engines, pool_tokens, rotated
from bench.lib.script import precondition, require
from bench.lib.spread import at, ratio_spread, spread
from bench.recorded.replay import common as common_blocks
from bench.recorded.sessions import BLOCK_TOKENS, Conversation, Session

_GAP_SCALE, _MOST_GAP_S = 1 / 100, 3.0
_ANSWER_TOKENS = 8
_MOST_BLOCKS = 1_200
"""Longer prompts are left out: one of them would be half of an engine's memory."""
_LEAST_TURNS = 6
_FLAGS = ("--max-total-tokens", "16384", "--enable-cache-report")


@dataclass(frozen=True)
class Step:
    """A turn of an agent. id: equal for equal prompts of a round."""

    id: str
    body: dict[str, Any]
    gap_s: float


Seen = Mapping[str, Answer]
"""The answers of a round by the step's id."""


def measure(
    sessions: Sequence[Session], rounds: int, agents: int = 12, turns: int = 8
) -> dict[str, Any]:
    """Starts both engines and plays so many rounds, each with other sessions.

    agents: how many at once. turns: of each, at most.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    engines = Engines(local_model("tiny"))
    usable = short_enough(sessions)
    precondition(len(usable) >= agents, "there are sessions that are short enough")
    with engines.serving({"stock": STOCK, "ours": OURS}, *_FLAGS) as nodes:
        return asyncio.run(_rounds(nodes, usable, rounds, agents, turns))


async def _rounds(
    nodes: Mapping[str, Node],
    usable: Sequence[Conversation],
    rounds: int,
    agents: int,
    turns: int,
) -> dict[str, Any]:
    pool = pool_tokens(nodes["stock"])
    seen: dict[str, list[Seen]] = {name: [] for name in nodes}
    wrong = 0
    for number in range(rounds):
        chance = random.Random(number)
        chosen = chance.sample(usable, agents)
        played = [steps(one, f"{number} {place}", turns) for place, one in enumerate(chosen)]
        for name in rotated(list(nodes), number):
            await asyncio.to_thread(nodes[name].flush)
            seen[name].append(await _play(nodes[name].url, played))
        ours, stock = seen["ours"][-1], seen["stock"][-1]
        require(ours.keys() == stock.keys(), "both arms answer the same turns")
        wrong += sum(ours[id].text != stock[id].text for id in ours)
    needed = statistics.mean(
        sum(_largest(one, name) for name in range(agents)) for one in seen["stock"]
    )
    precondition(needed > pool, "the agents need more than an engine's memory", needed=needed)
    return {
        "rounds": rounds,
        "agents": agents,
        "memory_over_pool": round(needed / pool, 2),
        "answers": sum(map(len, seen["ours"])),
        "wrong_answers": wrong,
        "arms": {name: _figures(found) for name, found in seen.items()},
        "ttft_p90_vs_stock": ratio_spread(
            [_at(one, 0.9) for one in seen["ours"]], [_at(one, 0.9) for one in seen["stock"]]
        ),
    }


def steps(
    conversation: Conversation,
    name: str,
    turns: int,
    *,
    gap_scale: float = _GAP_SCALE,
    most_gap_s: float = _MOST_GAP_S,
) -> list[Step]:
    """The first turns of a conversation as messages, each with what the one before it shares."""
    found: list[Step] = []
    before: list[int] = []
    ends: list[int] = []
    head = max(1, conversation.head_tokens // BLOCK_TOKENS)
    for number, turn in enumerate(conversation.turns[:turns]):
        blocks = [first + place for first, count in turn.runs for place in range(count)]
        common = common_blocks(before, blocks)
        ends = [end for end in ends if end <= common]
        ends = sorted({min(head, len(blocks)), *ends, len(blocks)})
        texts = [
            _text(name if begin else conversation.version, blocks[begin:end], begin)
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
        found.append(
            Step(
                f"{name} {number}",
                _body(texts[0], texts[1:] or ["Go on."]),
                min(turn.think_s * gap_scale, most_gap_s) if number else 0.0,
            )
        )
        before = blocks
    return found


def _body(system: str, messages: Sequence[str]) -> dict[str, Any]:
    mark = {"cache_control": {"type": "ephemeral"}}
    contents: list[dict[str, Any]] = [{"type": "text", "text": text} for text in messages]
    contents[-1] |= mark
    return {
        "model": "bench",
        "system": [{"type": "text", "text": system, **mark}],
        "messages": [{"role": "user", "content": [content]} for content in contents],
        "max_tokens": _ANSWER_TOKENS,
    }


def _text(name: str, blocks: Sequence[int], begin: int) -> str:
    """A word for each block. Blocks of the head are known by their place, as conversations of the
    same version share it; others by their number."""
    salt = sum(name.encode()) % 89
    numbers = blocks if begin else range(len(blocks))
    return f"{name}: {' '.join(f'{number * 7919 + salt:x}'[-3:] for number in numbers)}"


def short_enough(sessions: Sequence[Session]) -> list[Conversation]:
    """People's own conversations that an engine this small can hold."""
    return [one.conversations[0] for one in sessions if _is_usable(one.conversations[0])]


def _is_usable(conversation: Conversation) -> bool:
    turns = conversation.turns
    return len(turns) >= _LEAST_TURNS and all(
        turn.prompt_tokens <= _MOST_BLOCKS * BLOCK_TOKENS for turn in turns[:_LEAST_TURNS]
    )


async def _play(url: str, played: Sequence[Sequence[Step]]) -> Seen:
    """Each agent's turns one after the other, all agents at once."""
    found: dict[str, Answer] = {}
    async with clients() as http:

        async def agent(number: int, own: Sequence[Step]) -> None:
            for step in own:
                await asyncio.sleep(step.gap_s)
                session = {"x-claude-code-session-id": f"session-{number}", "x-api-key": "none"}
                found[step.id] = await ask(http, url, MESSAGES, step.body, session)
                require(found[step.id].is_whole, "each turn is answered", step=step.id)

        await asyncio.gather(*(agent(number, own) for number, own in enumerate(played)))
    return found


def _largest(found: Seen, agent: int) -> int:
    return max(one.prompt_tokens for id, one in found.items() if id.split()[1] == str(agent))


def _at(found: Seen, share: float) -> float:
    return at(sorted(one.ttft_ms / 1000 for one in found.values()), share)


def _figures(rounds: Sequence[Seen]) -> dict[str, Any]:
    return {
        "cached_share": spread([_cached_share(one) for one in rounds]),
        "ttft_p50_s": spread([_at(one, 0.5) for one in rounds]),
        "ttft_p90_s": spread([_at(one, 0.9) for one in rounds]),
    }


def _cached_share(found: Seen) -> float:
    prompt = sum(one.prompt_tokens for one in found.values())
    return sum(one.cached_tokens for one in found.values()) / max(prompt, 1)
