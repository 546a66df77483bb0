"""Reads a trace in Mooncake's format, one JSON object a line, the earliest first:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in ms. Each id names a block of 512 tokens, the last of a prompt may be shorter;
prompts with the same ids at their beginning share it. The format is that of the FAST '25 trace
(kvcache-ai/Mooncake); Dynamo and aiperf read it, too. Qwen-Bailian's traces add `chat_id` and
`parent_chat_id`: the requests of a chat are one session.

The loop is open: a request is sent at its time, whether others were answered or not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from bench.trace.agents import TRACE_BLOCK_TOKENS, Agent, TraceConfig, Turn


class Record(NamedTuple):
    """One line. chat: of its conversation; None where a trace names none."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    chat: str | None = None


def read_trace(config: TraceConfig) -> tuple[Agent, ...]:
    """Each request as an agent with one turn. At most `config.sessions` conversations; `scale`
    shortens every prompt at its end, and `pace` divides the times.

    Raises ValueError, naming file and line, if the file is no such trace.
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
    return tuple(agents)


def read_records(path: Path) -> Iterator[Record]:
    """The lines of a trace. Raises ValueError, naming file and line."""
    roots: dict[str, str] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield _record(json.loads(line), roots)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: {error!r}") from None


def _record(line: dict[str, Any], roots: dict[str, str]) -> Record:
    blocks = tuple(map(int, line["hash_ids"]))
    tokens, output_tokens = int(line["input_length"]), int(line["output_length"])
    needed = -(-tokens // TRACE_BLOCK_TOKENS)
    if tokens < 1 or output_tokens < 0 or len(blocks) != needed:
        raise ValueError(f"{tokens} tokens need {needed} hash_ids, and there are {len(blocks)}")
    chat = None
    if (own := line.get("chat_id")) is not None:
        # Ids are of requests; -1 says that there is no parent.
        chat = roots.get(str(line.get("parent_chat_id")), str(own))
        roots[str(own)] = chat
    return Record(float(line["timestamp"]) / 1e3, tokens, output_tokens, blocks, chat)


def _agent(number: int, record: Record, chat: str, starts_at: float, config: TraceConfig) -> Agent:
    tokens = max(1, int(record.input_tokens * config.scale))
    blocks = record.blocks[: -(-tokens // TRACE_BLOCK_TOKENS)]
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
        (Turn(tag, tokens, answer_tokens, 0.0, blocks=blocks),),
        starts_at,
    )
