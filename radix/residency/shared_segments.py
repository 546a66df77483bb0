"""What was published of the segments that a tier of several engines holds.

The engine that publishes looks now and then at which segments are there, and compares with the time
before. A segment counts only with all that is above it: without its beginning the end of a prefix
is of no use.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from radix.residency.changes import Stored


class SharedChanges(NamedTuple):
    """What changed since the time before, in the order in which to apply it."""

    removed: list[int]
    """Each is removed with everything below it."""
    stored: list[Stored]
    """New segments and segments whose tokens changed, parents first."""


class SharedSegments:
    """The published segments."""

    def __init__(self) -> None:
        self._published: dict[int, Stored] = {}

    def __len__(self) -> int:
        return len(self._published)

    def update(self, there: Mapping[int, Stored]) -> SharedChanges:
        """What changed, if these segments are there now."""
        below: defaultdict[int | None, list[Stored]] = defaultdict(list)
        for row in there.values():
            below[row[1]].append(row)
        before, now = self._published, dict[int, Stored]()
        reached = below[None]
        while reached:
            row = reached.pop()
            now[row[0]] = row
            reached += below.get(row[0], ())
        self._published = now
        lost = (row for segment, row in before.items() if segment not in now)
        removed = [segment for segment, parent, _ in lost if parent is None or parent in now]
        return SharedChanges(removed, [row for row in now.values() if before.get(row[0]) != row])
