"""What the processes of one balancer share in memory: the prefix index, and the slots of workers.

The first process makes it before it forks the others, so they inherit it, and it ends with the
last of them. Process 0 writes the index; all look up in it.
"""

import mmap
import os

import xxhash

from radix.index_memory import MAX_HOLDERS, IndexMemory
from sgl_ext.balancer.routing.prefixes import Prefixes
from sgl_ext.balancer.routing.workers import Slots
from sgl_ext.limits import at_once
from sgl_ext.limits.at_once import SharedRequestsAtOnce, locked

_WRITER = 0
_SLOT_BYTES = 24 * MAX_HOLDERS


class GroupMemory:
    """Memory for an index of at most `limit_segments`, and for its workers' slots."""

    def __init__(self, limit_segments: int) -> None:
        self._file = os.memfd_create("sgl-ext-balancer")
        size = IndexMemory.size_bytes(limit_segments)
        whole = size + _SLOT_BYTES + at_once.SIZE_BYTES
        os.ftruncate(self._file, whole)
        self._mapped = mmap.mmap(self._file, whole)
        self._buffer = memoryview(self._mapped)
        self.index = IndexMemory(self._buffer[:size], limit_segments, self._erase)
        self._slot_words = self._buffer[size : size + _SLOT_BYTES].cast("Q")
        self._at_once = self._buffer[size + _SLOT_BYTES :]

    def open(self, process: int) -> tuple[Slots, Prefixes]:
        """The slots and the index, for the process with this number."""
        return self.slots(process), Prefixes(self.index, writes=process == _WRITER)

    def slots(self, process: int) -> "GroupSlots":
        """The slots, for the process with this number. What an earlier process of the same number
        had taken is given back."""
        return GroupSlots(self._slot_words, self._file, process)

    def requests_at_once(self, process: int) -> SharedRequestsAtOnce:
        """How many requests of each key run in all processes, for the one with this number."""
        return SharedRequestsAtOnce(self._at_once, self._file, process)

    def _erase(self, at: int, size: int) -> None:
        try:
            self._mapped.madvise(mmap.MADV_REMOVE, at, size)  # gives the pages back, too
        except OSError:
            self._buffer[at : at + size] = bytes(size)


class GroupSlots(Slots):
    """Slots that are the same in all processes of a group. A slot is free again after the worker
    has left in each of them.

        slot n    hash of the worker's name | its processes, a bit each | those that find it ready

    A worker beyond MAX_HOLDERS gets a slot of this process's own, which the index does not know.
    """

    def __init__(self, words: memoryview, file: int, process: int) -> None:
        super().__init__()
        self._names, self._users = words[:MAX_HOLDERS], words[MAX_HOLDERS : 2 * MAX_HOLDERS]
        self._finders = words[2 * MAX_HOLDERS :]
        self._file = file
        self._mine = 1 << process
        with locked(self._file):
            for slot in range(MAX_HOLDERS):
                self._users[slot] &= ~self._mine
                self._finders[slot] &= ~self._mine

    def take(self, worker: str) -> int:
        name = xxhash.xxh3_64_intdigest(worker.encode())
        with locked(self._file):
            slots = [*zip(self._names, self._users, strict=True)]
            known = (slot for slot, (other, users) in enumerate(slots) if users and other == name)
            free = (slot for slot, (_, users) in enumerate(slots) if not users)
            slot = next(known, None)
            if slot is None:
                slot = next(free, None)
            if slot is not None:
                self._names[slot] = name
                self._users[slot] |= self._mine
                return slot
        return MAX_HOLDERS + super().take(worker)

    def give_back(self, slot: int) -> None:
        if slot >= MAX_HOLDERS:
            super().give_back(slot - MAX_HOLDERS)
            return
        with locked(self._file):
            self._users[slot] &= ~self._mine
            self._finders[slot] &= ~self._mine

    def mark(self, slot: int, *, ready: bool) -> None:
        if slot >= MAX_HOLDERS:
            super().mark(slot - MAX_HOLDERS, ready=ready)
        elif ready is not bool(self._finders[slot] & self._mine):
            with locked(self._file):
                self._finders[slot] ^= self._mine

    def all_ready(self, slot: int) -> bool:
        if slot >= MAX_HOLDERS:
            return super().all_ready(slot - MAX_HOLDERS)
        return not self._users[slot] & ~self._finders[slot]
