"""Recorded sessions on one engine in virtual time: what is read from its cache, and who waits.

Agents run in a closed loop: a request comes as long after the last answer as in the recording. The
first minutes of a run, in which caches fill, do not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.lib.spread import at
from bench.recorded.arms import Arm
from bench.recorded.replay import Replay, replay
from bench.recorded.sessions import BLOCK_TOKENS, Session
from bench.sim.engine import Engine, EngineConfig
from bench.sim.virtual_time import Answer, Run

SPAN_S, WARM_UP_S = 3600.0, 900.0
GAPS_S = (0.0, 60.0, 300.0, 1800.0, 3600.0, float("inf"))
"""Classes of the time between an answer and the next request."""
LONGEST_TOKENS = 400_000
"""Sessions with a longer prompt are left out: a few of them would decide how much fits."""
MET = 0.95
_STREAM_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Level:
    """A service level. first_s: until the first token. tokens_per_s: of a stream after it. A turn
    is within the level if it keeps both."""

    first_s: float
    tokens_per_s: float

    def is_met(self, answer: Answer) -> bool:
        if answer.first_s - answer.sent_s > self.first_s:
            return False
        took_s, tokens = answer.ended_s - answer.first_s, answer.call.output_tokens - 1
        return tokens <= 0 or took_s <= 0 or tokens / took_s >= self.tokens_per_s


def level_of(config: EngineConfig, sessions: Sequence[Session]) -> Level:
    """A first token as soon as an idle engine has computed the mean prompt twice, and a stream of a
    fifth of a lone one's speed."""
    prompts = [t.prompt_tokens for one in sessions for c in one.conversations for t in c.turns]
    lone = 1.0 / (config.decode_base_s + config.decode_per_request_s)
    first_s = 2 * statistics.mean(prompts) / config.prefill_tokens_per_s
    return Level(round(first_s, 2), round(lone * _STREAM_SHARE, 3))


def engine_of(grain: int) -> EngineConfig:
    """The usual engine, whose cache has blocks of so many recorded ones."""
    return EngineConfig(block_tokens=grain * BLOCK_TOKENS)


@dataclass(frozen=True)
class Played:
    """What one run came to.

    answers: without those of its first minutes. counted_s: how long it ran after these. busy: the
    share of the whole run that the mean engine computed prompts.
    """

    replayed: Replay
    answers: tuple[Answer, ...]
    counted_s: float
    busy: float

    def figures(self) -> dict[str, Any]:
        """Cached share, computed tokens, times to the first token, and streams."""
        first_s = sorted(one.first_s - one.sent_s for one in self.answers)
        call_s = [one.ended_s - one.sent_s for one in self.answers]
        output = sum(one.call.output_tokens for one in self.answers)
        return {
            "turns": len(self.answers),
            "cached_share": round(share_of(self.answers), 4),
            "computed_tokens": sum(
                one.call.prompt_tokens - one.cached_tokens for one in self.answers
            ),
            "ttft_p50_s": round(at(first_s, 0.5), 3),
            "ttft_p90_s": round(at(first_s, 0.9), 3),
            "ttft_p99_s": round(at(first_s, 0.99), 3),
            "call_mean_s": round(statistics.mean(call_s), 3),
            "output_tokens_per_s": round(output / self.counted_s, 2),
            "busy": round(self.busy, 3),
        }

    def within(self, level: Level) -> float:
        """The share of turns within a service level."""
        return sum(map(level.is_met, self.answers)) / len(self.answers)

    def by_gap(self) -> dict[str, dict[str, float]]:
        """The cached share of turns by the time before them."""
        classes: dict[str, list[Answer]] = {name: [] for name in map(gap_name, GAPS_S[1:])}
        for one in self.answers:
            gap_s = self.replayed.agents[one.call.agent].turns[one.call.turn].gap_s
            if one.call.turn:
                high = next(high for low, high in pairwise(GAPS_S) if low <= gap_s < high)
                classes[gap_name(high)].append(one)
        return {
            name: {"turns": len(found), "cached_share": round(share_of(found), 4)}
            for name, found in classes.items()
            if found
        }


def gap_name(high_s: float) -> str:
    """How a class of gaps is shown."""
    return "longer" if high_s == float("inf") else f"{high_s / 60:g} min"


def share_of(answers: Sequence[Answer]) -> float:
    """The share of prompt tokens that were read from the cache."""
    prompt = sum(one.call.prompt_tokens for one in answers)
    return sum(one.cached_tokens for one in answers) / prompt if prompt else 0.0


def play(
    arm: Arm,
    sessions: Sequence[Session],
    at_once: int,
    *,
    grain: int,
    seed: int = 1,
    engines: int = 1,
    policy: Callable[[Sequence[Engine], Replay], Any] | None = None,
    span_s: float = SPAN_S,
) -> Played:
    """Plays sessions on engines of an arm. policy: in place of the arm's own. span_s: how long,
    with the first minutes, which do not count."""
    config = arm.engine(engine_of(grain))
    replayed = replay(
        sessions, at_once, grain=grain, seed=seed, longest_tokens=LONGEST_TOKENS, limit_s=span_s
    )
    running = [Engine(config) for _ in range(engines)]
    run = Run(replayed.agents, replayed.calls, (policy or arm.policy)(running, replayed), running)
    run.session_header = True
    run.all(span_s)
    counted = tuple(one for one in run.answers if one.sent_s >= WARM_UP_S)
    busy = statistics.mean(engine.prefill_s for engine in running) / span_s
    return Played(replayed, counted, span_s - WARM_UP_S, busy)
