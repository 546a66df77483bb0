"""The memory of a prefix index that one process writes and others look up in without a lock.

    writer:  events --> SharedIndex (a PrefixIndex of its own) --> memory
    all:     IndexView.matches(hashes) <------------------------- memory

What a lookup needs takes 24 bytes a segment at the limit: a slot of a hash table with open
addressing, and a row. A word is 64 bits, and is written and read in one piece.

    slot   tag: 40 bits of the hash | row: 24        found by the hash's lowest bits and linear
                                                     probing, less than PROBES slots on
    row    tokens: 40 | holders: 24                  0: none. 1..MAX_HOLDERS: one worker.
                                                     Above: the number of a set of workers
    set    MAX_HOLDERS bits                          equal sets are one
    used   1 byte a row                              set by readers when a request used the row

A reader can see a slot, a row and a set from three different moments. It then takes a worker for a
holder that is none, or overlooks one: that costs a cache miss, and nothing depends on more.

There are two such tables. A writer that starts again fills the unused one while the others go on
with what its predecessor left, and then they change over:

    header   active table | whether it was ever complete | number of writers that began
"""

from collections.abc import Callable

MAX_HOLDERS = 1024
"""Workers that can be held apart. What workers with higher numbers hold is not found."""
PROBES = 64
MAX_SETS = 1 << 15
SET_BYTES = MAX_HOLDERS // 8
COUNT, UNLISTED = 0, 1
"""Words of a table's header: its segments, and what could not be written to it."""
LOW_BITS = 24
LOW = (1 << LOW_BITS) - 1
"""What slots and rows have in their low bits: a row, and the holders."""
MAX_SEGMENTS = LOW - 1
MAX_TOKENS = (1 << 40) - 1
_PAGE = 4096
_ACTIVE, _COMPLETE, _WRITERS = 0, 1, 2

Erase = Callable[[int, int], object]


class IndexMemory:
    """A buffer of zeros or of another process's tables, which all processes share.

    erase: called with an offset and a length, which are multiples of 4,096, to fill that part
        with zeros.
    """

    def __init__(self, buffer: memoryview, limit_segments: int, erase: Erase) -> None:
        assert 0 < limit_segments <= MAX_SEGMENTS, "rows have 24 bits"
        self.limit_segments = limit_segments
        self.header = buffer[:_PAGE].cast("Q")
        size = _table_bytes(limit_segments)
        parts = [(_PAGE, size), (_PAGE + size, size)]
        self.tables = [Table(buffer[at : at + size], limit_segments) for at, size in parts]
        self._erase = [lambda part=part: erase(*part) for part in parts]

    @staticmethod
    def size_bytes(limit_segments: int) -> int:
        """The size of the buffer; most of its pages stay untouched in a small index."""
        return _PAGE + 2 * _table_bytes(limit_segments)

    @property
    def is_complete(self) -> bool:
        """Whether some writer has published all that the engines hold."""
        return self.header[_COMPLETE] != 0

    def active(self) -> "Table":
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


class Table:
    """The columns of one table."""

    def __init__(self, buffer: memoryview, limit_segments: int) -> None:
        slots, rows = _slots(limit_segments) * 8, _rows(limit_segments)
        self.header = buffer[:_PAGE].cast("Q")
        self.slots = buffer[_PAGE : _PAGE + slots].cast("Q")
        self.last = len(self.slots) - 1
        at = _PAGE + slots
        self.rows = buffer[at : at + 8 * rows].cast("Q")
        at += 8 * rows
        self.used = buffer[at : at + rows]
        self.sets = buffer[at + rows :]


def tag_of(segment: int) -> int:
    """The highest of the 128 bits of a segment, in place for a slot."""
    return (segment >> 88 & (1 << 40) - 1) << LOW_BITS


def _slots(limit_segments: int) -> int:
    """Twice the segments, rounded up to a power of two."""
    return 1 << (2 * limit_segments - 1).bit_length()


def _rows(limit_segments: int) -> int:
    return -(-(limit_segments + 2) // 8) * 8


def sets_for(limit_segments: int) -> int:
    return min(limit_segments, MAX_SETS)


def _table_bytes(limit_segments: int) -> int:
    size = _PAGE + 8 * _slots(limit_segments) + 9 * _rows(limit_segments)
    return -(-(size + sets_for(limit_segments) * SET_BYTES) // _PAGE) * _PAGE
