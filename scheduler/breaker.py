"""A circuit breaker: a worker that keeps failing is tried, and gets no requests if it is not well.

    CLOSED ---- FAILURES in a row, the last an answer ---> SUSPECTED, still takes requests
    SUSPECTED - a trial, or a request, comes back -------> CLOSED
    CLOSED, SUSPECTED ------ the last without an answer -> OPEN, takes none
    SUSPECTED - a trial fails ---------------------------> OPEN
    OPEN ------ its pause is over; a trial comes back ---> CLOSED
    OPEN ------ its pause is over; a trial fails --------> OPEN, with twice the pause

(After Nygard, Release It!, 2007, where a trial is a client's request.) Here it is one of our own:
a worker may say that it failed for the sake of one client's requests, who must not shut it out
for others. Who says nothing, but breaks off, is kept from wasting requests at once. A client's
own mistake is no failure of the worker.
"""

from __future__ import annotations

from enum import StrEnum

FAILURES = 5
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class State(StrEnum):
    """Where a breaker stands."""

    CLOSED = "closed"
    SUSPECTED = "suspected"
    OPEN = "open"


class Breaker:
    """One worker's breaker. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.state = State.CLOSED
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._retry_at_s = 0.0

    @property
    def takes_requests(self) -> bool:
        """Whether a request may go to the worker."""
        return self.state is not State.OPEN

    def wants_trial(self, now_s: float) -> bool:
        """Whether to find out now if the worker is well."""
        return self.state is State.SUSPECTED or (
            self.state is State.OPEN and now_s >= self._retry_at_s
        )

    def succeeded(self) -> None:
        """A request came back, or a trial."""
        self.state = State.CLOSED
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S

    def failed(self, now_s: float, *, answered: bool) -> None:
        """A request failed at the worker, which said so or broke off."""
        self._failures += 1
        if self._failures < FAILURES or self.state is State.OPEN:
            return
        if answered:
            self.state = State.SUSPECTED
        else:
            self._open(now_s)

    def trial_failed(self, now_s: float) -> None:
        """A trial showed that the worker is not well; no matter if a request came back since."""
        if self.state is State.CLOSED:
            return
        if self.state is State.OPEN:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._open(now_s)

    def _open(self, now_s: float) -> None:
        self.state = State.OPEN
        self._retry_at_s = now_s + self._pause_s
