"""A sum in which each amount counts less the longer ago it was added."""

import math


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
