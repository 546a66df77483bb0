"""An LRU cache bounded by bytes."""

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")

# The memory of an entry without its key's and its value's data: objects and their table slots.
ENTRY_BYTES = 600


class ByteLRU(Generic[Value]):
    """At most `limit_bytes` of values; the least recently used are evicted first.

    Each entry counts as `entry_bytes` and the size that its caller gives. Thread-safe.
    """

    def __init__(self, limit_bytes: int, entry_bytes: int = ENTRY_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._entry_bytes = entry_bytes
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Value | None:
        """The key's value, or None."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
        return found[0]

    def add(self, key: Hashable, value: Value, size_bytes: int) -> None:
        """Adds a value, unless the key has one or the value alone exceeds the bound."""
        size = self._entry_bytes + size_bytes
        with self._lock:
            if key in self._entries or size > self.limit_bytes:
                return
            self._entries[key] = value, size
            self.used_bytes += size
            while self.used_bytes > self.limit_bytes:
                _, (_, evicted) = self._entries.popitem(last=False)
                self.used_bytes -= evicted

    def clear(self) -> None:
        """Removes all entries."""
        with self._lock:
            self._entries.clear()
            self.used_bytes = 0

    def check(self) -> None:
        """Asserts that `used_bytes` is the sum of the entries and within the bound."""
        total = sum(size for _, size in self._entries.values())
        assert self.used_bytes == total <= self.limit_bytes
