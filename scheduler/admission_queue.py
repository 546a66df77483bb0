"""A line of those who wait, in the order of `scheduler.order`, sorted as seldom as will do.

Only the first few are ever asked for, while others come and leave all the time, and to sort
ten thousand takes tens of milliseconds. So:

    in order   all who were there when the line was last sorted, at most a second ago
    new        at most MOST_NEW who have come since

The first few of all are the first few in order and the new ones, sorted together. Who waits
long rises, and who was served lately falls behind, only when all are sorted again.

A place of one who has left stays empty until then: the line refers to nobody who does not wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from scheduler.order import Served, Waiting, in_order

SORTED_FOR_S = 1.0
MOST_NEW = 128
_MOST_EMPTY = 64

T = TypeVar("T")


class Entry(Generic[T]):
    """A place in the line.

    who: None once it is empty.
    tried_s: when it was first its turn, but it was not let in.
    """

    __slots__ = ("item", "passed_over_s", "waiting")

    def __init__(self, item: T, waiting: Waiting) -> None:
        self.item: T | None = item
        self.waiting = waiting
        self.passed_over_s: float | None = None


class OrderedQueue(Generic[T]):
    """Those who wait. `served` is what each tenant was given lately, `weights` their shares."""

    def __init__(self, aging_s: float, served: Served, weights: Mapping[str, float] = {}) -> None:
        self._aging_s = aging_s
        self._served = served
        self._weights = weights
        self._entries: dict[T, Entry[T]] = {}
        self._sorted: list[Entry[T]] = []
        self._sorted_s = 0.0
        self._new: list[Entry[T]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry[T]]:
        """The places taken, of who came first to who came last; others may leave meanwhile."""
        return iter(list(self._entries.values()))

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def add(self, item: T, waiting: Waiting) -> None:
        """One more waits."""
        entry = self._entries[item] = Entry(item, waiting)
        self._new.append(entry)

    def remove(self, item: T) -> None:
        """One waits no longer; nothing happens if it did not."""
        entry = self._entries.pop(item, None)
        if entry is not None:
            entry.item = None

    def head(self, most: int, now_s: float) -> Sequence[Entry[T]]:
        """The first of all, at most `most`, in order."""
        if now_s - self._sorted_s >= SORTED_FOR_S or len(self._new) > MOST_NEW:
            return self.sort(now_s)[:most]
        head: list[Entry[T]] = []
        empty = 0
        for entry in self._sorted:
            if entry.item is None:
                empty += 1
            else:
                head.append(entry)
                if len(head) == most:
                    break
        if empty > _MOST_EMPTY:
            self._sorted = [entry for entry in self._sorted if entry.item is not None]
        self._new = [entry for entry in self._new if entry.item is not None]
        if not self._new:
            return head
        return self._in_order(head + self._new, now_s)[:most]

    def sort(self, now_s: float) -> Sequence[Entry[T]]:
        """All, in order."""
        self._sorted = self._in_order(list(self._entries.values()), now_s)
        self._sorted_s = now_s
        self._new = []
        return self._sorted

    def _in_order(self, entries: list[Entry[T]], now_s: float) -> list[Entry[T]]:
        waiting = [entry.waiting for entry in entries]
        served = self._served.at(now_s)
        order = in_order(waiting, now_s, self._aging_s, served, self._weights)
        return [entries[at] for at in order]

    def check(self) -> None:
        """Asserts that everybody who waits has one place, and that nobody else has."""
        taken = [entry for entry in self._sorted + self._new if entry.item is not None]
        assert len(taken) == len(self._entries)
        assert {id(entry) for entry in taken} == {id(p) for p in self._entries.values()}
        assert all(entry.item is item for item, entry in self._entries.items())
