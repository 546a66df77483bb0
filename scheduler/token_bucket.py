"""A token bucket for limits per minute.

It holds what a minute adds, so a caller that took nothing for a minute may take a minute's worth
at once. A cost above a full bucket is allowed when the bucket is full, and leaves a debt: a limit
below the size of one request slows requests down and does not shut them out. A caller corrects an
estimate with `take`: a negative cost puts tokens back.

`now_s` is passed in and must not decrease.
"""

_MINUTE_S = 60.0


class Bucket:
    """Allows `per_minute`, which is above 0, in the long run. It starts full."""

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._filled_s = now_s

    def wait_s(self, cost: float, now_s: float) -> float:
        """Seconds until `cost` may be taken if nothing else is; 0: now."""
        self._fill(now_s)
        lacks = min(cost, self.per_minute) - self._level
        return max(lacks, 0.0) / self.per_minute * _MINUTE_S

    def level(self, now_s: float) -> float:
        """What may be taken at once; below 0: a debt."""
        self._fill(now_s)
        return self._level

    def take(self, cost: float, now_s: float) -> None:
        """Takes `cost` whether or not it is there; a negative cost is put back."""
        self._fill(now_s)
        self._level = min(self._level - cost, self.per_minute)

    def resize(self, per_minute: float, now_s: float) -> None:
        """Changes the limit. What was taken stays taken."""
        self._fill(now_s)
        self._level = min(self._level + per_minute - self.per_minute, per_minute)
        self.per_minute = per_minute

    def _fill(self, now_s: float) -> None:
        added = (now_s - self._filled_s) / _MINUTE_S * self.per_minute
        self._level = min(self._level + added, self.per_minute)
        self._filled_s = now_s
