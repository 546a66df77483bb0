"""A swarm of coding agents as a trace: who calls, with what, after what; the same for a seed.

    lead  ====#====#====#====          a team: a lead and its MATES, who start as the lead
    mate    ==#==#====#===             goes on; all share tools, instructions and project
    explore    ===                     text. Now and then one sends out explorers, which
    explore    =====                   share a smaller beginning, and waits for them.

Sizes, in tokens, follow what is published of such swarms: tools, instructions and
project text of 32K, 42 calls a session and more, histories that grow by some hundred
a call. The loop is closed: an agent's next call comes a gap after its last answer,
a tool's run or, for a lead, now and then a person's thinking.

Variants: `team`, every team its own beginning; `one_harness`, all agents share the
first 20K (tools and instructions), the project's text is the team's; `many_harnesses`,
eight such beginnings; `no_sharing`, as many clients, but every request unrelated and
of a new session.
"""

from __future__ import annotations

from bench.trace.agents import Agent, TraceConfig, Turn
from bench.trace.maker import Maker

VARIANTS = ("team", "one_harness", "many_harnesses", "no_sharing")
MATES = 4
_HARNESSES = 8
# tools, instructions, the project's text
_MAIN = (12_000, 8_000, 12_000)
_EXPLORE = (6_000, 6_000, 4_000)


def make_swarm(config: TraceConfig) -> tuple[Agent, ...]:
    """The agents of a swarm; an agent's number is its place."""
    maker = _Maker(config)
    if config.variant == "no_sharing":
        for client in range(config.sessions):
            maker.unrelated(client)
    else:
        for team in range(max(1, config.sessions // (MATES + 1))):
            maker.team(team)
    return maker.agents()


class _Maker(Maker):
    def team(self, team: int) -> None:
        harnesses = {"one_harness": 1, "many_harnesses": _HARNESSES}.get(self.config.variant)
        harness = f"main {self.config.seed} {team % harnesses if harnesses else f'team {team}'}"
        starts_at = self.random.uniform(0, self.config.ramp_s / self.config.pace)
        lead = self.reserve()
        mates = [self.reserve() for _ in range(MATES)]
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
        session = self.session_id(number)
        calls = self.config.calls + self.random.randrange(max(1, self.config.calls // 8))
        turns: list[Turn] = []
        explorers: tuple[int, ...] = ()
        for call in range(calls):
            # A mate joins after each of the lead's first calls; explorers go out every 21st.
            starts = (mates[call],) if call < len(mates) else ()
            waits_for = explorers
            explorers = ()
            if call % 21 == 6 and call + 1 < calls:
                explorers = tuple(
                    self._explorer(team, harness, session) for _ in range(self.random.randint(2, 3))
                )
            thinks = kind == "lead" and call % 6 == 4
            tokens = self._size(700) if not call else self._size(300)
            turns.append(
                self._turn(
                    number, call, tokens, 4.0 if thinks else 0.6, starts + explorers, waits_for
                )
            )
        self.put(number, kind, session, harness, f"team {team}", _MAIN, turns, starts_at)

    def _explorer(self, team: int, harness: str, session: str) -> int:
        number = self.reserve()
        calls = self.random.randint(4, 10)
        turns = [self._turn(number, call, self._size(300), 0.4) for call in range(calls)]
        harness, project = f"explore {harness}", f"explorers of {team}"
        self.put(number, "explore", session, harness, project, _EXPLORE, turns)
        return number

    def unrelated(self, client: int) -> None:
        numbers = [self.reserve() for _ in range(self.config.calls)]
        for place, number in enumerate(numbers):
            starts = tuple(numbers[place + 1 : place + 2])
            turn = self._turn(number, 0, self._size(1500), 1.5, starts)
            starts_at = self.random.uniform(0, 3 / self.config.pace) if not place else None
            session = self.session_id(number)
            self.put(number, "client", session, None, f"client {client}", _MAIN, [turn], starts_at)

    def _turn(
        self,
        number: int,
        call: int,
        tokens: int,
        gap_s: float,
        starts: tuple[int, ...] = (),
        waits_for: tuple[int, ...] = (),
    ) -> Turn:
        gap_s = min(self.random.expovariate(1 / gap_s), 5 * gap_s) / self.config.pace
        return Turn(self.tag(number, call), tokens, self._size(90), gap_s, starts, waits_for)

    def _size(self, median: int) -> int:
        """A size around a median, with a tail up to some five times of it."""
        factor = min(5.0, self.random.lognormvariate(0, 0.6))
        return self.scaled(median * factor)
