"""Lookups in a prefix index that another process writes: see `index_memory`."""

from collections.abc import Sequence

from radix.index import Match
from radix.index_memory import (
    COUNT,
    LOW,
    LOW_BITS,
    MAX_HOLDERS,
    PROBES,
    SET_BYTES,
    IndexMemory,
    Table,
    tag_of,
)


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
        found: list[Match] = []
        rows, highest = table.rows, len(hashes)
        first = _word(table, hashes[0]) if highest else 0
        remaining = all_holders = _holders(table, first)
        while remaining:
            # Each row is read once, so every step makes progress, whatever changes meanwhile.
            deepest, word, workers = 1, first, all_holders & remaining
            low = 2
            while low <= highest:
                middle = (low + highest) >> 1
                probe = rows[_row(table, hashes[middle - 1])]
                code = probe & LOW
                holders = 1 << code >> 1 if code <= MAX_HOLDERS else _holders(table, probe)
                if held := holders & remaining:
                    deepest, word, workers, low = middle, probe, held, middle + 1
                else:
                    highest = middle - 1
            found.append(Match(workers, deepest, word >> LOW_BITS))
            remaining ^= workers
            highest = deepest - 1
        return found

    def holders(self, segment: int) -> int:
        """The workers that hold a segment, as a bitmask."""
        table = self._active()
        return _holders(table, _word(table, segment))

    def holds(self, worker: int, segment: int) -> bool:
        return worker >= 0 and self.holders(segment) >> worker & 1 == 1

    def touch(self, hashes: Sequence[int], depth: int) -> None:
        """Marks a prefix as used: the writer passes over its last known segment once."""
        table = self._active()
        for position in range(min(depth, len(hashes)) - 1, -1, -1):
            if row := _row(table, hashes[position]):
                table.used[row] = 1
                return

    def _active(self) -> Table:
        return self._table or self._memory.active()


def _row(table: Table, segment: int) -> int:
    """The row of a segment, 0 if there is none."""
    slots, last = table.slots, table.last
    tag, place = tag_of(segment), segment & last
    end = place + PROBES
    while word := slots[place & last]:
        if word & ~LOW == tag:
            return word & LOW
        place += 1
        if place == end:
            break
    return 0


def _word(table: Table, segment: int) -> int:
    return table.rows[_row(table, segment)]


def _holders(table: Table, word: int) -> int:
    code = word & LOW
    if code <= MAX_HOLDERS:
        return 1 << code >> 1
    at = (code - MAX_HOLDERS - 1) * SET_BYTES
    return int.from_bytes(table.sets[at : at + SET_BYTES], "little")
