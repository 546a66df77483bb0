"""The prefix index: which workers hold which prefix, found in a few probes.

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

A node is a row in columns (arrays of numbers) and not an object. That takes a third of the memory,
and nothing of it is visited by the garbage collector, which took 115 ms for 10^6 node objects. The
columns that lookups need are in a table that never grows (`index_memory`), so no store waits until
a larger one is filled. What workers hold is a number: one worker, or one of the sets that exist.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

from radix.index_memory import MAX_TOKENS, MAX_WORKERS, Table, private_table
from radix.index_rows import NONE, Rows, whole
from radix.index_view import Match, matches_in


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
