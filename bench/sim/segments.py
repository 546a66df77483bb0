"""Which segments a simulated engine holds: the map from its blocks to the router's names.

A segment is held as long as the last full block before its end is. The feed notes
what changed since it was last read, as the engine's event stream reports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bench.sim.prompts import BLOCK_TOKENS, BYTES_PER_TOKEN
from radix.index import PrefixIndex
from sgl_ext.reading.segments import Chain


class Stored(NamedTuple):
    """A segment, the one before it in the prompt, and the tokens held up to its end."""

    segment: int
    parent: int | None
    tokens: int


class Load(NamedTuple):
    """What an engine says of itself; in tokens but for the first two.

    prefill_tokens, prefill_s: what it has computed since its start, and what that took.
    """

    running: int
    queued: int
    pending_tokens: int
    used_tokens: int
    capacity_tokens: int
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    host_capacity_tokens: int = 0


class Line(NamedTuple):
    """One line of an engine's event stream. cleared: it is a snapshot."""

    removed: list[int]
    stored: list[Stored]
    load: Load
    cleared: bool = False


def apply_line(index: PrefixIndex, worker: int, line: Line) -> None:
    """Applies a line to an index, as a balancer does."""
    if line.cleared:
        index.clear(worker)
    for segment in line.removed:
        index.remove(worker, segment)
    for stored in line.stored:
        index.store(worker, stored.parent, stored.segment, stored.tokens)


class SegmentFeed:
    """`take()` returns what changed since the last `take()`: removed first, then stored."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        self._block_tokens = block_tokens
        self.held: dict[int, Stored] = {}  # parents stand before their children
        self._by_block: dict[int, list[int]] = {}
        self._new: dict[int, Stored] = {}
        self._gone: dict[int, None] = {}

    def stored(self, chain: Chain, keys: Sequence[int], blocks: int) -> None:
        """The first `blocks` of a request's keys are held: so are the segments up to there."""
        parent = None
        for segment, end in zip(chain.hashes, chain.ends, strict=True):
            needed = max(1, end // (BYTES_PER_TOKEN * self._block_tokens))
            if needed > blocks:
                return
            if segment not in self.held:
                record = Stored(segment, parent, needed * self._block_tokens)
                self.held[segment] = self._new[segment] = record
                self._by_block.setdefault(keys[needed - 1], []).append(segment)
            parent = segment

    def removed(self, blocks: Iterable[int]) -> None:
        """Blocks were evicted, children first."""
        for block in blocks:
            for segment in self._by_block.pop(block, ()):
                del self.held[segment]
                if self._new.pop(segment, None) is None:
                    self._gone[segment] = None

    def take(self) -> tuple[list[int], list[Stored]]:
        gone, new = list(self._gone), list(self._new.values())
        self._gone.clear()
        self._new.clear()
        return gone, new

    @property
    def changed(self) -> bool:
        return bool(self._gone or self._new)

    def snapshot(self) -> Iterator[Stored]:
        """Everything held, parents first."""
        return iter(self.held.values())
