"""Recorded sessions of Claude Code: what each request read, wrote, and waited for.

A file has one session a line, as JSON, compressed with gzip or not. The corpus is the folder
`traces/` of the public repository callanjfox/kv-cache-tester (Apache-2.0), whose lists of block
hashes are here runs `[first, count]` of consecutive numbers. A block has 64 tokens, and equal
numbers are equal blocks within one session.

Sessions whose number can be divided by JUDGED are for judging: nothing is chosen by them.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 64
JUDGED = 5
PLACES = (
    Path("../shared/traces/claude-code-sessions.jsonl.gz"),
    Path(".models/claude-code-sessions.jsonl.gz"),
)
"""Where the file is looked for."""

Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Turn:
    """A request. runs: the blocks of its prompt. think_s: how long nothing ran at the server before
    it. starts: conversations of sub-agents that begin before it, and that it waits for."""

    prompt_tokens: int
    answer_tokens: int
    runs: tuple[Run, ...]
    think_s: float
    starts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow one another. head_tokens: tools and instructions, which conversations of
    equal `version` share."""

    version: str
    head_tokens: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Session:
    """A person's session: the first conversation is its own, the others are sub-agents'."""

    number: int
    conversations: tuple[Conversation, ...]

    @property
    def is_judging(self) -> bool:
        return self.number % JUDGED == 0


def find_file(given: Path | None = None) -> Path | None:
    """The file of recorded sessions; None if this machine has none.

    Raises FileNotFoundError for a given path that does not exist.
    """
    if given is not None:
        if not given.is_file():
            raise FileNotFoundError(f"--sessions: {given} is no file")
        return given
    return next((path for path in PLACES if path.is_file()), None)


def read_sessions(path: Path) -> list[Session]:
    """All sessions of a file. Raises ValueError, naming file, line and field."""
    opened = gzip.open if path.suffix == ".gz" else open
    found = []
    with opened(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                found.append(_session(number, json.loads(line)))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: {error!r}") from None
    return found


def _session(number: int, line: dict[str, Any]) -> Session:
    if line["block_size"] != BLOCK_TOKENS:
        raise ValueError(f"block_size: {line['block_size']!r} is not {BLOCK_TOKENS}")
    found: list[Conversation] = []
    _read(line, found)
    return Session(number, tuple(found))


def _read(line: dict[str, Any], found: list[Conversation]) -> None:
    """Appends a conversation, then those of its sub-agents."""
    place = len(found)
    tools, system = int(line["tool_tokens"]), int(line["system_tokens"])
    version = f"{tools} {system} {line['models'][0]}"
    found.append(Conversation(version, tools + system, ()))
    turns: list[Turn] = []
    starts: list[int] = []
    ended_s = 0.0
    for request in line["requests"]:
        if request["type"] == "subagent":
            starts.append(len(found))
            _read(request, found)
            continue
        at_s = float(request["t"])
        think_s = request.get("think_time")
        gap_s = max(0.0, at_s - ended_s) if think_s is None else float(think_s)
        if not math.isfinite(gap_s) or gap_s < 0:
            raise ValueError(f"think_time: {think_s!r} is no time")
        ended_s = at_s + float(request.get("api_time") or 0.0)
        prompt_tokens = int(request["in"])
        runs = tuple((int(first), int(count)) for first, count in request["runs"])
        blocks = sum(count for _, count in runs)
        if not prompt_tokens > 0 or blocks > -(-prompt_tokens // BLOCK_TOKENS):
            raise ValueError(f"runs: {blocks} blocks for a prompt of {prompt_tokens} tokens")
        turn = Turn(prompt_tokens, max(1, int(request["out"])), runs, gap_s, tuple(starts))
        turns.append(turn)
        starts = []
    found[place] = Conversation(version, tools + system, tuple(turns))


# What was counted in the recorded sessions: quantiles at 0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.
_AT = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_TURNS = (3, 7, 18, 45, 94, 156, 330, 514)
_ANSWERS = (1, 105, 137, 216, 429, 899, 3_663, 18_195)
_GAPS_S = (0.0, 4.0, 6.0, 10.0, 34.0, 170.0, 3_039.0, 77_589.0)
_GROWTH = (6, 192, 331, 655, 1_551, 3_541, 16_439, 60_000)
_FIRST = (15_000, 15_459, 18_587, 24_522, 104_189, 160_000, 180_000, 190_000)
_VERSIONS = 40
_LONGEST = 200_000
_REWRITTEN = 0.018
_WITH_SUBAGENT = 0.06


def made_sessions(count: int, seed: int = 1) -> list[Session]:
    """Sessions made by chance in the recorded sessions' measured shape, for machines without the
    file. Equal arguments give equal sessions."""
    chance = random.Random(seed)
    return [_made(chance, number) for number in range(1, count + 1)]


def _made(chance: random.Random, number: int) -> Session:
    blocks = iter(range(1, 1 << 60))
    own = _made_turns(chance, blocks, round(_draw(chance, _TURNS)))
    conversations = [_made_conversation(chance, own)]
    if chance.random() < _WITH_SUBAGENT and len(own) > 2:
        conversations.append(_made_conversation(chance, _made_turns(chance, blocks, 8)))
        place = chance.randrange(1, len(own))
        waiting = own[place]
        own[place] = Turn(
            waiting.prompt_tokens, waiting.answer_tokens, waiting.runs, waiting.think_s, (1,)
        )
        conversations[0] = Conversation(
            conversations[0].version, conversations[0].head_tokens, tuple(own)
        )
    return Session(number, tuple(conversations))


def _made_conversation(chance: random.Random, turns: Sequence[Turn]) -> Conversation:
    version = min(int(chance.expovariate(1 / 8)), _VERSIONS)
    return Conversation(f"made {version}", 14_000 + 50 * version, tuple(turns))


def _made_turns(chance: random.Random, blocks: Iterator[int], count: int) -> list[Turn]:
    prompt: list[int] = []
    turns: list[Turn] = []
    tokens = _draw(chance, _FIRST)
    for place in range(count):
        if place:
            tokens += _draw(chance, _GROWTH)
        if tokens > _LONGEST or (place and chance.random() < _REWRITTEN):
            kept = min(len(prompt), int(14_000 / BLOCK_TOKENS))
            prompt, tokens = prompt[:kept], min(tokens, 40_000.0)
        size = int(tokens)
        # A prompt's last block is not full, and is another one in the next prompt.
        del prompt[max(0, size // BLOCK_TOKENS) :]
        prompt += [next(blocks) for _ in range(size // BLOCK_TOKENS - len(prompt))]
        gap_s = _draw(chance, _GAPS_S) if place else 0.0
        turns.append(
            Turn(max(1, size), round(_draw(chance, _ANSWERS)), tuple(runs_of(prompt)), gap_s)
        )
    return turns


def _draw(chance: random.Random, quantiles: Sequence[float]) -> float:
    share = chance.random()
    for place in range(len(_AT) - 1):
        low, high = _AT[place], _AT[place + 1]
        if share <= high:
            part = (share - low) / (high - low)
            return quantiles[place] + part * (quantiles[place + 1] - quantiles[place])
    return quantiles[-1]


def runs_of(blocks: Iterable[int]) -> Iterator[Run]:
    """Consecutive numbers as runs."""
    first, count = 0, 0
    for block in blocks:
        if count and block == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = block, 1
    if count:
        yield first, count
