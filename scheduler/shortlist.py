"""The workers of a large fleet that a decision looks at, instead of all of them.

What a request costs on a worker has two parts: what its own prompt costs there, which depends on
what the worker holds of it, and what the worker has to do anyway, its standing cost. So of the
workers that hold the same of a prompt the best one is near the front of their standing costs:

    deepest holders   w7
    harness's prefix  w3 w9 w4 | w1 w8 ...      the first few of each group are looked at
    nothing           w2 w6 w5 | w0 w11 ...

There are two orders of all workers: for a session's first request, whose standing cost counts the
sessions and the recent work of a worker, and for a session that moves. Only workers whose standing
cost changes are put again.

The choice among the picked workers is the choice among all, but for three differences:

  - A session's first request delays those of the sessions that live on a worker, and the standing
    cost leaves this out. So the chosen worker costs up to DELAY * uncached tokens more than the
    cheapest of its group.
  - Of more than MOST_GROUPS groups, those that hold least count as workers that hold nothing.
  - A standing cost that has changed since the worker was put counts as it was, to choose the
    workers to look at. Their cost is computed then.

Workers that count as slower or faster are groups of their own, because they do so the more, the
longer a request is: those that warm up, and those of the same weights (`scheduler.speeds`).
Of each group two are looked at, so in a fleet of many kinds more than MOST_PICKED may be.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from scheduler.placement import WorkerView, standing_cost

SMALL_FLEET = 32
"""Fleets of so many workers are looked at as a whole."""
MOST_PICKED = 8
"""Standing costs are fresh, so the best is among few."""
MOST_GROUPS = 7
_FEWEST_OF_GROUP = 2


class _Entry(NamedTuple):
    cost: float
    tie: int
    worker: int


class Shortlist:
    """The workers of a fleet, each with a small number, by their standing costs."""

    def __init__(self) -> None:
        self._begins: list[_Entry] = []
        self._moves: list[_Entry] = []
        self._entries: dict[int, tuple[_Entry, _Entry]] = {}
        self._all = 0
        # The workers of each kind of speed: their weights, and whether they warm up.
        self._kinds: dict[tuple[float, float, bool], int] = {}
        self._kind_of: dict[int, tuple[float, float, bool]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, worker: int, tie: int, view: WorkerView) -> None:
        """Adds a worker, or replaces what it costs. tie: orders workers that cost the same; equal
        in all balancers, so that they look at the same workers."""
        begins = _Entry(standing_cost(view, is_new=True), tie, worker)
        moves = _Entry(standing_cost(view, is_new=False), tie, worker)
        self._set_kind(worker, (view.prefill_weight, view.decode_weight, view.warmth < 1.0))
        before = self._entries.get(worker)
        if before == (begins, moves):
            return
        if before is not None:
            self._take(before)
        self._all |= 1 << worker
        self._entries[worker] = begins, moves
        insort(self._begins, begins)
        insort(self._moves, moves)

    def remove(self, worker: int) -> None:
        """Removes a worker; does nothing if it is not there."""
        before = self._entries.pop(worker, None)
        if before is not None:
            self._take(before)
            self._all &= ~(1 << worker)
            self._set_kind(worker, None)

    def pick(
        self, groups: Iterable[int], takes: Callable[[int], bool], *, is_new: bool
    ) -> list[int]:
        """The workers to look at for a request: MOST_PICKED, or a few of each group if more.

        groups: bitmasks of the workers that hold the same of its prompt, those that hold most
            first. takes: whether a worker takes the request. is_new: whether the request begins a
            session.
        """
        parts: list[int] = []
        rest = self._all
        for group in groups:
            if len(parts) == MOST_GROUPS:
                break
            if part := group & rest:
                parts.append(part)
                rest ^= part
        parts.append(rest)
        if len(self._kinds) > 1:
            parts = [part & kind for part in parts for kind in self._kinds.values()]
        parts = [part for part in parts if part]
        each = max(MOST_PICKED // max(len(parts), 1), _FEWEST_OF_GROUP)
        return [worker for part in parts for worker in self._least(part, takes, each, is_new)]

    def check(self) -> None:
        """Asserts that the orders agree."""
        for place, order in enumerate((self._begins, self._moves)):
            assert order == sorted(entries[place] for entries in self._entries.values())
        assert self._all == sum(1 << worker for worker in self._entries)
        assert sum(self._kinds.values()) == self._all
        for worker, kind in self._kind_of.items():
            assert self._kinds[kind] >> worker & 1

    def _set_kind(self, worker: int, kind: tuple[float, float, bool] | None) -> None:
        before = self._kind_of.get(worker)
        if kind == before:
            return
        if before is not None:
            self._kinds[before] &= ~(1 << worker)
            if not self._kinds[before]:
                del self._kinds[before]
            del self._kind_of[worker]
        if kind is not None:
            self._kinds[kind] = self._kinds.get(kind, 0) | 1 << worker
            self._kind_of[worker] = kind

    def _take(self, entries: tuple[_Entry, _Entry]) -> None:
        for order, entry in zip((self._begins, self._moves), entries, strict=True):
            del order[bisect_left(order, entry)]

    def _least(
        self, part: int, takes: Callable[[int], bool], most: int, is_new: bool
    ) -> Iterator[int]:
        order: Sequence[_Entry] = self._begins if is_new else self._moves
        # Of few workers in a large fleet most of the order would be passed over.
        if part.bit_count() ** 2 < len(order):
            place = 0 if is_new else 1
            order = sorted(self._entries[worker][place] for worker in bits_of(part))
        for _, _, worker in order:
            if part >> worker & 1 and takes(worker):
                yield worker
                most -= 1
                if not most:
                    return


def bits_of(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set, the lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
