"""The prefix index: which workers hold which prefix, found in a few dictionary probes.

A segment's hash identifies a whole prefix, so a node is found by its hash, and the index stores no
tokens. Each node has a bitmask of the workers that hold it:

                 a  0111                   workers 0, 1 and 2 hold `a`;
                / \\                        worker 2 also holds `b`,
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

A node is a row in columns (arrays and lists) and not an object, because of the garbage collector:
with 10^6 segments a full collection took 20 ms, and 115 ms with node objects, which also took a
tenth more memory. The one pause left is the resizing of the dictionary: tens of ms, less than once
in a million stores.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

MAX_WORKERS = 65_536
"""Workers are bits 0 to MAX_WORKERS - 1. Higher numbers are rejected, to limit a mask's size."""

_MAX_TOKENS = 2**63 - 1
_NONE = 0  # row 0 is no node: the parent of the roots, and both ends of the order


class Match(NamedTuple):
    """The workers that have the same longest match with a chain."""

    workers: int
    """A bitmask."""
    depth: int
    """The number of segments that match, at least 1."""
    tokens: int
    """The prompt tokens of these segments, as last stored."""


class PrefixIndex:
    """The segments that workers hold.

    Beyond `limit_segments`, at least 1, the least recently used is forgotten. A segment is any
    int. Impossible input is rejected, changes nothing and raises nothing.
    """

    def __init__(self, limit_segments: int = 1_000_000) -> None:
        self.limit_segments = limit_segments
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._tip = _NONE
        # The columns, by row. Masks are shared: a node reuses its parent's object if equal.
        self._segment: list[int] = [0]
        self._mask: list[int] = [0]
        self._tokens = array("q", [0])
        self._parent = array("i", [_NONE])
        self._child = array("i", [_NONE])  # the first; the others follow by `_right`
        self._left = array("i", [_NONE])
        self._right = array("i", [_NONE])
        self._older = array("i", [_NONE])
        self._newer = array("i", [_NONE])

    def __len__(self) -> int:
        return len(self._rows)

    def holds(self, worker: int, segment: int) -> bool:
        return self._mask[self._rows.get(segment, _NONE)] & _bit(worker) != 0

    def matches(self, hashes: Sequence[int]) -> list[Match]:
        """Each worker's longest match with a chain of hashes, the deepest first.

        A worker is in at most one match, and in none if it holds nothing. A lookup does not count
        as a use. O(distinct depths * log(length)).
        """
        find, mask = self._rows.get, self._mask
        found: list[Match] = []
        highest = len(hashes)
        first = find(hashes[0], _NONE) if highest else _NONE
        remaining = mask[first]
        while remaining:
            deepest, row = 1, first  # every remaining worker holds the first segment
            low = 2
            while low <= highest:
                middle = (low + highest) >> 1
                probe = find(hashes[middle - 1], _NONE)
                if mask[probe] & remaining:
                    deepest, row, low = middle, probe, middle + 1
                else:
                    highest = middle - 1
            workers = mask[row] & remaining
            found.append(Match(workers, deepest, self._tokens[row]))
            remaining ^= workers
            highest = deepest - 1
        return found

    def touch(self, hashes: Sequence[int], depth: int) -> None:
        """Marks the first `depth` segments of a chain as used, as far as any worker holds them."""
        for position in range(min(depth, len(hashes)) - 1, -1, -1):
            row = self._rows.get(hashes[position], _NONE)
            if row != _NONE:
                self._use(row)
                return

    def store(self, worker: int, parent: int | None, segment: int, tokens: int) -> bool:
        """Records that `worker` holds `segment` after `parent` (None: it begins a prompt).

        This uses the segment and its ancestors, and replaces its `tokens`.

        False, and nothing changes, if the worker does not hold `parent`; if the segment is known
        with another parent; if `worker` is not in 0..MAX_WORKERS - 1 or `tokens` not in
        0..2**63 - 1; or if the segment's own ancestors fill the whole index.
        """
        bit = _bit(worker)
        above = _NONE if parent is None else self._rows.get(parent, _NONE)
        if not bit or not 0 <= tokens <= _MAX_TOKENS:
            return False
        if parent is not None and not self._mask[above] & bit:
            return False
        row = self._rows.get(segment, _NONE)
        if row != _NONE:
            if self._parent[row] != above:
                return False
            self._use(row)
        else:
            self._use(above)
            if len(self._rows) >= self.limit_segments:
                if self._newer[_NONE] == above:
                    return False
                self._drop(self._newer[_NONE])
            row = self._add(segment, above)
        self._tokens[row] = tokens
        self._set_mask(row, self._mask[row] | bit)
        return True

    def extend(self, worker: int, segment: int) -> bool:
        """Records that `worker` holds a known segment and those above it; False if it is unknown or
        `worker` is out of range."""
        bit, row = _bit(worker), self._rows.get(segment, _NONE)
        if not bit or row == _NONE:
            return False
        missing: list[int] = []
        while row != _NONE and not self._mask[row] & bit:
            missing.append(row)
            row = self._parent[row]
        for row in reversed(missing):
            self._set_mask(row, self._mask[row] | bit)
        return True

    def remove(self, worker: int, segment: int) -> int:
        """Removes a worker from `segment` and everything below it; returns how many it lost."""
        return self._take(_bit(worker), [self._rows.get(segment, _NONE)])

    def clear(self, worker: int) -> int:
        """Removes a worker from all segments; returns how many it lost."""
        return self._take(_bit(worker), self._children(_NONE))

    def snapshot(self, worker: int) -> Iterator[tuple[int | None, int, int]]:
        """(parent, segment, tokens) of all segments that `worker` holds, parents first.

        Stored in this order in an empty index, they give the worker the same matches.
        """
        segment, parent = self._segment, self._parent
        return iter(
            [
                (segment[parent[row]] if parent[row] else None, segment[row], self._tokens[row])
                for row in self._rows_held(_bit(worker), self._children(_NONE))
            ]
        )

    def check(self) -> None:
        """Asserts the invariants, and that the columns agree. O(n)."""
        rows, parent, mask = self._rows, self._parent, self._mask
        assert len(rows) <= self.limit_segments
        assert len(rows) + len(self._free) + 1 == len(mask)
        assert mask[_NONE] == 0
        order = list(_follow(self._newer, self._newer[_NONE]))
        place = {row: index for index, row in enumerate(order)}
        assert sorted(order) == sorted(rows.values())
        assert not set(order) & set(self._free)
        for segment, row in rows.items():
            above = parent[row]
            assert self._segment[row] == segment
            assert mask[row] > 0
            assert all(parent[child] == row for child in self._children(row))
            if above != _NONE:
                assert mask[row] & ~mask[above] == 0
                assert place[row] < place[above]
        tail = order[place[self._tip] :] if self._tip != _NONE else []
        assert tail == list(_follow(parent, self._tip))
        assert sorted(self._rows_held(-1, self._children(_NONE))) == sorted(order)

    # Workers and masks

    def _rows_held(self, bits: int, rows: Iterable[int]) -> list[int]:
        """The rows among `rows` and below them that any of `bits` holds, parents first."""
        mask, first, right = self._mask, self._child, self._right
        held: list[int] = []
        ahead = [row for row in rows if mask[row] & bits]
        while ahead:
            row = ahead.pop()
            held.append(row)
            child = first[row]
            while child:
                if mask[child] & bits:
                    ahead.append(child)
                child = right[child]
        return held

    def _take(self, bit: int, rows: Iterable[int]) -> int:
        held = self._rows_held(bit, rows)
        for row in held:
            self._set_mask(row, self._mask[row] ^ bit)
        for row in reversed(held):
            if not self._mask[row]:
                self._drop(row)
        return len(held)

    def _set_mask(self, row: int, mask: int) -> None:
        above = self._mask[self._parent[row]]
        self._mask[row] = above if above == mask else mask

    # The tree

    def _children(self, row: int) -> Iterator[int]:
        return _follow(self._right, self._child[row])

    def _add(self, segment: int, parent: int) -> int:
        """Adds a leaf without workers below `parent`, the tip. The leaf becomes the tip."""
        if self._free:
            row = self._free.pop()
            self._segment[row] = segment
        else:
            row = len(self._segment)
            self._segment.append(segment)
            self._mask.append(0)
            for column in (self._parent, self._child, self._left, self._right):
                column.append(_NONE)
            for column in (self._older, self._newer, self._tokens):
                column.append(_NONE)
        self._rows[segment] = row
        self._parent[row] = parent
        sibling = self._child[parent]
        self._child[parent] = row
        self._left[row], self._right[row] = _NONE, sibling
        if sibling != _NONE:
            self._left[sibling] = row
        self._insert(row, row, parent)
        self._tip = row
        return row

    def _drop(self, row: int) -> None:
        """Removes a leaf from the tree and the order."""
        parent, left, right = self._parent[row], self._left[row], self._right[row]
        if left != _NONE:
            self._right[left] = right
        else:
            self._child[parent] = right
        if right != _NONE:
            self._left[right] = left
        self._unlink(row, row)
        if self._tip == row:
            self._tip = parent
        del self._rows[self._segment[row]]
        self._segment[row] = self._mask[row] = 0
        self._free.append(row)

    # The order

    def _use(self, row: int) -> None:
        """Moves `row`, the new tip, and its ancestors to the young end, each before its parent."""
        parent, newer = self._parent, self._newer
        if row == self._tip:
            return
        end = self._tip if parent[row] == self._tip else _NONE  # the tip is in place already
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
        """Inserts a run into the order, just before `after` (_NONE: at the young end)."""
        before = self._older[after]
        self._newer[before], self._older[oldest] = oldest, before
        self._newer[newest], self._older[after] = after, newest


def _follow(column: Sequence[int], row: int) -> Iterator[int]:
    """A row, and the rows that a column leads to from there."""
    while row != _NONE:
        yield row
        row = column[row]


def _bit(worker: int) -> int:
    return 1 << worker if 0 <= worker < MAX_WORKERS else 0
