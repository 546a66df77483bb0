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


class Place(Generic[T]):
    """A place in the line.

    who: None once it is empty.
    tried_s: when it was first its turn, but it was not let in.
    """

    __slots__ = ("tried_s", "waiting", "who")

    def __init__(self, who: T, waiting: Waiting) -> None:
        self.who: T | None = who
        self.waiting = waiting
        self.tried_s: float | None = None


class Line(Generic[T]):
    """Those who wait. `served` is what each tenant was given lately, `weights` their shares."""

    def __init__(self, aging_s: float, served: Served, weights: Mapping[str, float] = {}) -> None:
        self._aging_s = aging_s
        self._served = served
        self._weights = weights
        self._places: dict[T, Place[T]] = {}
        self._sorted: list[Place[T]] = []
        self._sorted_s = 0.0
        self._new: list[Place[T]] = []

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Place[T]]:
        """The places taken, of who came first to who came last; others may leave meanwhile."""
        return iter(list(self._places.values()))

    def __contains__(self, who: object) -> bool:
        return who in self._places

    def add(self, who: T, waiting: Waiting) -> None:
        """One more waits."""
        place = self._places[who] = Place(who, waiting)
        self._new.append(place)

    def remove(self, who: T) -> None:
        """One waits no longer; nothing happens if it did not."""
        place = self._places.pop(who, None)
        if place is not None:
            place.who = None

    def first(self, most: int, now_s: float) -> Sequence[Place[T]]:
        """The first of all, at most `most`, in order."""
        if now_s - self._sorted_s >= SORTED_FOR_S or len(self._new) > MOST_NEW:
            return self.sort(now_s)[:most]
        first: list[Place[T]] = []
        empty = 0
        for place in self._sorted:
            if place.who is None:
                empty += 1
            else:
                first.append(place)
                if len(first) == most:
                    break
        if empty > _MOST_EMPTY:
            self._sorted = [place for place in self._sorted if place.who is not None]
        self._new = [place for place in self._new if place.who is not None]
        if not self._new:
            return first
        return self._in_order(first + self._new, now_s)[:most]

    def sort(self, now_s: float) -> Sequence[Place[T]]:
        """All, in order."""
        self._sorted = self._in_order(list(self._places.values()), now_s)
        self._sorted_s = now_s
        self._new = []
        return self._sorted

    def _in_order(self, places: list[Place[T]], now_s: float) -> list[Place[T]]:
        waiting = [place.waiting for place in places]
        served = self._served.at(now_s)
        order = in_order(waiting, now_s, self._aging_s, served, self._weights)
        return [places[at] for at in order]

    def check(self) -> None:
        """Asserts that everybody who waits has one place, and that nobody else has."""
        taken = [place for place in self._sorted + self._new if place.who is not None]
        assert len(taken) == len(self._places)
        assert {id(place) for place in taken} == {id(p) for p in self._places.values()}
        assert all(place.who is who for who, place in self._places.items())
