"""A circuit breaker: a worker that keeps failing gets no requests until a trial one succeeds.

    CLOSED --- FAILURES_TO_OPEN failures in a row ---> OPEN
    OPEN ----- its pause is over; one trial goes ----> HALF_OPEN
    HALF_OPEN  the trial succeeds -------------------> CLOSED
    HALF_OPEN  the trial fails ----------------------> OPEN, with twice the pause

(Nygard, Release It!, 2007.) A client's own mistake is no failure of the worker.
"""

from __future__ import annotations

from enum import StrEnum

FAILURES_TO_OPEN = 5
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class State(StrEnum):
    """Where a breaker stands."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """One worker's breaker. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.state = State.CLOSED
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._retry_at_s = 0.0
        self._trial_ends_s = 0.0

    def allows(self, now_s: float) -> bool:
        """Whether a request may go to the worker now. Does not change anything."""
        if self.state is State.CLOSED:
            return True
        if self.state is State.OPEN:
            return now_s >= self._retry_at_s
        return now_s >= self._trial_ends_s

    def sent(self, now_s: float) -> None:
        """A request was sent: if the breaker is not closed, it is the trial.

        A trial whose end nobody reports stops counting after the longest pause.
        """
        if self.state is not State.CLOSED:
            self.state = State.HALF_OPEN
            self._trial_ends_s = now_s + LONGEST_PAUSE_S

    def succeeded(self) -> None:
        """A request came back."""
        self.state = State.CLOSED
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S

    def failed(self, now_s: float) -> None:
        """A request failed for the worker's sake."""
        self._failures += 1
        if self.state is State.HALF_OPEN:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        elif self.state is State.OPEN or self._failures < FAILURES_TO_OPEN:
            return
        self.state = State.OPEN
        self._retry_at_s = now_s + self._pause_s

    def abandoned(self) -> None:
        """The client left before the request showed anything: a trial may be made again."""
        if self.state is State.HALF_OPEN:
            self._trial_ends_s = 0.0
