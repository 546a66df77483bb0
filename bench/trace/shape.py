"""The shape of a trace, in the terms in which shapes of coding agents are published."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from bench.trace.agents import Agent
from bench.trace.calls import Call, ideal_of
from bench.trace.mooncake import Record
from bench.trace.recording import ideal_share

_SUBAGENTS = ("explore", "subagent")


@dataclass(frozen=True)
class Shape:
    """Medians are of sessions' own calls, without those of sub-agents, and of all calls' tokens.

    subagent_share: of the sessions; None where a trace does not say which calls are sub-agents'.
    ideal_read_share: of prompt tokens, by a cache without bounds that holds answers, too.
    ideal_read_share_recorded: the same of the records, which do not name the answers' blocks.
    """

    sessions: int
    calls: int
    calls_per_session_p50: float
    prompt_tokens_p50: float
    answer_tokens_p50: float
    subagent_share: float | None
    ideal_read_share: float
    ideal_read_share_recorded: float
    span_s: float


def shape_of(
    agents: Sequence[Agent], calls: Sequence[Sequence[Call]], records: Sequence[Record]
) -> Shape:
    """`calls` are `compile_calls(agents)`, and `records` `records_of` both."""
    own: dict[str, int] = defaultdict(int)
    has_subagents: dict[str, bool] = defaultdict(bool)
    for agent in agents:
        is_subagent = agent.kind in _SUBAGENTS
        own[agent.session] += 0 if is_subagent else len(agent.turns)
        has_subagents[agent.session] |= is_subagent
    is_recorded = any(agent.kind == "request" for agent in agents)
    share = None if is_recorded else round(statistics.mean(has_subagents.values()), 3)
    return Shape(
        sessions=len(own),
        calls=len(records),
        calls_per_session_p50=statistics.median(own.values()),
        prompt_tokens_p50=statistics.median(record.input_tokens for record in records),
        answer_tokens_p50=statistics.median(record.output_tokens for record in records),
        subagent_share=share,
        ideal_read_share=round(ideal_of(agents, calls).cached_ratio, 4),
        ideal_read_share_recorded=round(ideal_share(records), 4),
        span_s=round(records[-1].at_s - records[0].at_s, 1),
    )
