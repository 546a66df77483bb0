"""A budget for retries: a share of the requests, so that a failing node is not sent twice the load.

A token bucket that every request fills by `share` of a token and every retry
empties by one (as in Finagle's retry budget); `reserve` tokens are there from
the start and at most kept, so that a quiet node may still retry.
"""

from __future__ import annotations


class RetryBudget:
    """How many retries are allowed now."""

    def __init__(self, share: float = 0.2, reserve: int = 10, most: int = 100) -> None:
        self._share = share
        self._most = float(most)
        self._tokens = float(reserve)

    def requested(self) -> None:
        """A request came in."""
        self._tokens = min(self._tokens + self._share, self._most)

    def spend(self) -> bool:
        """Takes a retry from the budget; False if there is none."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
