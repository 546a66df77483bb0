"""The order in which waiting requests are served: the most important first, then the cheapest, but
none is passed forever.

    lead   = priority * aging_s + waited_s       what a request is worth, in seconds of waiting
    window = floor(lead / window_s)

The highest window goes first, and within it the highest priority. Of one window and priority the
tenants take turns by start-time fair queueing (Goyal, Vin and Cheng, 1996) over the tokens that
each was given recently, as in the virtual token counter (Sheng et al., 2024):

    virtual time of a tenant = tokens given to it / its weight

The next request is the first of the tenant with the least virtual time, and it advances that
time by cost / weight. Of a tenant's requests the one that is due first goes first, then the
cheapest: a deadline orders a tenant's own work, and takes no other tenant's turn. The cheapest
first makes the mean wait shortest (Smith, 1956). A request that
goes earlier for another reason counts for its tenant all the same, because it will have been
served by then. So serving the first request, counting it and sorting the rest again gives the same
order. From equal virtual times, while two tenants both have requests in a window, the tokens they
are given, per weight, differ by no more than the cost of one request. The tokens given to a tenant
count half as much after each half-life. So a tenant that sent nothing for a long time is ahead of
the others by no more than they were given in about one half-life.

Neither costs nor other tenants can starve a request. Among requests whose priority is at most P,
a request of priority p is overtaken only by requests that arrive less than

    (P - p) * aging_s + window_s

after it: the lead of a request that arrives later is less by window_s at least.

The length of a window (`window_of`) matters where agents need more memory than there is. A cached
prompt is cheap and goes first, and its agent's next one is cached again. An evicted prompt is dear
and evicts others, whose next prompts are dear then. If all are served by age, each prompt is
computed again, as in FCFS. So a window lasts as long as it takes to compute WORK times what waits.
Then what is served for its age alone takes one part in WORK of the engine's time, and the rest goes
to agents that are in memory. Where requests wait in one queue after another, their age counts in
both. So the second queue's windows are as long as the first one's.

A queue in this order sorts as rarely as it can. Callers only read the first few entries, while
others are added and removed all the time, and sorting ten thousand entries takes tens of
milliseconds. So the queue has two parts:

    sorted   the entries of the last sort, at most SORTED_FOR_S ago
    new      at most MOST_NEW entries that were added since

The first entries of the queue are the first of the sorted ones and the new ones, sorted together.
Entries move up with waiting, and down after their tenant was served, at the next full sort.

A removed entry stays in its list, without its item, until then: the queue references no item
that does not wait.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import islice
from math import floor, inf, log
from typing import Generic, NamedTuple, TypeVar

from scheduler.averages import DecayingSum

WORK = 4.0
"""What is served for its age takes one part in so many of an engine's time. In simulation whole
jobs of agents took up to 7% longer with 3, and up to 6% less with 6, with longer waits."""
MOST = 12.0
"""No window is longer than so many times `aging_s`."""


class Waiting(NamedTuple):
    """A waiting request.

    priority: higher is more important.
    cost_tokens: its expected work: the uncached tokens of its prompt, of those that are loaded a
        share, and its output.
    due_s: when its answer is due; inf if no client says.
    """

    priority: int
    arrived_s: float
    cost_tokens: int
    tenant: str = ""
    due_s: float = inf


def due_at(arrived_s: float, due_s: float | None) -> float:
    """When an answer is due. due_s: how long after the arrival, None if no client says."""
    return inf if due_s is None else arrived_s + due_s


def step(priority: int, waited_s: float, aging_s: float) -> int:
    """The priority, plus one for each full `aging_s` waited.

    An `aging_s` of 0 or inf turns aging off. A negative wait, between clocks that disagree,
    counts as 0.
    """
    if waited_s <= 0 or not 0 < aging_s < inf:
        return priority
    return priority + floor(waited_s / aging_s)


def window_of(waiting_s: float, aging_s: float, stated_s: float = 0.0) -> float:
    """How long a window is, in seconds: `aging_s` at least, and MOST times that at most.

    waiting_s: how long the engines take to compute all that waits; 0 if that is not known.
    stated_s: how long a window is in the queue that requests waited in before; it is as long here.
    """
    return min(max(WORK * waiting_s, aging_s, stated_s), MOST * aging_s)


def in_order(
    waiting: Sequence[Waiting],
    now_s: float,
    aging_s: float,
    served: Mapping[str, float] = {},
    weights: Mapping[str, float] = {},
    window_s: float = 0.0,
) -> list[int]:
    """The positions of all waiting requests in serving order.

    aging_s: 0 or inf turns aging off. window_s: `aging_s` if it is shorter than that.
    served: the tokens that each tenant was given recently; 0 for a missing tenant.
    weights: each tenant's share relative to the others, above 0; 1 for a missing tenant.
    Of a tenant, window and priority what is due first goes first, then the cheapest, then the
    earliest, then the lowest position.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for position, request in enumerate(waiting):
        reached = _window(request, now_s, aging_s, window_s), request.priority
        groups.setdefault(reached, []).append(position)
    given = {request.tenant: served.get(request.tenant, 0.0) for request in waiting}
    shares = {tenant: weights.get(tenant, 1.0) for tenant in given}
    order: list[int] = []
    for reached in sorted(groups, reverse=True):
        order += _in_turns(waiting, groups[reached], given, shares)
    return order


def _window(request: Waiting, now_s: float, aging_s: float, window_s: float) -> int:
    if not 0 < aging_s < inf:
        return 0
    lead_s = request.priority * aging_s + max(now_s - request.arrived_s, 0.0)
    return floor(lead_s / max(window_s, aging_s))


def _in_turns(
    waiting: Sequence[Waiting],
    positions: Sequence[int],
    given: dict[str, float],
    shares: Mapping[str, float],
) -> list[int]:
    """The positions of one group in serving order; adds their costs to `given`."""
    queues: dict[str, list[int]] = {}
    for position in positions:
        queues.setdefault(waiting[position].tenant, []).append(position)
    for queue in queues.values():  # the next request is last, and popped
        queue.sort(key=lambda p: (*_rank(waiting[p]), p), reverse=True)

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


def _rank(request: Waiting) -> tuple[float, int, float]:
    return request.due_s, request.cost_tokens, request.arrived_s


class Served:
    """The tokens that each tenant was given, halved every `half_life_s`.

    At most `limit` tenants: beyond it the tenants below one token are forgotten, or else the one
    that was given least. They count as tenants that were given nothing.
    """

    def __init__(self, half_life_s: float = 60.0, limit: int = 1024) -> None:
        self._span_s = half_life_s / log(2)
        self.limit = limit
        self._sums: dict[str, DecayingSum] = {}

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, tenant: str, tokens: float, now_s: float) -> None:
        """Counts tokens that a tenant was given."""
        if tenant not in self._sums and len(self._sums) >= self.limit:
            remaining = self.at(now_s)
            if len(remaining) == len(self._sums):
                del remaining[min(remaining, key=lambda tenant: (remaining[tenant], tenant))]
            self._sums = {tenant: self._sums[tenant] for tenant in remaining}
        self._sums.setdefault(tenant, DecayingSum(self._span_s)).add(tokens, now_s)

    def at(self, now_s: float) -> dict[str, float]:
        """Each tenant's tokens at a time, without the tenants below one token."""
        tokens = {tenant: total.at(now_s) for tenant, total in self._sums.items()}
        return {tenant: total for tenant, total in tokens.items() if total >= 1}


SORTED_FOR_S = 1.0
MOST_NEW = 128
_MOST_EMPTY = 64

T = TypeVar("T")
K = TypeVar("K")


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """A queued item.

    item: None once it was removed.
    passed_over_s: when it was first in turn and could not be placed; None before that.
    """

    item: T | None
    waiting: Waiting
    passed_over_s: float | None = None


class OrderedQueue(Generic[T]):
    """Queued items in serving order.

    entries: those of the items, in the order of their arrival.
    served: the tokens that each tenant was given recently. weights: the tenants' shares.
    window_of: how long a window is while so many tokens wait; None: `aging_s`. Changes of these,
    and of `aging_s`, count from the next sort. window_s: how long it was at the latest one.
    """

    def __init__(
        self,
        aging_s: float,
        served: Served,
        weights: Mapping[str, float] = {},
        window_of: Callable[[int], float] | None = None,
    ) -> None:
        self.aging_s = aging_s
        self._served = served
        self._weights = weights
        self._window_of = window_of
        self.window_s = 0.0
        self._cost_tokens = 0
        self.entries: dict[T, Entry[T]] = {}
        self._tenants: Counter[str] = Counter()  # of the entries
        self._priorities: Counter[int] = Counter()
        self._sorted: list[Entry[T]] = []
        self._sorted_s = 0.0
        self._new: list[Entry[T]] = []

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry[T]]:
        """The entries in order of arrival. Items may be removed during the iteration."""
        return iter(list(self.entries.values()))

    def __contains__(self, item: object) -> bool:
        return item in self.entries

    @property
    def tenants(self) -> Set[str]:
        """The tenants of the queued items."""
        return self._tenants.keys()

    @property
    def highest_priority(self) -> int:
        """Of the queued items. There is one at least."""
        return max(self._priorities)

    def add(self, item: T, waiting: Waiting) -> None:
        """Adds an item that is not in the queue."""
        entry = self.entries[item] = Entry(item, waiting)
        self._tenants[waiting.tenant] += 1
        self._priorities[waiting.priority] += 1
        self._cost_tokens += waiting.cost_tokens
        self._new.append(entry)

    def remove(self, item: T) -> None:
        """Removes an item; does nothing if it is not in the queue."""
        entry = self.entries.pop(item, None)
        if entry is not None:
            entry.item = None
            self._cost_tokens -= entry.waiting.cost_tokens
            _take_one(self._tenants, entry.waiting.tenant)
            _take_one(self._priorities, entry.waiting.priority)

    def head(self, limit: int, now_s: float, without: Collection[str] = ()) -> Sequence[Entry[T]]:
        """The first entries in order, at most `limit`, of other tenants than these."""
        if now_s - self._sorted_s >= SORTED_FOR_S or len(self._new) > MOST_NEW:
            self.sort(now_s)
        if len(self._sorted) > len(self.entries) + _MOST_EMPTY:
            self._sorted = [entry for entry in self._sorted if entry.item is not None]
        self._new = [entry for entry in self._new if entry.item is not None]

        def is_wanted(entry: Entry[T]) -> bool:
            return entry.item is not None and entry.waiting.tenant not in without

        head = list(islice(filter(is_wanted, self._sorted), limit))
        new = [entry for entry in self._new if is_wanted(entry)]
        return self._in_order(head + new, now_s)[:limit] if new else head

    def sort(self, now_s: float) -> Sequence[Entry[T]]:
        """All entries in order."""
        if self._window_of is not None:
            self.window_s = self._window_of(self._cost_tokens)
        self._sorted = self._in_order(list(self.entries.values()), now_s)
        self._sorted_s = now_s
        self._new = []
        return self._sorted

    def _in_order(self, entries: list[Entry[T]], now_s: float) -> list[Entry[T]]:
        waiting = [entry.waiting for entry in entries]
        served = self._served.at(now_s)
        order = in_order(waiting, now_s, self.aging_s, served, self._weights, self.window_s)
        return [entries[position] for position in order]


def _take_one(counter: Counter[K], key: K) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
