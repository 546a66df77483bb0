"""Which worker each live session is on.

A session is a conversation whose turns want the same worker. It is live until
`live_s` after its last request. How many tokens the live ones of a worker have,
the prompts of their last requests together, tells what work will come there and
what memory it will want, even while all of them run a tool or wait for a person.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple


class _Seen(NamedTuple):
    worker: int
    tokens: int
    at_s: float


class Sessions:
    """Live sessions, at most `limit`: beyond it the longest silent one is forgotten first."""

    def __init__(self, live_s: float, limit: int = 100_000) -> None:
        self._live_s = live_s
        self._limit = limit
        self._seen: OrderedDict[int, _Seen] = OrderedDict()
        self._tokens: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._seen)

    def home(self, session: int) -> tuple[int, int] | None:
        """The worker of a live session, and how many tokens its last prompt had."""
        found = self._seen.get(session)
        return None if found is None else (found.worker, found.tokens)

    def live_tokens(self, worker: int) -> int:
        """How long the live sessions of a worker are, all together."""
        return self._tokens[worker]

    def seen(self, session: int, worker: int, tokens: int, now_s: float) -> None:
        """A request of the session, `tokens` long, went to `worker`."""
        self.end(session)
        self._seen[session] = _Seen(worker, tokens, now_s)
        self._tokens[worker] += tokens
        if len(self._seen) > self._limit:
            self.end(next(iter(self._seen)))

    def end(self, session: int) -> None:
        """The session is over."""
        found = self._seen.pop(session, None)
        if found is not None:
            self._tokens[found.worker] -= found.tokens

    def expire(self, now_s: float) -> None:
        """Forgets the sessions that have been silent for too long."""
        while self._seen:
            session, seen = next(iter(self._seen.items()))
            if now_s - seen.at_s < self._live_s:
                break
            self.end(session)

    def forget_worker(self, worker: int) -> None:
        """The worker is gone; its sessions are free to go anywhere."""
        for session in [key for key, seen in self._seen.items() if seen.worker == worker]:
            self.end(session)

    def check(self) -> None:
        """Asserts that the sums are those of the table."""
        sums: Counter[int] = Counter()
        for seen in self._seen.values():
            sums[seen.worker] += seen.tokens
        assert +sums == +self._tokens
