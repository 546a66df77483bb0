"""In which order waiting requests are served: by step, then in turns, then the cheapest first.

    step = priority + floor(waited_s / aging_s)

A higher step goes first. Inside a step the tenants take turns, by start-time fair queueing
(Goyal, Vin and Cheng, 1996) over the tokens that each was given lately, as in the virtual
token counter (Sheng et al., 2024):

    virtual time of a tenant = tokens given to it / its weight

The next request is one of the tenant whose virtual time is least, its cheapest, which then
advances that time by cost / weight. Cheapest first is what makes the mean wait shortest
(Smith, 1956). A request of a higher step counts for its tenant in all lower ones, as it will
have been served by then: so the order is the one that comes out if the first is served, and
counted, and the rest are put in order again. Inside a step and from equal virtual times, as
long as two tenants both have requests that wait, what they get differs, per weight, by no
more than one request costs. What a tenant was given is forgotten by half every half-life: so
one that was silent is ahead by what the others were given in about that time, and no more.

Neither costs nor other tenants can starve a request. Among requests whose priority is at
most P, one with priority p is overtaken only by those that arrive less than

    (P - p + 1) * aging_s

after it. For one that arrives at least so much later has waited P - p + 1 full aging_s less,
and its step is lower: at most P + n - (P - p + 1) = p + n - 1 when that of the first is
p + n. This holds at every moment from when both have arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from math import floor, inf, log
from typing import NamedTuple

from scheduler.decaying_sum import DecayingSum


class Waiting(NamedTuple):
    """A request that waits.

    priority: higher is more important.
    cost_tokens: the work it is expected to be: what of its prompt is not cached, and its output.
    """

    priority: int
    arrived_s: float
    cost_tokens: int
    tenant: str = ""


def step(priority: int, waited_s: float, aging_s: float) -> int:
    """The priority, and one more for each full `aging_s` waited.

    `aging_s` is inf where nothing ages; 0 counts as inf. A wait below 0, of clocks that
    disagree, counts as 0.
    """
    if waited_s <= 0 or not 0 < aging_s < inf:
        return priority
    return priority + floor(waited_s / aging_s)


def bound_s(priority: int, highest: int, aging_s: float) -> float:
    """How much later a request has to arrive so that it never overtakes one of `priority`,
    where no priority is above `highest`. inf: any may."""
    steps = max(highest - priority + 1, 0)
    if steps == 0:
        return 0.0
    return steps * aging_s if aging_s > 0 else inf


def in_order(
    waiting: Sequence[Waiting],
    now_s: float,
    aging_s: float,
    served: Mapping[str, float] = {},
    weights: Mapping[str, float] = {},
) -> list[int]:
    """The positions of all that wait, in the order in which to serve them.

    served: tokens that each tenant was given lately, 0 where it is not named.
    weights: what share each tenant is due, relative to the others; 1 where it is not named.
    Of one tenant and step, the cheapest goes first, then the earliest, then the first given.
    """
    steps: dict[int, list[int]] = {}
    for position, request in enumerate(waiting):
        reached = step(request.priority, now_s - request.arrived_s, aging_s)
        steps.setdefault(reached, []).append(position)
    given = {request.tenant: served.get(request.tenant, 0.0) for request in waiting}
    shares = {tenant: weights.get(tenant, 1.0) for tenant in given}
    for tenant, weight in shares.items():
        if not weight > 0:
            raise ValueError(f"the weight of tenant {tenant!r} is not positive: {weight}")
    order: list[int] = []
    for reached in sorted(steps, reverse=True):
        order += _in_turns(waiting, steps[reached], given, shares)
    return order


def _in_turns(
    waiting: Sequence[Waiting],
    positions: Sequence[int],
    given: dict[str, float],
    shares: Mapping[str, float],
) -> list[int]:
    """The positions of one step in serving order; adds what they cost to `given`."""
    queues: dict[str, list[int]] = {}
    for position in positions:
        queues.setdefault(waiting[position].tenant, []).append(position)
    for queue in queues.values():  # the next one last, to be taken off
        queue.sort(key=lambda p: (waiting[p].cost_tokens, waiting[p].arrived_s, p), reverse=True)

    def turn(tenant: str) -> tuple[float, float, int]:
        position = queues[tenant][-1]
        return given[tenant] / shares[tenant], waiting[position].arrived_s, position

    turns = [turn(tenant) for tenant in queues]
    heapify(turns)
    order = []
    while turns:
        position = turns[0][-1]
        tenant = waiting[position].tenant
        order.append(position)
        queues[tenant].pop()
        given[tenant] += max(waiting[position].cost_tokens, 0)
        if queues[tenant]:
            heapreplace(turns, turn(tenant))
        else:
            heappop(turns)
    return order


class Served:
    """Tokens that each tenant was given; they count half as much every `half_life_s`.

    At most `limit` tenants: beyond it the one that was given least is forgotten, and counts
    as one that was given nothing.
    """

    def __init__(self, half_life_s: float = 60.0, limit: int = 1024) -> None:
        if not 0 < half_life_s < inf:
            raise ValueError(f"half_life_s is not a positive time: {half_life_s}")
        if limit < 1:
            raise ValueError(f"limit is less than 1: {limit}")
        self._span_s = half_life_s / log(2)
        self._limit = limit
        self._sums: dict[str, DecayingSum] = {}

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, tenant: str, tokens: float, now_s: float) -> None:
        """The tenant was given tokens now."""
        if tenant not in self._sums and len(self._sums) >= self._limit:
            self._make_room(now_s)
        self._sums.setdefault(tenant, DecayingSum(self._span_s)).add(tokens, now_s)

    def at(self, now_s: float) -> dict[str, float]:
        """What each tenant's tokens come to now; those below one token are left out."""
        tokens = {tenant: total.at(now_s) for tenant, total in self._sums.items()}
        return {tenant: total for tenant, total in tokens.items() if total >= 1}

    def _make_room(self, now_s: float) -> None:
        """Forgets whose tokens are below one, or else the tenant that has least."""
        kept = self.at(now_s)
        if len(kept) == len(self._sums):
            del kept[min(kept, key=lambda tenant: (kept[tenant], tenant))]
        self._sums = {tenant: self._sums[tenant] for tenant in kept}
