"""Lookups in the table of a prefix index, by its writer or by another process: see
`index_memory`."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from radix.index_memory import COUNT, HALF, PROBES, IndexMemory, Table


class Match(NamedTuple):
    """The workers that have the same longest match with a chain."""

    workers: int
    """A bitmask."""
    depth: int
    """The number of segments that match, at least 1."""
    tokens: int
    """The prompt tokens of these segments, as last stored."""


def matches_in(table: Table, mask: Callable[[int], int], hashes: Sequence[int]) -> list[Match]:
    """Each worker's longest match with a chain of hashes, the deepest first.

    A worker is in at most one match, and in none if it holds nothing. A lookup does not count as a
    use. O(distinct depths * log(length)). mask: the bitmask of a row's holders.
    """
    found: list[Match] = []
    slots, low, holders, last = table.slots, table.low, table.holders, table.last
    highest = len(hashes)
    first = table.row(hashes[0]) if highest else 0
    code = holders[first]
    remaining = all_workers = named = mask(code)
    while remaining:
        # Each row is read once, so every step makes progress, whatever changes meanwhile.
        deepest, row, workers = 1, first, all_workers & remaining
        lowest = 2
        while lowest <= highest:
            middle = (lowest + highest) >> 1
            # As `Table.row`: a call for each probe would take as long as the probe.
            half = hashes[middle - 1] & HALF
            place = half & last
            end = place + PROBES
            while (probe := slots[place & last]) and low[probe] != half:
                place += 1
                if place == end:
                    probe = 0
                    break
            if (found_code := holders[probe]) != code:
                code, named = found_code, mask(found_code)
            if held := named & remaining:
                deepest, row, workers, lowest = middle, probe, held, middle + 1
            else:
                highest = middle - 1
        found.append(Match(workers, deepest, table.tokens[row]))
        remaining ^= workers
        highest = deepest - 1
    return found


class IndexView:
    """Lookups in a shared index, from any process. It raises nothing, whatever is being written.

    table: the only one to look up in; without it, the active one.
    """

    def __init__(self, memory: IndexMemory, table: Table | None = None) -> None:
        self._memory = memory
        self._table = table

    def __len__(self) -> int:
        return self._active().header[COUNT]

    def matches(self, hashes: Sequence[int]) -> list[Match]:
        """As `PrefixIndex.matches`."""
        table = self._active()
        return matches_in(table, table.mask, hashes)

    def holders(self, segment: int) -> int:
        """The workers that hold a segment, as a bitmask."""
        table = self._active()
        return table.mask(table.holders[table.row(segment)])

    def holds(self, worker: int, segment: int) -> bool:
        return worker >= 0 and self.holders(segment) >> worker & 1 == 1

    def touch(self, hashes: Sequence[int], depth: int) -> None:
        """Marks a prefix as used: the writer passes over its last known segment once."""
        table = self._active()
        for position in range(min(depth, len(hashes)) - 1, -1, -1):
            if row := table.row(hashes[position]):
                table.used[row] = 1
                return

    def _active(self) -> Table:
        return self._table or self._memory.active()
