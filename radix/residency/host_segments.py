"""The segments that an engine keeps on its host alone: see `radix.residency`, which feeds this.

    on the device     a - b
                           \\
    on the host             c - d          d is a leaf here; c and d have nodes of the engine's tree
                             \\
                              e

A segment comes here when the device gave its tokens up and the tree still has them, and leaves when
a request has brought them back. Its parent is here or on the device. A tree keeps an inner node at
least as long as those below it, so after evictions on the host only leaves are checked, by the id
of a node at or below their end. That node says whether the leaf is there, and nothing is matched.

Invariants, asserted by `check`: `_children` counts the segments here by their parents; the segments
without such children are the leaves.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

UNKNOWN = 0
"""No node: the segment is there as long as one below it is."""
_LISTED_PER_STEP = 32


class KeepingTree(Protocol):
    """The engine's tree of tokens, which this may not change."""

    def keeps(self, node: int) -> bool:
        """Whether the tree still has a node, on the device or on the host."""


@dataclass(slots=True, frozen=True)
class HostSegment:
    """node: one at or below the segment's end, or UNKNOWN."""

    parent: int | None
    tokens: int
    measured: bool
    node: int


class HostSegments:
    """segments: by their hashes; callers only read them."""

    def __init__(self) -> None:
        self.segments: dict[int, HostSegment] = {}
        self._children: dict[int, int] = {}
        self._leaves: dict[int, None] = {}  # those that came first, first
        self._suspect = False
        self._unswept: list[int] = []

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def settled(self) -> bool:
        """Whether the leaves were checked after the last eviction on the host."""
        return not (self._suspect or self._unswept)

    def has_below(self, segment: int) -> bool:
        """Whether segments right below this one are here. It may be on the device."""
        return segment in self._children

    def parents_first(self) -> Iterator[int]:
        """All segments, each after its parent."""
        listed: set[int] = set()
        for leaf in self._leaves:
            branch: list[int] = []
            current: int | None = leaf
            while current is not None and current in self.segments and current not in listed:
                branch.append(current)
                listed.add(current)
                current = self.segments[current].parent
            yield from reversed(branch)

    def add(self, segment: int, entry: HostSegment) -> None:
        """A segment has left the device, and stays on the host."""
        self.segments[segment] = entry
        if entry.parent is not None:
            self._children[entry.parent] = self._children.get(entry.parent, 0) + 1
            self._leaves.pop(entry.parent, None)
        if segment not in self._children:
            self._leaves[segment] = None

    def pop(self, segment: int) -> HostSegment:
        """A segment is back on the device, as its parent is. Those below it stay."""
        entry = self.segments.pop(segment)
        self._leaves.pop(segment, None)
        self._forget_child(entry.parent)
        return entry

    def evicted(self) -> None:
        """Records an eviction on the host, after which leaves must be checked."""
        self._suspect = True

    def sweep(self, tree: KeepingTree, steps: int) -> list[tuple[int, int | None]]:
        """Checks leaves until done or out of steps. Returns what is gone: segments with their
        parents."""
        gone: list[tuple[int, int | None]] = []
        while steps > 0 and not self.settled:
            if not self._unswept:
                self._suspect = False
                self._unswept = list(reversed(self._leaves))
                steps -= len(self._unswept) // _LISTED_PER_STEP
                continue
            leaf: int | None = self._unswept.pop()
            steps -= 1
            while leaf in self._leaves and not self._is_kept(tree, leaf):
                parent = self._drop(leaf)
                gone.append((leaf, parent))
                steps -= 1
                leaf = parent
        return gone

    def forget_oldest(self) -> tuple[int, int | None]:
        """Forgets the leaf that came first; returns it and its parent."""
        leaf = next(iter(self._leaves))
        return leaf, self._drop(leaf)

    def clear(self) -> None:
        """The tree was emptied."""
        for table in (self.segments, self._children, self._leaves, self._unswept):
            table.clear()
        self._suspect = False

    def _is_kept(self, tree: KeepingTree, leaf: int) -> bool:
        node = self.segments[leaf].node
        return node != UNKNOWN and tree.keeps(node)

    def _drop(self, leaf: int) -> int | None:
        """Removes a leaf. Its parent becomes one if it is here and has no other child."""
        parent = self.segments.pop(leaf).parent
        del self._leaves[leaf]
        self._forget_child(parent)
        return parent

    def _forget_child(self, parent: int | None) -> None:
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in self.segments:
                self._leaves[parent] = None

    def check(self) -> None:
        """Asserts the invariants."""
        children: dict[int, int] = {}
        for entry in self.segments.values():
            if entry.parent is not None:
                children[entry.parent] = children.get(entry.parent, 0) + 1
        assert self._children == children
        assert self._leaves.keys() == self.segments.keys() - children.keys()
