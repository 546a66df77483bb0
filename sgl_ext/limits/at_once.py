"""How many requests of each key run at once in a balancer.

With several processes the counts are in memory that they share, so that the limit holds for all of
them together, to the request. Each process has a cell of its own for each key; a cell is written by
its process alone, and cleared by the next process of the same number.

    slot n    hash of the key's name | a cell for each process
"""

import fcntl
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import xxhash

SLOTS = 1024
"""Keys with a limit whose counts processes share; beyond it each process counts for itself."""
PROCESSES = 64
SIZE_BYTES = SLOTS * 8 + SLOTS * PROCESSES * 4


@contextmanager
def locked(file: int) -> Iterator[None]:
    """No other process of the group is here meanwhile. A process that dies gives its lock back."""
    fcntl.lockf(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN)


class RequestsAtOnce:
    """The counts of one process alone."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()

    def enter(self, key: str, limit: int) -> bool:
        """Whether another request of this key may run; then it counts until `leave`."""
        if self._running[key] >= limit:
            return False
        self._running[key] += 1
        return True

    def leave(self, key: str) -> None:
        """A request that entered has ended."""
        self._running[key] -= 1
        if self._running[key] <= 0:
            del self._running[key]


class SharedRequestsAtOnce(RequestsAtOnce):
    """The counts of a group of processes.

    buffer: SIZE_BYTES that all share, zeros at first. file: its lock keeps others out. process:
    the number of this one.
    """

    def __init__(self, buffer: memoryview, file: int, process: int) -> None:
        super().__init__()
        self._names = buffer[: SLOTS * 8].cast("Q")
        self._cells = buffer[SLOTS * 8 : SIZE_BYTES].cast("I")
        self._file, self._process = file, process
        self._slots: dict[str, int] = {}
        with locked(self._file):
            for slot in range(SLOTS):
                self._cells[slot * PROCESSES + process] = 0

    def enter(self, key: str, limit: int) -> bool:
        with locked(self._file):
            slot = self._slot_of(key)
            if slot is not None:
                cells = self._cells[slot * PROCESSES : (slot + 1) * PROCESSES]
                if sum(cells) >= limit:
                    return False
                cells[self._process] += 1
                self._slots[key] = slot
                self._running[key] += 1
                return True
        return super().enter(key, limit)

    def leave(self, key: str) -> None:
        slot = self._slots.get(key)
        if slot is not None:
            self._cells[slot * PROCESSES + self._process] -= 1
        super().leave(key)
        if key not in self._running:
            self._slots.pop(key, None)

    def _slot_of(self, key: str) -> int | None:
        """The key's slot, or a free one: one whose key has no request in any process."""
        name = xxhash.xxh3_64_intdigest(key.encode())
        if (slot := self._slots.get(key)) is not None:
            return slot
        if key in self._running:  # it began without a slot
            return None
        free = None
        for slot, other in enumerate(self._names):
            is_used = any(self._cells[slot * PROCESSES : (slot + 1) * PROCESSES])
            if other == name and is_used:
                return slot
            if free is None and not is_used:
                free = slot
        if free is not None:
            self._names[free] = name
        return free
