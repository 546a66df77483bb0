"""The writer of a prefix index that other processes look up in: see `index_memory`."""

from array import array

from radix.index import PrefixIndex
from radix.index_memory import (
    COUNT,
    LOW,
    LOW_BITS,
    MAX_HOLDERS,
    MAX_TOKENS,
    PROBES,
    SET_BYTES,
    UNLISTED,
    IndexMemory,
    sets_for,
    tag_of,
)
from radix.index_view import IndexView

_HOLDER_BITS = (1 << MAX_HOLDERS) - 1
# At most so many rows that readers used are passed over before one is forgotten.
_SECOND_CHANCES = 16


class SharedIndex(PrefixIndex):
    """A prefix index whose lookups other processes make, too. One at a time may write a memory."""

    def __init__(self, memory: IndexMemory) -> None:
        super().__init__(memory.limit_segments)
        self._memory = memory
        self._number = memory.begin()
        self._table = table = memory.tables[self._number]
        self._slots, self._words, self._used = table.slots, table.rows, table.used
        self._last = table.last
        self._set_numbers: dict[int, int] = {}
        self._sets: list[int] = []
        self._set_users = array("q")
        self._free_sets: list[int] = []

    def publish(self) -> None:
        """Lets all processes look up here from now on. Call it once the index is complete."""
        self._memory.publish(self._number)

    @property
    def unlisted(self) -> int:
        """How often a segment or some of its holders could not be written to the memory."""
        return self._table.header[UNLISTED]

    def store(self, worker: int, parent: int | None, segment: int, tokens: int) -> bool:
        if len(self._rows) >= self.limit_segments:
            self._use_what_readers_used()
        return super().store(worker, parent, segment, tokens)

    def _use_what_readers_used(self) -> None:
        for _ in range(_SECOND_CHANCES):
            oldest = self._newer[0]
            if not self._used[oldest]:
                return
            self._used[oldest] = 0
            self._use(oldest)

    def _set_mask(self, row: int, mask: int) -> None:
        super()._set_mask(row, mask)
        before = self._words[row] & LOW
        code = self._code(mask & _HOLDER_BITS)
        self._words[row] = min(self._tokens[row], MAX_TOKENS) << LOW_BITS | code
        self._release(before)

    def _add(self, segment: int, parent: int) -> int:
        row = super()._add(segment, parent)
        self._table.header[COUNT] = len(self._rows)
        slots, last, place = self._slots, self._last, segment & self._last
        for _ in range(PROBES):
            if not slots[place]:
                slots[place] = tag_of(segment) | row
                break
            place = place + 1 & last
        else:
            self._table.header[UNLISTED] += 1
        return row

    def _drop(self, row: int) -> None:
        place = self._place(row)
        before, self._words[row] = self._words[row] & LOW, 0
        self._used[row] = 0
        self._release(before)
        if place is not None:
            self._close_gap(place)
        super()._drop(row)
        self._table.header[COUNT] = len(self._rows)

    # Slots

    def _place(self, row: int) -> int | None:
        place = self._segment[row] & self._last
        for _ in range(PROBES):
            if self._slots[place] & LOW == row:
                return place
            place = place + 1 & self._last
        return None

    def _close_gap(self, gap: int) -> None:
        """Empties a slot, and moves back those after it that no lookup would reach across the gap.
        A reader sees a moved one twice for a moment, rather than never."""
        slots, last = self._slots, self._last
        steps = 0
        while steps < PROBES:
            steps += 1
            place = gap + steps & last
            word = slots[place]
            if not word:
                break
            first = self._segment[word & LOW] & last
            if (place - first & last) >= steps:
                slots[gap] = word
                gap, steps = place, 0
        slots[gap] = 0

    # Sets of workers

    def _code(self, mask: int) -> int:
        """The holders of a row, as a number; those of a set count one user more."""
        if not mask & (mask - 1):
            return mask.bit_length()
        number = self._set_numbers.get(mask)
        if number is None:
            if self._free_sets:
                number = self._free_sets.pop()
                self._sets[number] = mask
            elif len(self._sets) < sets_for(self.limit_segments):
                number = len(self._sets)
                self._sets.append(mask)
                self._set_users.append(0)
            else:
                self._table.header[UNLISTED] += 1
                return (mask & -mask).bit_length()
            self._set_numbers[mask] = number
            at = number * SET_BYTES
            self._table.sets[at : at + SET_BYTES] = mask.to_bytes(SET_BYTES, "little")
        self._set_users[number] += 1
        return MAX_HOLDERS + 1 + number

    def _release(self, code: int) -> None:
        number = code - MAX_HOLDERS - 1
        if number >= 0:
            self._set_users[number] -= 1
            if not self._set_users[number]:
                del self._set_numbers[self._sets[number]]
                self._free_sets.append(number)

    def check(self) -> None:
        """Asserts the invariants, and that a view finds the same. O(n)."""
        super().check()
        table = self._table
        assert table.header[COUNT] == len(self)
        listed = [word & LOW for word in table.slots if word]
        assert len(listed) == len(set(listed)) <= len(self)
        assert set(listed) <= set(self._rows.values())
        assert len(listed) + table.header[UNLISTED] >= len(self)
        users = [self._words[row] & LOW for row in self._rows.values()]
        for number, mask in enumerate(self._sets):
            count = users.count(MAX_HOLDERS + 1 + number)
            assert self._set_users[number] == count
            assert (number in self._free_sets) is not bool(count)
            assert not count or self._set_numbers[mask] == number
        view = IndexView(self._memory, table)
        for segment, row in self._rows.items():
            if row in listed and not table.header[UNLISTED]:
                assert view.holders(segment) == self._mask[row] & _HOLDER_BITS
