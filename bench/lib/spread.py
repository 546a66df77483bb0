"""How far the rounds of a bench lie apart: the shape that all benches report it in.

    {"median": 1.31, "min": 1.12, "max": 1.52, "rounds": 5}

A ratio has one more key, `crosses_1`: true if 1 lies between the smallest and the largest of its
rounds, so that they do not show which side is better.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NotRequired, TypedDict


class Spread(TypedDict):
    """The values of all rounds in short."""

    median: float
    min: float
    max: float
    rounds: int
    crosses_1: NotRequired[bool]


def spread(values: Sequence[float], digits: int = 3) -> Spread:
    """The spread of one value a round. There must be at least one."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "rounds": len(values),
    }


def ratio_spread(ones: Sequence[float], others: Sequence[float], digits: int = 3) -> Spread:
    """The spread of one / other, each pair of the same round."""
    ratios = [one / other for one, other in zip(ones, others, strict=True)]
    return {**spread(ratios, digits), "crosses_1": min(ratios) <= 1 <= max(ratios)}


def at(ordered: Sequence[float], share: float) -> float:
    """The value at this share of values in order. There must be at least one."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def percentiles_ms(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile of times in milliseconds. There must be at least one."""
    two = [*values, *values] if len(values) == 1 else values
    cuts = statistics.quantiles(two, n=100, method="inclusive")
    return {f"{name}_p50_ms": round(cuts[49], 1), f"{name}_p99_ms": round(cuts[98], 1)}
