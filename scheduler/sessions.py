"""The worker of each live session.

A session is a conversation whose turns should go to the same worker. It is live until `live_s`
after its last request. The tokens of a worker's live sessions, which are the prompts of their last
requests, predict the work and the memory that it will need, even while all of these sessions run
tools or wait for a person.
"""

from collections import Counter, OrderedDict

import msgspec


class _Request(msgspec.Struct, frozen=True, gc=False):
    worker: int
    tokens: int
    sent_s: float


class Sessions:
    """Live sessions, at most `limit`: beyond it the one that is silent for longest is forgotten.

    tokens: the tokens of each worker's live sessions. all_tokens: those of all workers.
    """

    def __init__(self, live_s: float, limit: int = 100_000) -> None:
        self._live_s = live_s
        self.limit = limit
        self._last: OrderedDict[int, _Request] = OrderedDict()
        self.tokens: Counter[int] = Counter()
        self.all_tokens = 0

    def __len__(self) -> int:
        return len(self._last)

    def home(self, session: int) -> tuple[int, int] | None:
        """The worker of a live session and the tokens of its last prompt."""
        found = self._last.get(session)
        return None if found is None else (found.worker, found.tokens)

    def record(self, session: int, worker: int, tokens: int, now_s: float) -> None:
        """Records a request of `tokens` that was sent to `worker`."""
        if (found := self._last.get(session)) is not None:
            self.tokens[found.worker] -= found.tokens
            self.all_tokens -= found.tokens
        self._last[session] = _Request(worker, tokens, now_s)
        self._last.move_to_end(session)
        self.tokens[worker] += tokens
        self.all_tokens += tokens
        if len(self._last) > self.limit:
            self.end(next(iter(self._last)))

    def end(self, session: int) -> None:
        """Forgets a session."""
        found = self._last.pop(session, None)
        if found is not None:
            self.tokens[found.worker] -= found.tokens
            self.all_tokens -= found.tokens

    def expire(self, now_s: float) -> None:
        """Forgets the sessions that are no longer live."""
        while self._last:
            session, last = next(iter(self._last.items()))
            if now_s - last.sent_s < self._live_s:
                break
            self.end(session)

    def forget_worker(self, worker: int) -> None:
        """Forgets the sessions of a worker that is gone."""
        for session in [key for key, last in self._last.items() if last.worker == worker]:
            self.end(session)
