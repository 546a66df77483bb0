"""A budget for retries: a share of the requests, so that failing workers do not get twice the load.

A token bucket (as in Finagle's retry budget): each request adds `share` of a token, and each
retry takes one. It starts with `reserve` tokens, so that a quiet node may retry, and holds at most
`limit`.
"""


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
