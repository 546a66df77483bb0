"""A queue in the order of `scheduler.order` that sorts as rarely as it can.

Callers only read the first few entries, while others are added and removed all the time, and
sorting ten thousand entries takes tens of milliseconds. So the queue has two parts:

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
from itertools import islice
from typing import Generic, TypeVar

from scheduler.order import Served, Waiting, in_order

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
        self._entries: dict[T, Entry[T]] = {}
        self._tenants: Counter[str] = Counter()  # of the entries
        self._priorities: Counter[int] = Counter()
        self._sorted: list[Entry[T]] = []
        self._sorted_s = 0.0
        self._new: list[Entry[T]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry[T]]:
        """The entries in order of arrival. Items may be removed during the iteration."""
        return iter(list(self._entries.values()))

    def __contains__(self, item: object) -> bool:
        return item in self._entries

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
        entry = self._entries[item] = Entry(item, waiting)
        self._tenants[waiting.tenant] += 1
        self._priorities[waiting.priority] += 1
        self._cost_tokens += waiting.cost_tokens
        self._new.append(entry)

    def remove(self, item: T) -> None:
        """Removes an item; does nothing if it is not in the queue."""
        entry = self._entries.pop(item, None)
        if entry is not None:
            entry.item = None
            self._cost_tokens -= entry.waiting.cost_tokens
            _take_one(self._tenants, entry.waiting.tenant)
            _take_one(self._priorities, entry.waiting.priority)

    def head(self, limit: int, now_s: float, without: Collection[str] = ()) -> Sequence[Entry[T]]:
        """The first entries in order, at most `limit`, of other tenants than these."""
        if now_s - self._sorted_s >= SORTED_FOR_S or len(self._new) > MOST_NEW:
            self.sort(now_s)
        if len(self._sorted) > len(self._entries) + _MOST_EMPTY:
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
        self._sorted = self._in_order(list(self._entries.values()), now_s)
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
