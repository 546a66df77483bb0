"""The rows of a prefix index: a tree of segments, in one order from the least to the most recently
used. `index` says what both are for; here is how they are stored, and what no worker matters to.

A row is a number in each of the columns. Those that lookups need are in a table
that never grows (`index_memory`), so no store waits until a larger one is filled. A segment is
found by the lowest 64 bits of its hash; the highest are kept for those who want it whole.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence

from radix.index_memory import COUNT, HALF, PROBES, UNLISTED, Table

NONE = 0
"""No row: the parent of the roots, and both ends of the order."""


class Rows:
    """The columns, and what changes them."""

    def __init__(self, table: Table) -> None:
        """table: an empty one."""
        self._table = table
        self._slots, self._low = table.slots, table.low
        self._holders, self._tokens = table.holders, table.tokens
        self._last, self._row = table.last, table.row
        self._count = 0
        self._free: list[int] = []
        self._tip = NONE
        self._high = array("Q", [0])
        self._parent = array("i", [NONE])
        self._child = array("i", [NONE])  # the first; the others follow by `_right`
        self._left = array("i", [NONE])
        self._right = array("i", [NONE])
        self._older = array("i", [NONE])
        self._newer = array("i", [NONE])
        links = self._parent, self._child, self._left, self._right, self._older, self._newer
        self._columns = self._high, *links

    def __len__(self) -> int:
        return self._count

    @property
    def unlisted(self) -> int:
        """How often a segment or its holders could not be written to the table."""
        return self._table.header[UNLISTED]

    def check(self) -> None:
        """Asserts that the columns agree, and the invariants of the order. O(n)."""
        parent = self._parent
        order = self._order()
        place = {row: index for index, row in enumerate(order)}
        assert len(order) == self._count == self._table.header[COUNT]
        assert sorted([*order, *self._free]) == [*range(1, len(self._high))]
        assert self._holders[NONE] == 0
        pages = (self._slots[at : at + 512] for at in range(0, len(self._slots), 512))
        used = [row for page in pages if page.tobytes().strip(b"\0") for row in page if row]
        assert sorted(used) == sorted(order)
        for row in order:
            assert self._row(self._low[row]) == row
            assert all(parent[child] == row for child in self._children(row))
            assert parent[row] == NONE or place[row] < place[parent[row]]
        tail = order[place[self._tip] :] if self._tip != NONE else []
        assert tail == list(_follow(parent, self._tip))

    def _order(self) -> list[int]:
        return list(_follow(self._newer, self._newer[NONE]))

    def _whole(self, row: int) -> int:
        return self._high[row] << 64 | self._low[row]

    # The tree

    def _children(self, row: int) -> Iterator[int]:
        return _follow(self._right, self._child[row])

    def _add(self, segment: int, parent: int) -> int:
        """Adds a leaf without workers below `parent`, the tip. The leaf becomes the tip. NONE if
        the table has no slot for it."""
        place = self._free_slot(segment)
        if place is None:
            self._table.header[UNLISTED] += 1
            return NONE
        if self._free:
            row = self._free.pop()
        else:
            row = len(self._high)
            for column in self._columns:
                column.append(0)
        self._high[row], self._low[row] = segment >> 64 & HALF, segment & HALF
        self._slots[place] = row
        self._count += 1
        self._table.header[COUNT] = self._count
        self._parent[row] = parent
        self._hang(row, parent)
        self._insert(row, row, parent)
        self._tip = row
        return row

    def _grow(self, code: int, parent: int, halves: "array[int]", tokens: Sequence[int]) -> int:
        """Adds a chain of leaves below `parent`, as far as they are unknown and find slots; returns
        how many. The last becomes the tip. code: their holders. No row may be free."""
        slots, last, lows = self._slots, self._last, halves[1::2]
        row = first = len(self._high)
        self._low[first : first + len(lows)] = lows  # no slot leads there yet
        for segment in lows:
            place = segment & last
            if slots[place]:
                free = self._free_slot(segment)
                if free is None or self._row(segment):
                    break
                place = free
            slots[place] = row
            row += 1
        count = row - first
        if not count:
            return 0
        self._use(parent)
        self._high.extend(halves[: 2 * count : 2])
        self._tokens[first:row] = array("I", tokens[:count])
        self._holders[first:row] = array("I", [code]) * count
        own = array("i", range(first, row))
        for column in (self._parent, self._newer):
            column.append(parent)
            column.extend(own[:-1])
        for column in (self._child, self._older):
            column.extend(own[1:])
            column.append(NONE)
        for column in (self._left, self._right):
            column.extend(array("i", [NONE]) * count)
        self._count += count
        self._table.header[COUNT] = self._count
        self._hang(first, parent)
        self._insert(row - 1, first, parent)
        self._tip = row - 1
        return count

    def _hang(self, row: int, parent: int) -> None:
        """Makes a row the first child of its parent."""
        sibling = self._child[parent]
        self._child[parent] = row
        self._left[row], self._right[row] = NONE, sibling
        if sibling != NONE:
            self._left[sibling] = row

    def _drop(self, row: int) -> None:
        """Removes a leaf from the tree and the order."""
        parent, left, right = self._parent[row], self._left[row], self._right[row]
        if left != NONE:
            self._right[left] = right
        else:
            self._child[parent] = right
        if right != NONE:
            self._left[right] = left
        self._unlink(row, row)
        if self._tip == row:
            self._tip = parent
        self._holders[row] = 0
        self._table.used[row] = 0
        self._empty_slot(row)
        self._free.append(row)
        self._count -= 1
        self._table.header[COUNT] = self._count

    # Slots

    def _free_slot(self, segment: int) -> int | None:
        slots, last = self._slots, self._last
        place = segment & last
        end = place + PROBES
        while slots[place & last]:
            place += 1
            if place == end:
                return None
        return place & last

    def _empty_slot(self, row: int) -> None:
        """Empties a row's slot, and moves back those after it that no lookup would reach across the
        gap. A reader sees a moved one twice for a moment, rather than never."""
        slots, last = self._slots, self._last
        gap = self._low[row] & last
        while slots[gap] != row:
            gap = gap + 1 & last
        steps = 0
        while steps < PROBES:
            steps += 1
            place = gap + steps & last
            moved = slots[place]
            if not moved:
                break
            if (place - self._low[moved] & last) >= steps:
                slots[gap] = moved
                gap, steps = place, 0
        slots[gap] = 0

    # The order

    def _use(self, row: int) -> None:
        """Moves `row`, the new tip, and its ancestors to the young end, each before its parent."""
        parent, newer = self._parent, self._newer
        if row == self._tip:
            return
        end = self._tip if parent[row] == self._tip else NONE  # the tip is in place already
        self._tip = row
        while row != end:
            oldest = row
            while newer[row] == parent[row] != end:
                row = parent[row]
            if newer[row] != end:
                self._unlink(oldest, row)
                self._insert(oldest, row, end)
            row = parent[row]

    def _unlink(self, oldest: int, newest: int) -> None:
        """Removes a run from the order."""
        before, after = self._older[oldest], self._newer[newest]
        self._newer[before], self._older[after] = after, before

    def _insert(self, oldest: int, newest: int, after: int) -> None:
        """Inserts a run into the order, just before `after` (NONE: at the young end)."""
        before = self._older[after]
        self._newer[before], self._older[oldest] = oldest, before
        self._newer[newest], self._older[after] = after, newest


def _follow(column: Sequence[int], row: int) -> Iterator[int]:
    """A row, and the rows that a column leads to from there."""
    while row != NONE:
        yield row
        row = column[row]


def halves_of(segments: Iterable[int]) -> "array[int]":
    """The highest and the lowest 64 bits of each segment."""
    return array("Q", [half for s in segments for half in (s >> 64 & HALF, s & HALF)])


def whole(halves: "array[int]", place: int) -> int:
    """The segment at a place of `halves_of`."""
    return halves[2 * place] << 64 | halves[2 * place + 1]
