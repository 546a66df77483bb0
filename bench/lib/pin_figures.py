"""The figures of a run of bench/pin_flood."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.lib.pin_load import Answer, Flooded
from bench.lib.script import require

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
    probes: TTFTs in milliseconds.
    """

    turns: list[Answer] = field(default_factory=list)
    late: Answer = field(default_factory=Answer)
    parts: list[Part] = field(default_factory=list)
    price: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    aborted: int = 0
    retracted: int = 0


def left_by(turns: Sequence[Answer]) -> list[int]:
    """The tokens that each turn left to the next: those up to its last mark."""
    left = [turn.marked_tokens for turn in turns]
    is_marked = all(turn.marked_tokens >= 0.99 * turn.prompt_tokens for turn in turns)
    require(is_marked, "the last mark is in the last message", turns=list(turns))
    return left


def cached_share(turns: Sequence[Answer], left: Sequence[int]) -> float:
    """The share of the tokens left by a turn that the next one found cached."""
    found = [min(turn.cached_tokens, had) for turn, had in zip(turns[1:], left, strict=False)]
    return sum(found) / sum(left[: len(found)])


def arm_figures(seen: Seen, left: Sequence[int]) -> dict[str, Any]:
    """One arm's figures."""
    floods = [flooded for part in seen.parts for flooded in (part.alone, part.shared)]
    ttfts = [answer.ttft_ms for flooded in floods for answer in flooded.answers if answer.is_whole]
    return {
        "cached_share": round(cached_share(seen.turns, left), 4),
        "cached_share_after_ttl": round(cached_share([seen.turns[-1], seen.late], left[-1:]), 4),
        **spread("ttft", [turn.ttft_ms for turn in seen.turns[1:]]),
        **spread("flood_ttft", ttfts),
        "flood_tokens_per_s": round(statistics.median(part.alone_per_s for part in seen.parts)),
        "aborted": seen.aborted,
        "retracted": seen.retracted,
    }


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile, in milliseconds."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"{name}_p50_ms": round(cuts[49], 1), f"{name}_p99_ms": round(cuts[98], 1)}


def ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios of paired values."""
    pairs = zip(ones, others, strict=True)
    return round(statistics.median(one / other for one, other in pairs), 3)


def waited(probes: Sequence[float], without_pins: Sequence[float]) -> int:
    """How many probes took over 1.5 times as long as their pairs without pins."""
    pairs = zip(probes, without_pins, strict=True)
    return sum(one > _LONGEST_WAIT * other for one, other in pairs)


def comparison(pinned: Seen, unpinned: Seen) -> dict[str, Any]:
    """What the pins cost: ratios of paired values."""

    def alone(seen: Seen) -> list[float]:
        return [part.alone_per_s for part in seen.parts]

    def whole(seen: Seen) -> list[float]:
        return [part.whole_per_s for part in seen.parts]

    return {
        "flood_throughput_ratio": round(statistics.median(pinned.price), 3),
        "flood_throughput_ratios": [round(one, 3) for one in sorted(pinned.price)],
        "flood_throughput_ratio_between_engines": ratio(alone(pinned), alone(unpinned)),
        "flood_throughput_ratio_with_turns": ratio(whole(pinned), whole(unpinned)),
        "probe_ttft_ms": [round(value, 1) for value in pinned.probes],
        "probe_ttft_ratio": ratio(pinned.probes, unpinned.probes),
        "waited_on_pin": waited(pinned.probes, unpinned.probes),
    }
