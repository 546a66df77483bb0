r"""The prefix index: which workers hold which prefix, found in a few probes.

A segment's hash identifies a whole prefix, so a node is found by its hash, and the index stores no
tokens. Each node has a bitmask of the workers that hold it:

                 a  0111                   workers 0, 1 and 2 hold `a`;
                / \                        worker 2 also holds `b`,
         0100  b   c  0011                 0 and 1 hold `c`,
               |   |                       and worker 1 alone holds `d` and `e`
         0100  f   d  0010
                   |
                   e  0010                 matches(a c d e x) = e: {1}, c: {0}, a: {2}

A worker that holds a prefix holds the shorter ones too, so along a chain of hashes a mask only
loses bits. Hence `matches` bisects: it finds the deepest node that any of the remaining workers
holds, removes the workers that hold it, and continues above it. That is log2(length) probes for
each distinct depth, however many workers there are.

All nodes are also in one order, from the least to the most recently used:

    oldest  f b | e d c a  youngest        the oldest is forgotten first

Using a node moves it and its ancestors to the young end, the deepest first, so a parent is always
younger than its children. Then the oldest node is a leaf, and forgetting it is O(1). A chain is
used repeatedly, so its nodes are adjacent in the order, and a use moves a few runs instead of every
node. Segments are stored in chain order, each next to the one before (the tip), in O(1).

Invariants, asserted by `check`:
  1. a mask is not 0, and a child's is a subset of its parent's
  2. in the order, each node appears once, before its parent
  3. from the tip to the young end there are exactly the tip and its ancestors
  4. there are no more nodes than the limit

A node is a row in columns (arrays of numbers) and not an object. That takes a third of the memory,
and nothing of it is visited by the garbage collector, which took 115 ms for 10^6 node objects. The
columns that lookups need are in a table that never grows (`index_memory`), so no store waits until
a larger one is filled. What workers hold is a number: one worker, or one of the sets that exist.

`Rows` stores the tree and the order, to which no worker matters. A row is a number in each of the
columns. A segment is found by the lowest 64 bits of its hash; the highest are stored, too, for
callers that need the whole hash.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

from radix.index_memory import (
    COUNT,
    HALF,
    MAX_HOLDERS,
    MAX_TOKENS,
    MAX_WORKERS,
    PROBES,
    SET_BYTES,
    UNLISTED,
    IndexMemory,
    IndexView,
    Match,
    Table,
    matches_in,
    private_table,
    sets_for,
)

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
        pages = (self._slots[at : at + 2048] for at in range(0, len(self._slots), 2048))
        written = (page for page in pages if page.tobytes() != bytes(page.nbytes))
        used = [row for page in written for row in page if row]
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


class PrefixIndex(Rows):
    """The segments that workers hold.

    Beyond `limit_segments`, at least 1, the least recently used is forgotten. A segment is a hash
    of 128 bits, and known by its lowest 64. Impossible input is rejected, changes nothing and
    raises nothing.
    """

    most_workers = MAX_WORKERS

    def __init__(self, limit_segments: int = 1_000_000, table: Table | None = None) -> None:
        """table: an empty one; without it, the index makes one of its own."""
        super().__init__(table or private_table(limit_segments))
        self.limit_segments = limit_segments
        # Sets of two workers or more, by number, and how many rows have each.
        self._sets: list[int] = []
        self._set_numbers: dict[int, int] = {}
        self._set_users = array("q")
        self._free_sets: list[int] = []

    def holds(self, worker: int, segment: int) -> bool:
        return worker >= 0 and self._is_held(self._row(segment), worker)

    def matches(self, hashes: Sequence[int]) -> list[Match]:
        """Each worker's longest match with a chain of hashes, the deepest first: `matches_in`."""
        return matches_in(self._table, self._mask_of, hashes)

    def touch(self, hashes: Sequence[int], depth: int) -> None:
        """Marks the first `depth` segments of a chain as used, as far as any worker holds them."""
        for position in range(min(depth, len(hashes)) - 1, -1, -1):
            if row := self._row(hashes[position]):
                self._use(row)
                return

    def store(self, worker: int, parent: int | None, segment: int, tokens: int) -> bool:
        """Records that `worker` holds `segment` after `parent` (None: it begins a prompt).

        This uses the segment and its ancestors, and replaces its `tokens`.

        False, and nothing changes, if the worker does not hold `parent`; if the segment is known
        with another parent; if `worker` or `tokens` is out of range; or if the segment's own
        ancestors fill the whole index. False also if the table has no slot for it.
        """
        if not 0 <= worker < self.most_workers or not 0 <= tokens <= MAX_TOKENS:
            return False
        above = NONE
        if parent is not None:
            above = self._row(parent)
            if not self._is_held(above, worker):
                return False
        row = self._row(segment)
        if row != NONE:
            if self._parent[row] != above:
                return False
            self._use(row)
            self._tokens[row] = tokens
            if not self._is_held(row, worker):
                self._set_mask(row, self._mask(row) | 1 << worker)
            return True
        self._use(above)
        if self._count >= self.limit_segments:
            if self._newer[NONE] == above:
                return False
            self._drop(self._newer[NONE])
        row = self._add(segment, above)
        if row == NONE:
            return False
        self._tokens[row] = tokens
        self._holders[row] = worker + 1
        return True

    def store_chain(
        self, worker: int, parent: int | None, halves: "array[int]", tokens: Sequence[int]
    ) -> int:
        """Stores segments, each the parent of the next; returns how many were stored.
        It ends at the first that is rejected. Segments that no worker holds yet are added together,
        which takes less time. halves: of each segment, the highest and the lowest 64 bits."""
        grows = bool(tokens) and min(tokens) >= 0 and max(tokens) <= MAX_TOKENS
        stored, count = 0, len(tokens)
        while stored < count:
            if grows and (added := self._store_new(worker, parent, halves, tokens, stored)):
                stored += added
            elif self.store(worker, parent, whole(halves, stored), tokens[stored]):
                stored += 1
            else:
                break
            parent = halves[2 * stored - 1]
        return stored

    def _store_new(
        self,
        worker: int,
        parent: int | None,
        halves: "array[int]",
        tokens: Sequence[int],
        begin: int,
    ) -> int:
        """Adds those after `begin` together, up to one that somebody holds or as many as there is
        room for; returns how many."""
        room = self.limit_segments - self._count
        if self._free or room <= 0 or not 0 <= worker < self.most_workers:
            return 0
        above = NONE if parent is None else self._row(parent)
        if parent is not None and not self._is_held(above, worker):
            return 0
        if self._row(halves[2 * begin + 1]):
            return 0
        end = begin + room
        return self._grow(worker + 1, above, halves[2 * begin : 2 * end], tokens[begin:end])

    def extend(self, worker: int, segment: int) -> bool:
        """Records that `worker` holds a known segment and those above it; False if it is unknown or
        `worker` is out of range."""
        row = self._row(segment)
        if not 0 <= worker < self.most_workers or row == NONE:
            return False
        missing: list[int] = []
        while row != NONE and not self._is_held(row, worker):
            missing.append(row)
            row = self._parent[row]
        for row in reversed(missing):
            self._set_mask(row, self._mask(row) | 1 << worker)
        return True

    def remove(self, worker: int, segment: int) -> int:
        """Removes a worker from `segment` and everything below it; returns how many it lost."""
        return self._take(worker, [self._row(segment)])

    def clear(self, worker: int) -> int:
        """Removes a worker from all segments; returns how many it lost."""
        return self._take(worker, self._children(NONE))

    def snapshot(self, worker: int) -> Iterator[tuple[int | None, int, int]]:
        """(parent, segment, tokens) of all segments that `worker` holds, parents first.

        Stored in this order in an empty index, they give the worker the same matches.
        """
        parent, held = self._parent, self._held(worker, self._children(NONE))
        above = (self._whole(parent[row]) if parent[row] else None for row in held)
        tokens = (self._tokens[row] for row in held)
        return iter([*zip(above, map(self._whole, held), tokens, strict=True)])

    def check(self) -> None:
        """Asserts the invariants, and that the columns agree. O(n)."""
        super().check()
        order, parent = self._order(), self._parent
        assert len(order) <= self.limit_segments
        for row in order:
            assert self._mask(row) > 0
            assert parent[row] == NONE or self._mask(row) & ~self._mask(parent[row]) == 0
        codes = [self._holders[row] for row in order]
        for number, mask in enumerate(self._sets):
            users = codes.count(MAX_WORKERS + 1 + number)
            assert self._set_users[number] == users
            assert (number in self._free_sets) is not bool(users)
            assert not users or self._set_numbers[mask] == number

    # Workers and masks

    def _is_held(self, row: int, worker: int) -> bool:
        code = self._holders[row]
        return code == worker + 1 or (
            code > MAX_WORKERS and self._sets[code - MAX_WORKERS - 1] >> worker & 1 == 1
        )

    def _mask(self, row: int) -> int:
        return self._mask_of(self._holders[row])

    def _mask_of(self, code: int) -> int:
        return 1 << code >> 1 if code <= MAX_WORKERS else self._sets[code - MAX_WORKERS - 1]

    def _held(self, worker: int, rows: Iterable[int]) -> list[int]:
        """The rows among `rows` and below them that a worker holds, parents first."""
        if not 0 <= worker < self.most_workers:
            return []
        is_held, first, right = self._is_held, self._child, self._right
        held: list[int] = []
        ahead = [row for row in rows if is_held(row, worker)]
        while ahead:
            row = ahead.pop()
            held.append(row)
            child = first[row]
            while child:
                if is_held(child, worker):
                    ahead.append(child)
                child = right[child]
        return held

    def _take(self, worker: int, rows: Iterable[int]) -> int:
        held = self._held(worker, rows)
        for row in held:
            if self._holders[row] != worker + 1:
                self._set_mask(row, self._mask(row) ^ 1 << worker)
        for row in reversed(held):
            if self._holders[row] == worker + 1:
                self._drop(row)
        return len(held)

    def _set_mask(self, row: int, mask: int) -> None:
        before = self._holders[row]
        code = mask.bit_length() if not mask & (mask - 1) else self._set_code(mask)
        self._holders[row] = code
        self._release_set(before)

    def _set_code(self, mask: int) -> int:
        """The code of a set of workers, which one more row will have."""
        number = self._set_numbers.get(mask)
        if number is None:
            if self._free_sets:
                number = heappop(self._free_sets)
                self._sets[number] = mask
            else:
                number = len(self._sets)
                self._sets.append(mask)
                self._set_users.append(0)
            self._set_numbers[mask] = number
            self._new_set(number, mask)
        self._set_users[number] += 1
        return MAX_WORKERS + 1 + number

    def _new_set(self, number: int, mask: int) -> None:
        """A set has got a number."""

    def _release_set(self, code: int) -> None:
        number = code - MAX_WORKERS - 1
        if number >= 0:
            self._set_users[number] -= 1
            if not self._set_users[number]:
                del self._set_numbers[self._sets[number]]
                heappush(self._free_sets, number)

    def _drop(self, row: int) -> None:
        code = self._holders[row]
        super()._drop(row)
        if code > MAX_WORKERS:
            self._release_set(code)


# At most so many rows that readers used are passed over before one is forgotten.
_SECOND_CHANCES = 16


class SharedIndex(PrefixIndex):
    """A prefix index whose lookups other processes make, too. One at a time may write a memory."""

    most_workers = MAX_HOLDERS

    def __init__(self, memory: IndexMemory) -> None:
        self._memory = memory
        self._number = memory.begin()
        super().__init__(memory.limit_segments, memory.tables[self._number])

    def publish(self) -> None:
        """Lets all processes look up here from now on. Call it once the index is complete."""
        self._memory.publish(self._number)

    def store(self, worker: int, parent: int | None, segment: int, tokens: int) -> bool:
        if len(self) >= self.limit_segments:
            self._use_what_readers_used()
        return super().store(worker, parent, segment, tokens)

    def _use_what_readers_used(self) -> None:
        used = self._table.used
        for _ in range(_SECOND_CHANCES):
            oldest = self._newer[0]
            if not used[oldest]:
                return
            used[oldest] = 0
            self._use(oldest)

    def _new_set(self, number: int, mask: int) -> None:
        if number < sets_for(self.limit_segments):
            at = number * SET_BYTES
            self._table.sets[at : at + SET_BYTES] = mask.to_bytes(SET_BYTES, "little")
        else:  # readers find no holders there
            self._table.header[UNLISTED] += 1

    def check(self) -> None:
        """Asserts the invariants, and that a view finds the same. O(n)."""
        super().check()
        view = IndexView(self._memory, self._table)
        assert len(view) == len(self)
        if not self.unlisted:
            for segment in map(self._whole, self._order()):
                assert view.holders(segment) == self._mask(self._row(segment))
