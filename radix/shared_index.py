"""The writer of a prefix index that other processes look up in: see `index_memory`."""

from radix.index import PrefixIndex
from radix.index_memory import MAX_HOLDERS, SET_BYTES, UNLISTED, IndexMemory, sets_for
from radix.index_view import IndexView

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
