"""What makers of traces share: a seeded source of chance, and the list of agents."""

from __future__ import annotations

import random
from collections.abc import Sequence

import xxhash

from bench.trace.agents import Agent, TraceConfig, Turn

_FEWEST_TOKENS = 8


class Maker:
    """Collects the agents of a trace. Equal configurations give equal traces."""

    def __init__(self, config: TraceConfig) -> None:
        self.config = config
        self.random = random.Random(config.seed)
        self._agents: list[Agent | None] = []

    def agents(self) -> tuple[Agent, ...]:
        """All agents; an agent's number is its place."""
        return tuple(agent for agent in self._agents if agent is not None)

    def scaled(self, tokens: float) -> int:
        """A size in tokens at the trace's scale."""
        return max(_FEWEST_TOKENS, int(tokens * self.config.scale))

    def tag(self, number: int, call: int) -> str:
        """What an agent's message is made from."""
        return f"{self.config.seed} {self.config.variant} agent {number} call {call}"

    def session_id(self, number: int) -> str:
        """The id of a session."""
        return xxhash.xxh3_128_hexdigest(f"session {self.config.seed} {number}".encode())

    def reserve(self) -> int:
        """The number of an agent that will be put later."""
        self._agents.append(None)
        return len(self._agents) - 1

    def put(
        self,
        number: int,
        kind: str,
        session: str,
        harness: str | None,
        project: str,
        sizes: tuple[int, int, int],
        turns: Sequence[Turn],
        starts_at: float | None = None,
    ) -> None:
        """Adds the agent of a reserved number. `sizes` are unscaled."""
        tools, instructions, own = (max(1, int(size * self.config.scale)) for size in sizes)
        self._agents[number] = Agent(
            number,
            kind,
            session,
            self._billing_header(number) if self.config.billing_header else None,
            harness,
            f"{self.config.seed} {project}",
            (tools, instructions, own),
            tuple(turns),
            starts_at,
        )

    def _billing_header(self, number: int) -> str:
        mark = xxhash.xxh3_64_hexdigest(f"{self.config.seed} {number}".encode())[:3]
        # A fingerprint of three digits would soon repeat; the number keeps it unique.
        version = f"cc_version=2.1.197.{mark}{number}"
        return f"x-anthropic-billing-header: {version}; cc_entrypoint=sdk-cli;"
