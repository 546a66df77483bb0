"""What iterations of a loop did one behind the other, of the chats that were rendered last.

A chat that grows goes through the same items again, in the same order. A run is known by what
all of them are, written out; how it is found among those of other chats is of no consequence.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Hashable
from typing import Any, NamedTuple

from radix.byte_lru import Parts

# Of each iteration, two numbers and what was left; and of a run, its key and its place.
_ITERATION_BYTES, _RUN_BYTES = 240, 1000


class Mark:
    """A value that no template has."""


UNWRITTEN = Mark()


class Part(NamedTuple):
    """What an iteration wrote, and what it left in the attributes of its effects."""

    text: str
    left: tuple[Any, ...]


class Run(NamedTuple):
    """written: the items, the first one too, each ending in it where `ends` tells.
    text: what the iterations from the second on wrote, in the same way.
    left: what they had left in the attributes of their effects, each and those before it.
    bounds: of iterations, the first of which is 0.
    """

    fixed: tuple[Any, ...]
    bounds: tuple[int, ...]
    written: bytes
    ends: list[int]
    text: str
    text_ends: list[int]
    left: list[tuple[Any, ...]]

    @property
    def size_bytes(self) -> int:
        """What it takes, about."""
        left = {id(value): value for values in self.left for value in values}
        size = sys.getsizeof(self.written) + sys.getsizeof(self.text)
        size += _RUN_BYTES + _ITERATION_BYTES * len(self.ends)
        return size + sum(map(sys.getsizeof, left.values()))

    def items_in(self, written: bytes) -> int:
        """How many items at the beginning of others are the same."""
        if written.startswith(self.written):
            return len(self.ends)
        return bisect_right(
            self.ends, False, key=lambda end: not written.startswith(self.written[:end])
        )

    def length_in(self, fixed: tuple[Any, ...], bounds: tuple[int, ...], items: int) -> int:
        """How many iterations do what they did, of those of so many items that are the same.

        The last of these does not count: what is behind it may be another item, or none.
        """
        if not self.text_ends or fixed != self.fixed:
            return 0
        stop = min(items - 1, 1 + len(self.text_ends))
        for old, new in zip(self.bounds, bounds, strict=True):
            if old != new:
                stop = min(stop, old, new)
        return max(stop - 1, 0)

    def cut(self, length: int) -> Run:
        """The first so many iterations of it."""
        ends = self.text_ends[:length]
        text = self.text[: ends[-1]] if ends else ""
        return self._replace(text=text, text_ends=ends, left=self.left[:length])


NO_RUN = Run((), (), b"", [], "", [], [])


class Course:
    """A loop that is gone through, from its second iteration on.

    begun: the run that it begins with. parts: what the iterations behind it did.
    """

    def __init__(self, number: int, key: Hashable, begun: Run) -> None:
        self.number = number
        self.key = key
        self.parts: list[Part] = []
        self._begun = begun

    @property
    def run(self) -> Run:
        """All of it but the last iteration, behind which there may be an item the next time."""
        begun, parts = self._begun, self.parts[:-1]
        ends, left = begun.text_ends.copy(), begun.left.copy()
        for part in parts:
            ends.append((ends[-1] if ends else 0) + len(part.text))
            if part.left:
                earlier = left[-1] if left else (UNWRITTEN,) * len(part.left)
                left.append(tuple(map(_latest, part.left, earlier)))
        text = "".join([begun.text, *[part.text for part in parts]])
        return begun._replace(text=text, text_ends=ends, left=left)


def _latest(new: Any, earlier: Any) -> Any:
    return earlier if new is UNWRITTEN else new


class Runs:
    """Runs, the most recently used of them, within a bound of bytes. Several threads may use it."""

    def __init__(self, limit_bytes: int) -> None:
        self._known: Parts[Run] = Parts(limit_bytes, entry_bytes=0)  # a run counts its own

    def __len__(self) -> int:
        return len(self._known)

    def find(self, key: Hashable) -> Run | None:
        """The run that was kept last."""
        return self._known.find(key)

    def keep(self, key: Hashable, run: Run) -> None:
        """Remembers a run in place of the one before, unless it alone is more than the bound."""
        self._known.replace(key, run, run.size_bytes)

    def clear(self) -> None:
        """Forgets all."""
        self._known.clear()

    def check(self) -> None:
        """Asserts that what is counted is what is there, and within the bound."""
        self._known.check()
