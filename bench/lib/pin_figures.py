"""The figures of a run of bench/pin_flood."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.lib.pin_load import Answer, Flooded
from bench.lib.script import require
from bench.lib.spread import percentiles_ms, ratio_spread, spread

_LONGEST_WAIT = 1.5


@dataclass
class Part:
    """One arm's share of a round: a flood alone, then a flood with a turn in it."""

    alone: Flooded
    shared: Flooded
    span_s: float

    @property
    def alone_per_s(self) -> float:
        """Tokens of the flood that was alone, a second."""
        return self.alone.tokens / self.alone.span_s

    @property
    def whole_per_s(self) -> float:
        """Tokens of both floods a second, the turn's time included."""
        return (self.alone.tokens + self.shared.tokens) / self.span_s


@dataclass
class Seen:
    """What one arm measured.

    turns: the conversation's, up to the last under the flood; `late` is the turn after its TTL.
    price: the rate of a flood beside pins over that of one without, pair by pair.
    probes: TTFTs in milliseconds. evicted: tokens, while turns were sent under the flood.
    """

    turns: list[Answer] = field(default_factory=list)
    late: Answer = field(default_factory=Answer)
    parts: list[Part] = field(default_factory=list)
    price: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    aborted: int = 0
    retracted: int = 0
    evicted: int = 0


def left_by(turns: Sequence[Answer]) -> list[int]:
    """The tokens that each turn left to the next: those up to its last mark."""
    left = [turn.marked_tokens for turn in turns]
    is_marked = all(turn.marked_tokens >= 0.99 * turn.prompt_tokens for turn in turns)
    require(is_marked, "the last mark is in the last message", turns=list(turns))
    return left


def shares_by_turn(turns: Sequence[Answer], left: Sequence[int]) -> list[float]:
    """The share of the tokens left by a turn that the next one found cached, from turn 2 on."""
    pairs = zip(turns[1:], left, strict=False)
    return [round(min(turn.cached_tokens, had) / had, 4) for turn, had in pairs]


def by_turn(seen: Mapping[str, Seen], left: Sequence[int]) -> dict[str, Any]:
    """The conversation under pressure, turn by turn: lists, one value for each later turn."""
    return {
        "turn": list(range(2, len(left) + 1)),
        "cached_share": {name: shares_by_turn(arm.turns, left) for name, arm in seen.items()},
        "ttft_ms": {
            name: [round(turn.ttft_ms, 1) for turn in arm.turns[1:]] for name, arm in seen.items()
        },
    }


def cached_share(turns: Sequence[Answer], left: Sequence[int]) -> float:
    """The same of all turns together."""
    found = [min(turn.cached_tokens, had) for turn, had in zip(turns[1:], left, strict=False)]
    return sum(found) / sum(left[: len(found)])


def arm_figures(seen: Seen, left: Sequence[int]) -> dict[str, Any]:
    """One arm's figures."""
    floods = [flooded for part in seen.parts for flooded in (part.alone, part.shared)]
    ttfts = [answer.ttft_ms for flooded in floods for answer in flooded.answers if answer.is_whole]
    return {
        "cached_share": round(cached_share(seen.turns, left), 4),
        "cached_share_after_ttl": round(cached_share([seen.turns[-1], seen.late], left[-1:]), 4),
        **percentiles_ms("ttft", [turn.ttft_ms for turn in seen.turns[1:]]),
        **percentiles_ms("flood_ttft", ttfts),
        "flood_tokens_per_s": spread([part.alone_per_s for part in seen.parts], 0),
        "flood_evicted_tokens": seen.evicted,
        "aborted": seen.aborted,
        "retracted": seen.retracted,
    }


def ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios of paired values."""
    pairs = zip(ones, others, strict=True)
    return round(statistics.median(one / other for one, other in pairs), 3)


def waited(probes: Sequence[float], without_pins: Sequence[float]) -> int:
    """How many probes took over 1.5 times as long as their pairs without pins."""
    pairs = zip(probes, without_pins, strict=True)
    return sum(one > _LONGEST_WAIT * other for one, other in pairs)


def comparison(seen: Mapping[str, Seen]) -> dict[str, Any]:
    """What pins give and cost: ratios of paired values, `pinned` over the other."""

    def alone(arm: Seen) -> list[float]:
        return [part.alone_per_s for part in arm.parts]

    def whole(arm: Seen) -> list[float]:
        return [part.whole_per_s for part in arm.parts]

    def later_ms(arm: Seen) -> list[float]:
        return [turn.ttft_ms for turn in arm.turns[1:]]

    pinned, stock = seen["pinned"], seen["stock"]
    others = {name: arm for name, arm in seen.items() if arm is not pinned}
    return {
        "ttft_ratio": {
            name: ratio_spread(later_ms(pinned), later_ms(arm)) for name, arm in others.items()
        },
        "flood_throughput_ratio": ratio_spread(pinned.price, [1.0] * len(pinned.price)),
        "flood_throughput_ratio_vs_stock": ratio_spread(alone(pinned), alone(stock)),
        "flood_throughput_ratio_with_turns": ratio_spread(whole(pinned), whole(stock)),
        "probe_ttft_ms": [round(value, 1) for value in pinned.probes],
        "probe_ttft_ratio": ratio_spread(pinned.probes, stock.probes),
        "waited_on_pin": waited(pinned.probes, stock.probes),
    }
