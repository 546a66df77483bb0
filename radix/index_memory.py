"""The memory of a prefix index: a table that its writer fills, and that others look up in without
a lock.

    writer:  events --> PrefixIndex --> table
    all:     IndexView.matches(hashes) <-- table

A segment is known by the lowest 64 bits of its hash. What the columns of a table have for a segment
is written and read in one piece each.

    slots    4 bytes   a row. Found by the hash's lowest bits and linear probing, less than PROBES
                       slots on
    low      8 bytes   of a row: the hash's lowest 64 bits
    holders  4 bytes   of a row. 0: none. 1..MAX_WORKERS: one worker. Above: a set of workers
    tokens   4 bytes   of a row
    used     1 byte    of a row: set by readers when a request used it
    sets     MAX_HOLDERS bits each; equal sets are one

The index of one process has a table of its own, whose sets are plain integers. The processes of a
balancer share one in an `IndexMemory`. There a reader can see a slot, a row's columns and a set
from different moments. It then takes a worker for a holder that is none, or overlooks one: that
costs a cache miss, and nothing depends on more.

An `IndexMemory` has two tables. A writer that starts again fills the unused one while the others go
on with what its predecessor left, and then they change over:

    header   active table | whether it was ever complete | number of writers that began

An `IndexView` looks up in the table, for its writer or for another process.
"""

import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple

MAX_WORKERS = 65_536
"""Workers are bits 0 to MAX_WORKERS - 1. Higher numbers are rejected, to limit a mask's size."""
MAX_HOLDERS = 4096
"""Workers that can be held apart in a shared memory. Higher numbers are rejected there."""
PROBES = 64
MAX_SETS = 1 << 15
SET_BYTES = MAX_HOLDERS // 8
COUNT, UNLISTED = 0, 1
"""Words of a table's header: its segments, and what could not be written to it."""
HALF = (1 << 64) - 1
"""What a segment is known by."""
MAX_SEGMENTS = (1 << 31) - 2
MAX_TOKENS = (1 << 32) - 1
_WRITER_BYTES = 36
"""What the writer has of a row in memory of its own, with what grows ahead: see `index`."""
_PAGE = 4096
_ACTIVE, _COMPLETE, _WRITERS = 0, 1, 2

Erase = Callable[[int, int], object]


class Table:
    """The columns of one table, in a buffer of zeros or of what another process wrote."""

    def __init__(self, buffer: memoryview, limit_segments: int) -> None:
        assert 0 < limit_segments <= MAX_SEGMENTS, "rows have 31 bits"
        slots, rows = _slots(limit_segments) * 4, _rows(limit_segments)
        self.header = buffer[:_PAGE].cast("Q")
        self.slots = buffer[_PAGE : _PAGE + slots].cast("I")
        self.last = len(self.slots) - 1
        at = _PAGE + slots
        self.low = buffer[at : at + 8 * rows].cast("Q")
        at += 8 * rows
        self.holders = buffer[at : at + 4 * rows].cast("I")
        at += 4 * rows
        self.tokens = buffer[at : at + 4 * rows].cast("I")
        at += 4 * rows
        self.used = buffer[at : at + rows]
        self.sets = buffer[at + rows :]

    def row(self, segment: int) -> int:
        """The row of a segment, 0 if there is none."""
        slots, low, last, half = self.slots, self.low, self.last, segment & HALF
        place = half & last
        end = place + PROBES
        while row := slots[place & last]:
            if low[row] == half:
                return row
            place += 1
            if place == end:
                break
        return 0

    def mask(self, code: int) -> int:
        """The workers that a row's holders are, as a bitmask."""
        if code <= MAX_WORKERS:
            return 1 << code >> 1
        at = (code - MAX_WORKERS - 1) * SET_BYTES
        return int.from_bytes(self.sets[at : at + SET_BYTES], "little")


class IndexMemory:
    """A buffer of zeros or of another process's tables, which all processes share.

    erase: called with an offset and a length, which are multiples of 4,096, to fill that part
        with zeros.
    """

    def __init__(self, buffer: memoryview, limit_segments: int, erase: Erase) -> None:
        self.limit_segments = limit_segments
        self.header = buffer[:_PAGE].cast("Q")
        size = _shared_bytes(limit_segments)
        parts = [(_PAGE, size), (_PAGE + size, size)]
        self.tables = [Table(buffer[at : at + size], limit_segments) for at, size in parts]
        self._erase = [lambda part=part: erase(*part) for part in parts]

    @staticmethod
    def size_bytes(limit_segments: int) -> int:
        """The size of the buffer; most of its pages stay untouched in a small index."""
        return _PAGE + 2 * _shared_bytes(limit_segments)

    @property
    def is_complete(self) -> bool:
        """Whether some writer has published all that the engines hold."""
        return self.header[_COMPLETE] != 0

    def active(self) -> Table:
        return self.tables[self.header[_ACTIVE] & 1]

    def begin(self) -> int:
        """The number of the table that a new writer fills: at first the active one."""
        header = self.header
        number = header[_ACTIVE] & 1
        if header[_WRITERS]:
            number ^= 1
            self._erase[number]()
        header[_WRITERS] += 1
        return number

    def publish(self, number: int) -> None:
        """Makes a table the active one, for it is complete."""
        self.header[_ACTIVE] = number
        self.header[_COMPLETE] = 1
        self._erase[number ^ 1]()


def private_table(limit_segments: int) -> Table:
    """A table of this process alone. The system gives it a page when something is written there."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return Table(memoryview(mmap.mmap(-1, _table_bytes(limit_segments), flags)), limit_segments)


def index_bytes(limit_segments: int) -> int:
    """The memory of an index that is full, its sets of workers apart."""
    return _table_bytes(limit_segments) + _WRITER_BYTES * limit_segments


def segments_within(limit_bytes: int) -> int:
    """The most segments whose index fits these bytes, at least one."""
    low, high = 1, MAX_SEGMENTS
    while low < high:
        middle = (low + high + 1) >> 1
        if index_bytes(middle) <= limit_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def sets_for(limit_segments: int) -> int:
    """The sets of workers that fit a shared table."""
    return min(limit_segments, MAX_SETS)


def _slots(limit_segments: int) -> int:
    """Twice the segments, rounded up to a power of two."""
    return 1 << (2 * limit_segments - 1).bit_length()


def _rows(limit_segments: int) -> int:
    return -(-(limit_segments + 2) // 8) * 8


def _table_bytes(limit_segments: int) -> int:
    return _PAGE + 4 * _slots(limit_segments) + 17 * _rows(limit_segments)


def _shared_bytes(limit_segments: int) -> int:
    size = _table_bytes(limit_segments) + sets_for(limit_segments) * SET_BYTES
    return -(-size // _PAGE) * _PAGE


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
    use. O(distinct depths * log(length)). mask: the bitmask of several holders of a row.
    """
    found: list[Match] = []
    slots, low, holders, last = table.slots, table.low, table.holders, table.last
    highest = len(hashes)
    first = table.row(hashes[0]) if highest else 0
    code = holders[first]
    remaining = all_workers = named = 1 << code >> 1 if code <= MAX_WORKERS else mask(code)
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
                code = found_code  # one worker, as of most rows, is its own mask
                named = 1 << code >> 1 if code <= MAX_WORKERS else mask(code)
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

    @property
    def count(self) -> int:
        """How many segments there are."""
        return self._active().header[COUNT]

    def __len__(self) -> int:
        return self.count

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
