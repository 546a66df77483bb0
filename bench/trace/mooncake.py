"""Reads and writes traces in Mooncake's format, one JSON object a line, the earliest first:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in ms. Each id names a block of 512 tokens, the last of a prompt may be shorter;
prompts with the same ids at their beginning share it. The format is that of the FAST '25 trace
(kvcache-ai/Mooncake); Dynamo and aiperf read it, too. Qwen-Bailian's traces add `chat_id` and
`parent_chat_id`: the requests of a chat are one session. Other fields are ignored.

The loop is open: a request is sent at its time, whether others were answered or not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from bench.trace.agents import TRACE_BLOCK_TOKENS, Agent, TraceConfig, Turn

_FEWEST_BLOCK_TOKENS = 2  # so that the texts of two blocks differ


class Record(NamedTuple):
    """One line. chat: of its conversation; None where a trace names none."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    chat: str | None = None


def read_trace(config: TraceConfig) -> tuple[Agent, ...]:
    """Each request as an agent with one turn. At most `config.sessions` conversations; `scale`
    changes the size of every block, and `pace` divides the times.

    Raises ValueError, naming file, line and field, if the file is no such trace.
    """
    if config.file is None:
        raise ValueError("file: a trace of the variant 'mooncake' needs one")
    agents: list[Agent] = []
    chats: set[str] = set()
    begins_s: float | None = None
    for record in read_records(Path(config.file)):
        chat = record.chat or f"request {len(agents)}"
        if chat not in chats and len(chats) >= config.sessions:
            continue
        chats.add(chat)
        begins_s = record.at_s if begins_s is None else begins_s
        starts_at = (record.at_s - begins_s) / config.pace
        agents.append(_agent(len(agents), record, chat, starts_at, config))
    if not agents:
        raise ValueError(f"{config.file}: holds no requests")
    return tuple(agents)


def read_records(path: Path) -> Iterator[Record]:
    """The lines of a trace. Raises ValueError, naming file, line and field."""
    roots: dict[str, str] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield _record(json.loads(line), roots)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: {error}") from None


def lines_of(records: Iterable[Record]) -> Iterator[str]:
    """The lines of a trace, each with its end. Reading them gives equal records."""
    last_of_chat: dict[str, int] = {}
    for number, record in enumerate(records):
        line: dict[str, Any] = {
            "timestamp": round(record.at_s * 1000),
            "input_length": record.input_tokens,
            "output_length": record.output_tokens,
            "hash_ids": record.blocks,
        }
        if record.chat is not None:
            line["chat_id"] = number
            line["parent_chat_id"] = last_of_chat.get(record.chat, -1)
            last_of_chat[record.chat] = number
        yield json.dumps(line) + "\n"


def _record(line: object, roots: dict[str, str]) -> Record:
    if not isinstance(line, dict):
        raise ValueError("a line is a JSON object")
    at_ms = line.get("timestamp")
    if not isinstance(at_ms, int | float) or isinstance(at_ms, bool) or not _is_time(at_ms):
        raise ValueError(f"timestamp: {_shown(at_ms)} is no time in ms")
    tokens, output_tokens = _count(line, "input_length", 1), _count(line, "output_length", 0)
    blocks = line.get("hash_ids")
    if not isinstance(blocks, list) or any(type(block) is not int for block in blocks):
        raise ValueError(f"hash_ids: {_shown(blocks)} is no list of integers")
    needed = -(-tokens // TRACE_BLOCK_TOKENS)
    if len(blocks) != needed:
        raise ValueError(
            f"hash_ids: {tokens} tokens need {needed} ids, and there are {len(blocks)}"
        )
    chat = None
    if (own := line.get("chat_id")) is not None:
        # Ids are of requests; -1 says that there is no parent.
        chat = roots.get(str(line.get("parent_chat_id")), str(own))
        roots[str(own)] = chat
    return Record(at_ms / 1000, tokens, output_tokens, tuple(blocks), chat)


def _is_time(at_ms: float) -> bool:
    try:
        return math.isfinite(at_ms)
    except OverflowError:
        return False


def _count(line: dict[str, Any], field: str, least: int) -> int:
    count = line.get(field)
    if type(count) is not int or count < least:
        raise ValueError(f"{field}: {_shown(count)} is no integer from {least}")
    return count


def _shown(value: object) -> str:
    return repr(value)[:80]


def _agent(number: int, record: Record, chat: str, starts_at: float, config: TraceConfig) -> Agent:
    block_tokens = max(_FEWEST_BLOCK_TOKENS, round(TRACE_BLOCK_TOKENS * config.scale))
    whole = len(record.blocks) - 1
    rest = round((record.input_tokens - whole * TRACE_BLOCK_TOKENS) * config.scale)
    tokens = whole * block_tokens + max(1, min(rest, block_tokens))
    answer_tokens = max(1, int(record.output_tokens * config.scale))
    tag = f"{config.seed} mooncake request {number}"
    return Agent(
        number,
        "request",
        xxhash.xxh3_128_hexdigest(f"{config.seed} {chat}".encode()),
        None,
        None,
        "",
        (1, 1, 1),
        (Turn(tag, tokens, answer_tokens, 0.0, blocks=record.blocks, block_tokens=block_tokens),),
        starts_at,
    )
