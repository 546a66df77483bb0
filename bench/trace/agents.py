"""What a trace consists of: agents, and the turns of each."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from bench.sim.prompts import text_of

_TOOLS = 16


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """What decides a trace: equal configurations give equal traces.

    sessions: conversations of leads and mates. calls: of a session.
    scale: multiplies all sizes in tokens. pace: divides all gaps. A trace at scale s on engines
        s times as slow keeps its times.
    """

    sessions: int = 120
    calls: int = 42
    scale: float = 1.0
    pace: float = 1.0
    ramp_s: float = 20.0
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Turn:
    """A call: a message of so many tokens, sent `gap_s` after the last answer and after
    the agents in `waits_for` are done; `starts` are agents that begin with its answer."""

    tag: str
    tokens: int
    answer_tokens: int
    gap_s: float
    starts: tuple[int, ...] = ()
    waits_for: tuple[int, ...] = ()

    def text(self) -> str:
        """Its message."""
        return text_of(self.tag, self.tokens)


@dataclass(frozen=True, slots=True)
class Agent:
    """One conversation. `session` is what a client sends as its header: explorers
    send that of the agent who sent them out. `starts_at` is None for a started one."""

    number: int
    kind: str
    session: str
    harness: str | None
    project: str
    sizes: tuple[int, int, int]
    turns: tuple[Turn, ...]
    starts_at: float | None = None

    def tools(self) -> list[dict[str, Any]]:
        return tools_of(self.harness, self.sizes[0]) if self.harness else []

    def system(self) -> list[dict[str, Any]]:
        """The messages that open the conversation."""
        if self.harness is None:
            return []
        instructions = text_of(f"instructions {self.harness}", self.sizes[1])
        project = text_of(f"project {self.project}", self.sizes[2])
        return [{"role": "system", "content": text} for text in (instructions, project)]


@functools.lru_cache(maxsize=256)
def tools_of(harness: str, tokens: int) -> list[dict[str, Any]]:
    """The tools of a harness, of so many tokens together."""
    each = max(1, tokens // _TOOLS - 50)
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{place}",
                "description": text_of(f"tool {place} {harness}", each),
                "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
            },
        }
        for place in range(_TOOLS)
    ]
