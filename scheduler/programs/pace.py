"""How fast a worker computes prompts, and how much of its time that takes.

A worker reports totals since its start, so a lost report changes nothing.
"""

from scheduler.decaying_sum import DecayingSum

SPAN_S = 10.0
_SPEED_SPAN_S = 120.0
_LEAST_S = 0.05
"""Of less prefill the speed is not known."""


class PrefillPace:
    """Of one worker."""

    def __init__(self) -> None:
        self._totals: tuple[int, int] | None = None
        self._busy_s = DecayingSum(SPAN_S)
        self._tokens, self._tokens_s = DecayingSum(_SPEED_SPAN_S), DecayingSum(_SPEED_SPAN_S)
        self.tokens_per_s = 0.0

    def report(self, tokens: int, busy_ms: int, now_s: float) -> None:
        """Takes over the totals: tokens that were computed, and what that took."""
        before, self._totals = self._totals, (tokens, busy_ms)
        if before is None or tokens < before[0] or busy_ms < before[1]:
            return  # it has just been started
        took_s = (busy_ms - before[1]) / 1000
        self._busy_s.add(took_s, now_s)
        self._tokens.add(tokens - before[0], now_s)
        self._tokens_s.add(took_s, now_s)
        if (seconds := self._tokens_s.at(now_s)) >= _LEAST_S:
            self.tokens_per_s = self._tokens.at(now_s) / seconds

    def share(self, now_s: float) -> float:
        """The share of the last seconds that went into prefill."""
        return min(self._busy_s.at(now_s) / SPAN_S, 1.0)

    def seconds_of(self, tokens: float) -> float:
        """How long it takes to compute so many tokens; 0 if that is not known."""
        return tokens / self.tokens_per_s if self.tokens_per_s > 0 else 0.0
