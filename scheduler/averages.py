"""Averages: a sum in which amounts count less with time, and a median of weighted values."""

import math
from collections.abc import Iterable


class DecayingSum:
    """An amount's weight falls by a factor of e every `span_s` seconds."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._sum = 0.0
        self._at_s = 0.0

    def add(self, amount: float, now_s: float) -> None:
        """Adds an amount."""
        self._sum = self.at(now_s) + amount
        self._at_s = now_s

    def at(self, now_s: float) -> float:
        """The sum at a time."""
        if now_s <= self._at_s:
            return self._sum
        return self._sum * math.exp((self._at_s - now_s) / self._span_s)


def weighted_median(weighted: Iterable[tuple[float, float]]) -> float:
    """The least value that, with all below it, has half of the weight; 0 without values.

    weighted: each value and its weight.
    """
    ascending = sorted(weighted)
    half, so_far = sum(weight for _, weight in ascending) / 2, 0.0
    for value, weight in ascending:
        so_far += weight
        if so_far >= half:
            return value
    return 0.0
