"""How much of something one may have in a minute: a bucket that fills as time goes by.

It holds what a minute brings, so whoever asked for nothing for a minute may have a minute's
worth at once. What costs more than a full bucket is let through from a full one, and leaves a
debt: a limit below the size of one request slows it down and does not shut it out. What an
estimate took too much is put back, and what it took too little is owed.

`now_s` is passed in and never runs backwards.
"""

from __future__ import annotations

_MINUTE_S = 60.0


class Bucket:
    """At most `per_minute` in the long run. Full at first."""

    def __init__(self, per_minute: float, now_s: float) -> None:
        if per_minute <= 0:
            raise ValueError(f"per_minute is not positive: {per_minute}")
        self.per_minute = per_minute
        self._level = per_minute
        self._filled_s = now_s

    def wait_s(self, cost: float, now_s: float) -> float:
        """Seconds until so much may be taken, if nobody else takes any; 0: now."""
        self._fill(now_s)
        lacks = min(cost, self.per_minute) - self._level
        return max(lacks, 0.0) / self.per_minute * _MINUTE_S

    def take(self, cost: float, now_s: float) -> None:
        """Takes so much, be it there or not; a negative cost is put back."""
        self._fill(now_s)
        self._level = min(self._level - cost, self.per_minute)

    def resize(self, per_minute: float, now_s: float) -> None:
        """Another limit from now on. What was taken remains taken."""
        self._fill(now_s)
        self._level = min(self._level + per_minute - self.per_minute, per_minute)
        self.per_minute = per_minute

    def _fill(self, now_s: float) -> None:
        brought = (now_s - self._filled_s) / _MINUTE_S * self.per_minute
        self._level = min(self._level + brought, self.per_minute)
        self._filled_s = now_s
