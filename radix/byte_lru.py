"""What was made of parts of requests, the most recently used of it, within a bound of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

Made = TypeVar("Made")

# What an entry takes beside what it is counted as: a key, a tuple, their place in the table.
ENTRY_BYTES = 600


class Parts(Generic[Made]):
    """What was made, by what it was made of. Several threads may use it at once.

    Of more than `limit_bytes`, what was not used for longest is forgotten.
    entry_bytes: what an entry takes beside what it is counted as.
    """

    def __init__(self, limit_bytes: int, entry_bytes: int = ENTRY_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._entry_bytes = entry_bytes
        self.used_bytes = 0
        self._made: OrderedDict[Hashable, tuple[Made, int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._made)

    def find(self, key: Hashable) -> Made | None:
        """What was made of it, if that is known."""
        with self._lock:
            found = self._made.get(key)
            if found is None:
                return None
            self._made.move_to_end(key)
        return found[0]

    def keep(self, key: Hashable, made: Made, size_bytes: int) -> None:
        """Remembers it, unless it alone is more than the bound."""
        with self._lock:
            if key not in self._made:
                self._put(key, made, size_bytes)

    def replace(self, key: Hashable, made: Made, size_bytes: int) -> None:
        """Remembers it in place of what was known; neither, if it alone is more than the bound."""
        with self._lock:
            _, gone = self._made.pop(key, (None, 0))
            self.used_bytes -= gone
            self._put(key, made, size_bytes)

    def _put(self, key: Hashable, made: Made, size_bytes: int) -> None:
        size = self._entry_bytes + size_bytes
        if size > self.limit_bytes:
            return
        self._made[key] = made, size
        self.used_bytes += size
        while self.used_bytes > self.limit_bytes:
            _, (_, gone) = self._made.popitem(last=False)
            self.used_bytes -= gone

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._made.clear()
            self.used_bytes = 0

    def check(self) -> None:
        """Asserts that what is counted is what is there, and within the bound."""
        assert self.used_bytes == sum(size for _, size in self._made.values()) <= self.limit_bytes
