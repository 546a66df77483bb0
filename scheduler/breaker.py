"""A circuit breaker: a worker that keeps failing is tested, and gets no requests while it fails.

    CLOSED ---- FAILURES in a row, the last with a response --> SUSPECTED, still takes requests
    SUSPECTED - a trial or a request succeeds ----------------> CLOSED
    CLOSED, SUSPECTED ------ FAILURES, the last without one --> OPEN, takes no requests
    SUSPECTED - a trial fails --------------------------------> OPEN
    OPEN ------ after its pause, a trial succeeds ------------> CLOSED
    OPEN ------ after its pause, a trial fails ---------------> OPEN, with twice the pause

In Nygard's breaker (Release It!, 2007) a client's request is the trial. Here the balancer sends
its own, because a worker may fail only for one client's requests, and that client must not shut
the worker out for others. A worker that breaks connections without a response gets no requests
until a trial, so that it wastes none. A client's own mistake is no failure of the worker.

The budget for retries is a share of the requests, so that failing workers do not get twice the
load: a token bucket (as in Finagle's retry budget): each request adds `share` of a token, and each
retry takes one. It starts with `reserve` tokens, so that a quiet node may retry, and holds at most
`limit`.
"""

from enum import StrEnum

FAILURES = 5
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class State(StrEnum):
    """The state of a breaker."""

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
        """Whether the worker should be tested now."""
        return self.state is State.SUSPECTED or (
            self.state is State.OPEN and now_s >= self._retry_at_s
        )

    def succeeded(self) -> None:
        """A request or a trial succeeded."""
        self.state = State.CLOSED
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S

    def failed(self, now_s: float, *, answered: bool) -> None:
        """A request failed: with an error response (`answered`) or a broken connection."""
        self._failures += 1
        if self._failures < FAILURES or self.state is State.OPEN:
            return
        if answered:
            self.state = State.SUSPECTED
        else:
            self._open(now_s)

    def trial_failed(self, now_s: float) -> None:
        """A trial failed. It is ignored if a request has succeeded since it began."""
        if self.state is State.CLOSED:
            return
        if self.state is State.OPEN:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._open(now_s)

    def _open(self, now_s: float) -> None:
        self.state = State.OPEN
        self._retry_at_s = now_s + self._pause_s


class RetryBudget:
    """The retries that are allowed now."""

    def __init__(self, share: float = 0.2, reserve: int = 10, limit: int = 100) -> None:
        self._share = share
        self._limit = float(limit)
        self._tokens = float(reserve)

    def add_request(self) -> None:
        """Counts a request."""
        self._tokens = min(self._tokens + self._share, self._limit)

    def spend(self) -> bool:
        """Takes one retry from the budget; False if it is empty."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
