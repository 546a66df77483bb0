"""Whether a worker has room for one more request, or would only let it queue.

What queues inside an engine is bound to it: it can go nowhere else, and its order is settled
by what is there. What is held in front of all engines goes to the first that has room, in the
order of all. So an engine is sent what it can run, and little more; how much that is, is
judged by two accounts that make up for each other:

    ours           what is in flight there: known at once, an underestimate
    the engine's   how many wait in its own queue: the truth, some 0.1 s old

Ours counts of each request the prompt tokens that the worker was not expected to hold and the
answer that its client expects. What it reads from the cache, or generates beyond that, takes
memory as well, but not known how much. If we have sent too much for it, the engine queues, says
so, and is sent nothing more until that is gone.

Rivals of a request are those in flight that it could not preempt: whose priority is above its
own less the threshold. A worker has room for a request of a priority if

    1. rivals are fewer than run at once, and a few that are sent ahead, so that the engine
       need not wait for a way there and back and a tokenization whenever one ends
    2. rivals' tokens and its own fit the engine's memory, or there are no rivals
    3. no more than those few wait in the engine, or it could preempt somebody there: then it
       is sent in any case, as only the engine can tell whether to preempt pays

Tokens beyond the whole memory of an engine are no estimate. It will refuse such a prompt at
once, or it is none: pictures are counted by their bytes. They count as none.

A request of a higher priority has room wherever one of a lower has.
"""

from __future__ import annotations

# Of those that run at once, so many are sent ahead: one in eight.
_AHEAD = 8


class Capacity:
    """What an engine reports: tokens of memory, requests that may run at once, and its queue.

    limit: how many requests may be in flight there.
    queues: whether it has more to do than those few that were sent ahead.
    """

    __slots__ = ("limit", "queues", "tokens")

    def __init__(self, tokens: int, max_running: int, queued: int = 0) -> None:
        ahead = max(1, max_running // _AHEAD)
        self.tokens = tokens
        self.limit = max_running + ahead
        self.queues = queued > ahead

    def counted(self, tokens: int) -> int:
        """The tokens that a request counts with: none if they are beyond the whole memory."""
        return tokens if tokens <= self.tokens else 0


class InFlight:
    """Requests in flight at one worker and their tokens, in all and by priority."""

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self._requests: dict[int, int] = {}
        self._tokens: dict[int, int] = {}

    def add(self, priority: int, tokens: int) -> None:
        """A request is on its way."""
        self.requests += 1
        self.tokens += tokens
        self._requests[priority] = self._requests.get(priority, 0) + 1
        self._tokens[priority] = self._tokens.get(priority, 0) + tokens

    def remove(self, priority: int, tokens: int) -> None:
        """A request that was added, with the same tokens, has ended."""
        self.requests -= 1
        self.tokens -= tokens
        if self._requests[priority] == 1:
            del self._requests[priority], self._tokens[priority]
        else:
            self._requests[priority] -= 1
            self._tokens[priority] -= tokens

    def above(self, priority: int) -> tuple[int, int]:
        """How many requests are above a priority, and their tokens."""
        requests = tokens = 0
        for level, count in self._requests.items():
            if level > priority:
                requests += count
                tokens += self._tokens[level]
        return requests, tokens

    def check(self) -> None:
        """Asserts that the sums are those of the parts."""
        assert self.requests == sum(self._requests.values())
        assert self.tokens == sum(self._tokens.values())
        assert self._requests.keys() == self._tokens.keys()
        assert all(count > 0 for count in self._requests.values())


def has_capacity(
    capacity: Capacity,
    here: InFlight,
    priority: int,
    tokens: int,
    threshold: int,
    others: int = 0,
    their_tokens: int = 0,
) -> bool:
    """Whether a request of `priority` and with `tokens` can be sent to a worker without queueing.

    threshold: how much higher than another one's its priority must be to preempt it.
    others: requests that others than we have in flight there, with `their_tokens`: all rivals.
    """
    own = capacity.counted(tokens)
    # Usually all that is there leaves room, and it need not be asked who is a rival.
    all_fit = own + here.tokens + their_tokens <= capacity.tokens
    if all_fit and here.requests + others < capacity.limit and not capacity.queues:
        return True
    rivals, rival_tokens = here.above(priority - threshold)
    if capacity.queues and rivals == here.requests:
        return False
    rivals += others
    fits = own + rival_tokens + their_tokens <= capacity.tokens
    return rivals < capacity.limit and (fits or not rivals)
