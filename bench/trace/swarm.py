"""A team of coding agents as a trace: who calls, with what, after what; the same for a seed.

    lead  ====#====#====#====          a team: a lead and its MATES, who start as the lead
    mate    ==#==#====#===             goes on; all share tools, instructions and project
    explore    ===                     text. Now and then one sends out explorers, which
    explore    =====                   share a smaller beginning, and waits for them.

Sizes, in tokens, follow what is published of such swarms: tools, instructions and
project text of 32K, 42 calls a session and more, histories that grow by some hundred
a call. The loop is closed: an agent's next call comes a gap after its last answer,
a tool's run or, for a lead, now and then a person's thinking.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import xxhash

from bench.trace.agents import Agent, TraceConfig, Turn

MATES = 4
_FEWEST_TOKENS = 8
# tools, instructions, the project's text
_MAIN = (12_000, 8_000, 12_000)
_EXPLORE = (6_000, 6_000, 4_000)


def make_swarm(config: TraceConfig) -> tuple[Agent, ...]:
    """The agents of a swarm; an agent's number is its place. Equal configurations give equal
    traces."""
    maker = _Maker(config)
    for team in range(max(1, config.sessions // (MATES + 1))):
        maker.team(team)
    return tuple(agent for agent in maker.agents if agent is not None)


class _Maker:
    """Collects the agents; a place is None until its agent is made."""

    def __init__(self, config: TraceConfig) -> None:
        self.agents: list[Agent | None] = []
        self._config = config
        self._random = random.Random(config.seed)

    def team(self, team: int) -> None:
        harness = f"main {self._config.seed} team {team}"
        starts_at = self._random.uniform(0, self._config.ramp_s / self._config.pace)
        lead = self._reserve()
        mates = [self._reserve() for _ in range(MATES)]
        for number in mates:
            self._main_agent(number, "mate", team, harness, None, ())
        self._main_agent(lead, "lead", team, harness, starts_at, tuple(mates))

    def _main_agent(
        self,
        number: int,
        kind: str,
        team: int,
        harness: str,
        starts_at: float | None,
        mates: tuple[int, ...],
    ) -> None:
        session = xxhash.xxh3_128_hexdigest(f"session {self._config.seed} {number}".encode())
        calls = self._config.calls + self._random.randrange(max(1, self._config.calls // 8))
        turns: list[Turn] = []
        explorers: tuple[int, ...] = ()
        for call in range(calls):
            # A mate joins after each of the lead's first calls; explorers go out every 21st.
            starts = (mates[call],) if call < len(mates) else ()
            waits_for = explorers
            explorers = ()
            if call % 21 == 6 and call + 1 < calls:
                explorers = tuple(
                    self._explorer(team, harness, session)
                    for _ in range(self._random.randint(2, 3))
                )
            thinks = kind == "lead" and call % 6 == 4
            tokens = self._size(700) if not call else self._size(300)
            turns.append(
                self._turn(
                    number, call, tokens, 4.0 if thinks else 0.6, starts + explorers, waits_for
                )
            )
        self._put(number, kind, session, harness, f"team {team}", _MAIN, turns, starts_at)

    def _explorer(self, team: int, harness: str, session: str) -> int:
        number = self._reserve()
        calls = self._random.randint(4, 10)
        turns = [self._turn(number, call, self._size(300), 0.4) for call in range(calls)]
        harness, project = f"explore {harness}", f"explorers of {team}"
        self._put(number, "explore", session, harness, project, _EXPLORE, turns)
        return number

    def _turn(
        self,
        number: int,
        call: int,
        tokens: int,
        gap_s: float,
        starts: tuple[int, ...] = (),
        waits_for: tuple[int, ...] = (),
    ) -> Turn:
        gap_s = min(self._random.expovariate(1 / gap_s), 5 * gap_s) / self._config.pace
        tag = f"{self._config.seed} agent {number} call {call}"
        return Turn(tag, tokens, self._size(90), gap_s, starts, waits_for)

    def _size(self, median: int) -> int:
        """A size around a median, with a tail up to some five times of it."""
        factor = min(5.0, self._random.lognormvariate(0, 0.6))
        return max(_FEWEST_TOKENS, int(median * factor * self._config.scale))

    def _reserve(self) -> int:
        """The number of an agent that will be put later."""
        self.agents.append(None)
        return len(self.agents) - 1

    def _put(
        self,
        number: int,
        kind: str,
        session: str,
        harness: str,
        project: str,
        sizes: tuple[int, int, int],
        turns: Sequence[Turn],
        starts_at: float | None = None,
    ) -> None:
        """Adds the agent of a reserved number. `sizes` are unscaled."""
        tools, instructions, own = (max(1, int(size * self._config.scale)) for size in sizes)
        self.agents[number] = Agent(
            number,
            kind,
            session,
            harness,
            f"{self._config.seed} {project}",
            (tools, instructions, own),
            tuple(turns),
            starts_at,
        )
