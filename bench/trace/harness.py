"""People who use the same harness: conversations that share tools and instructions, and no more.

    ==tools, instructions==#===#===#==     a person's conversation
    ==tools, instructions==##==#==#        another person's

Variants: `same_harness`, one harness for all; `eight_harnesses`, each person uses one of eight.
All begin within `ramp_s`, and a call comes some seconds after the last answer.
"""

from __future__ import annotations

from bench.trace.agents import Agent, TraceConfig, Turn
from bench.trace.maker import Maker

_HARNESSES = {"same_harness": 1, "eight_harnesses": 8}
VARIANTS = tuple(_HARNESSES)
# tools, instructions, the text about the environment: all of them the harness's
_SIZES = (12_000, 6_000, 2_000)
_FIRST, _LATER, _ANSWER = 1_500, 600, 150
_GAP_S = 8.0


def make_harness(config: TraceConfig) -> tuple[Agent, ...]:
    """`config.sessions` conversations of about `config.calls` calls."""
    maker = _Maker(config)
    for number in range(config.sessions):
        maker.person(number % _HARNESSES[config.variant])
    return maker.agents()


class _Maker(Maker):
    def person(self, harness: int) -> None:
        number = self.reserve()
        calls = max(1, round(self.config.calls * self.random.uniform(0.7, 1.3)))
        turns = [
            Turn(
                self.tag(number, call),
                self._around(_LATER if call else _FIRST),
                self._around(_ANSWER),
                min(self.random.expovariate(1 / _GAP_S), 5 * _GAP_S) / self.config.pace,
            )
            for call in range(calls)
        ]
        name = f"{self.config.variant} {self.config.seed} {harness}"
        starts_at = self.random.uniform(0, self.config.ramp_s / self.config.pace)
        session = self.session_id(number)
        self.put(number, "person", session, name, name, _SIZES, turns, starts_at)

    def _around(self, median: int) -> int:
        return self.scaled(median * min(5.0, self.random.lognormvariate(0, 0.6)))
