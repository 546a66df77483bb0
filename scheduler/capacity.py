"""Whether a worker has capacity for one more request, or would only queue it.

A request in an engine's queue is bound to that engine: it can run nowhere else, and its order is
fixed by what is there. A request in the balancer's queue goes to the first engine with capacity,
in the order of all requests. So an engine is sent what it can run, and little more. Two accounts,
which make up for each other's faults, decide how much that is:

    ours           the requests in flight there: up to date, but an underestimate
    the engine's   the requests in its own queue: exact, but about 0.1 s old

Our account counts, for each request, the prompt tokens that its worker is not expected to have
cached and the output that its client expects, at most what the context leaves. Tokens read from
the cache and longer outputs take memory as well, but we do not know how much. If we have sent an
engine too much, it queues, reports its queue, and is sent nothing more until that queue is empty.

What a client expects is its word. So for a request of one tenant, the tokens of each other tenant
count as an equal part of the memory at most: with two tenants there as a half, with three as a
third. Whatever others claim, a tenant's requests fit up to its own part.

The rivals of a request are the requests in flight that it could not preempt: their priority is
above its own less the threshold. A worker has capacity for a request if

    1. it has fewer rivals than it can run at once, plus a few that are sent ahead, so that
       the engine need not wait for a round trip and a tokenization whenever one ends
    2. the rivals' tokens, each tenant's within its part, and its own fit the engine's memory, or
       it has no rivals
    3. the engine queues no more than those few, what was sent beyond its capacity and what lists
       of other tenants may have there, or the request could preempt another one there: then it is
       sent in any case, because only the engine knows if preempting pays

A request with a list of prompts is one in flight, and as many in the engine's queue. There tenants
take turns. So a list that fills the queue keeps its own tenant waiting, and no other one.

A size beyond an engine's whole memory counts as 0. Either the engine will reject the prompt at
once, or the size is wrong: images are counted by their bytes.

Wherever a request has capacity, one of the same tenant with a higher priority has capacity too.

Beyond its capacity, a worker may be sent requests whose prompts are in its memory (`is_at_hand`),
as many again: they can run nowhere else as cheaply. In the worker's own queue the cheapest goes
first, and so they go before a prompt that was sent ahead. If they came after it, computing it could
evict theirs.
"""

from collections import Counter

# One request is sent ahead for each so many that can run at once.
_AHEAD = 8
CACHED_SHARE = 0.75
"""Of a prompt, so much is in memory if it is at hand: computing the rest is little work."""
_NONE = (0, 0)


class Capacity:
    """What an engine reports of itself.

    tokens: the size of its KV memory.
    context: the longest prompt and answer together.
    limit: how many requests may be in flight there, and how many beyond its capacity.
    """

    __slots__ = ("_ahead", "_queued", "context", "limit", "tokens")

    def __init__(
        self, tokens: int, max_running: int, queued: int = 0, context: int | None = None
    ) -> None:
        self._ahead = max(1, max_running // _AHEAD)
        self._queued = queued
        self.tokens = tokens
        self.context = min(tokens, context or tokens)
        self.limit = max_running + self._ahead

    def queues(self, here: "InFlight", tenant: str = "") -> bool:
        """Whether more requests are queued there than were sent ahead or beyond its capacity, or
        than lists of other tenants have."""
        return self._queued - here.beyond - here.listed_by_others(tenant) > self._ahead

    def counted(self, tokens: int) -> int:
        """The tokens that a request counts with: 0 if they exceed the whole memory."""
        return tokens if tokens <= self.tokens else 0

    def needed(self, prompt: int, uncached: int, output: int) -> int:
        """The tokens that a request counts with, of whose prompt so many are not cached."""
        return self.counted(uncached + min(output, max(self.context - prompt, 0)))


class InFlight:
    """The requests in flight at one worker and their tokens, in total, by priority and tenant.

    beyond: how many more were sent beyond its capacity.
    """

    def __init__(self) -> None:
        self.beyond = 0
        self.requests = 0
        self.tokens = 0
        # Requests and their tokens.
        self._by_kind: dict[tuple[int, str], tuple[int, int]] = {}
        # The prompts of each tenant's lists, but for the first of each.
        self._listed: Counter[str] = Counter()

    def add(self, priority: int, tokens: int, tenant: str = "", prompts: int = 1) -> None:
        """Counts a request that was sent, with so many prompts."""
        if prompts > 1:
            self._listed[tenant] += prompts - 1
        self.requests += 1
        self.tokens += tokens
        kind = priority, tenant
        count, before = self._by_kind.get(kind, _NONE)
        self._by_kind[kind] = count + 1, before + tokens

    def remove(self, priority: int, tokens: int, tenant: str = "", prompts: int = 1) -> None:
        """Removes a request that was added with the same arguments."""
        if prompts > 1:
            self._listed[tenant] -= prompts - 1
            if not self._listed[tenant]:
                del self._listed[tenant]
        self.requests -= 1
        self.tokens -= tokens
        kind = priority, tenant
        count, before = self._by_kind[kind]
        if count > 1:
            self._by_kind[kind] = count - 1, before - tokens
        else:
            del self._by_kind[kind]

    def listed_by_others(self, tenant: str) -> int:
        """How many prompts the lists of other tenants have, but for the first of each."""
        if not self._listed:
            return 0
        return self._listed.total() - self._listed[tenant]

    def tenants(self) -> set[str]:
        """Those with requests in flight."""
        return {tenant for _, tenant in self._by_kind}

    def above(self, priority: int) -> tuple[int, dict[str, int]]:
        """The number of requests above a priority, and each tenant's tokens of them; all tenants
        with requests of any priority are named."""
        requests = 0
        tokens: dict[str, int] = {}
        for (level, tenant), (count, their_tokens) in self._by_kind.items():
            tokens.setdefault(tenant, 0)
            if level > priority:
                requests += count
                tokens[tenant] += their_tokens
        return requests, tokens


def has_capacity(
    capacity: Capacity,
    here: InFlight,
    priority: int,
    tokens: int,
    threshold: int,
    others: int = 0,
    their_tokens: int = 0,
    tenant: str = "",
) -> bool:
    """Whether a worker can run a request of `priority` and `tokens` without queueing it.

    threshold: by how much a request's priority must exceed another's to preempt it.
    others, their_tokens: what other balancers have in flight there; all of it counts as rivals,
        and as one more tenant.
    """
    own = capacity.counted(tokens)
    # Usually everything fits, and rivals need not be counted.
    all_fit = own + here.tokens + their_tokens <= capacity.tokens
    queues = capacity.queues(here, tenant)
    if all_fit and here.requests + others < capacity.limit and not queues:
        return True
    rivals, by_tenant = here.above(priority - threshold)
    if queues and rivals == here.requests:
        return False
    rivals += others
    own += by_tenant.pop(tenant, 0)
    rival_tokens = [*by_tenant.values(), *([their_tokens] if others or their_tokens else [])]
    part = capacity.tokens // (len(rival_tokens) + 1)
    fits = own + sum(min(tokens, part) for tokens in rival_tokens) <= capacity.tokens
    return rivals < capacity.limit and (fits or not rivals)


def exceeds_part(
    capacity: Capacity, here: InFlight, tokens: int, others: int = 0, tenant: str = ""
) -> bool:
    """Whether a request is larger than its tenant's part of a worker's memory, so that it might
    never fit beside others. Arguments as above."""
    tenants = len(here.tenants() - {tenant}) + 1 + bool(others)
    return capacity.counted(tokens) > capacity.tokens // tenants


def is_at_hand(prompt_tokens: int, held_tokens: int) -> bool:
    """Whether a prompt with so many cached tokens is computed with little work."""
    return held_tokens >= CACHED_SHARE * prompt_tokens
