"""A prefix cache of fixed-size blocks, evicted least recently used leaf first.

A block is known by the chained hash of everything up to its end, so a held block
implies its whole beginning:

    a -- b -- c -- d        a request that runs locks its deepest block; the blocks
          \\                 above it are protected because they are no leaves
           e -- f

Invariants: a held block's parent is held; a block with a locked block at or below
it is protected and never evicted; held + reserved <= capacity. A block that loses
its last child takes over the child's time of use, which equals stamping the whole
path at each use.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class Block:
    """One held block; `holders` counts its own locks and its protected children."""

    __slots__ = ("children", "holders", "key", "parent", "used_at")

    def __init__(self, key: int, parent: Block | None, now: float) -> None:
        self.key = key
        self.parent = parent
        self.used_at = now
        self.children = 0
        self.holders = 0


class BlockCache:
    """Sizes are counted in blocks. Lookups do not mutate."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.reserved = 0
        self.protected = 0
        self._blocks: dict[int, Block] = {}
        self._leaves: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: int) -> bool:
        return key in self._blocks

    def match(self, keys: Sequence[int], length: int) -> int:
        """How many of the first `length` keys are held, counted from the front."""
        low, high = 0, length
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in self._blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def lock(self, key: int) -> None:
        """Protects a held block and all above it; locks add up."""
        block: Block | None = self._blocks[key]
        while block is not None:
            block.holders += 1
            if block.holders > 1:
                return
            self.protected += 1
            block = block.parent

    def unlock(self, key: int, now: float) -> None:
        """Takes one lock back; the block counts as used now."""
        block: Block | None = self._blocks[key]
        assert block is not None
        block.used_at = now
        while block is not None:
            block.holders -= 1
            if block.holders:
                return
            self.protected -= 1
            self._offer(block)
            block = block.parent

    def reserve(self, blocks: int) -> tuple[bool, list[int]]:
        """Sets room aside for a request, by eviction where needed.

        Returns whether there was enough, and the keys of what was evicted for it
        (children first). Without enough nothing is reserved or evicted.
        """
        if self.protected + self.reserved + blocks > self.capacity:
            return False, []
        evicted = []
        while len(self._blocks) + self.reserved + blocks > self.capacity:
            evicted.append(self._evict())
        self.reserved += blocks
        return True, evicted

    def release(self, blocks: int) -> None:
        """Gives reserved room back."""
        self.reserved -= blocks
        assert self.reserved >= 0

    def insert(self, keys: Sequence[int], start: int, end: int, now: float) -> None:
        """Holds keys[start:end] too; keys[:start] are held already. Takes no room of its own."""
        parent = self._blocks[keys[start - 1]] if start else None
        for key in keys[start:end]:
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = Block(key, parent, now)
                if parent is not None:
                    parent.children += 1
            parent = block
        if parent is not None:
            parent.used_at = now
            self._offer(parent)

    def drop(self, keys: Sequence[int]) -> list[int]:
        """Drops the last of these blocks as far as nothing else needs them; returns their keys."""
        dropped = []
        for key in reversed(keys[: self.match(keys, len(keys))]):
            block = self._blocks[key]
            if block.children or block.holders:
                break
            del self._blocks[key]
            dropped.append(key)
            if block.parent is not None:
                block.parent.children -= 1
                block.parent.used_at = max(block.parent.used_at, block.used_at)
                self._offer(block.parent)
        return dropped

    def clear(self) -> list[int]:
        """Drops all that no running request protects; returns the keys, children first."""
        dropped = []
        while self.protected < len(self._blocks):
            dropped.append(self._evict())
        return dropped

    def check(self) -> None:
        """Raises AssertionError where an invariant does not hold."""
        children: dict[int, int] = {}
        for block in self._blocks.values():
            if block.parent is not None:
                assert self._blocks.get(block.parent.key) is block.parent
                children[block.parent.key] = children.get(block.parent.key, 0) + 1
                assert not block.holders or block.parent.holders
        assert all(block.children == children.get(key, 0) for key, block in self._blocks.items())
        assert self.protected == sum(block.holders > 0 for block in self._blocks.values())
        assert len(self._blocks) + self.reserved <= self.capacity

    def _offer(self, block: Block) -> None:
        if not block.children and not block.holders:
            heapq.heappush(self._leaves, (block.used_at, block.key))

    def _evict(self) -> int:
        while True:
            used_at, key = heapq.heappop(self._leaves)
            block = self._blocks.get(key)
            if block and not block.children and not block.holders and block.used_at == used_at:
                break
        del self._blocks[key]
        parent = block.parent
        if parent is not None:
            parent.children -= 1
            parent.used_at = max(parent.used_at, used_at)
            self._offer(parent)
        return key
