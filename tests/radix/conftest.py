"""The index as plainly as it can be written, and every index that passes the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import xxhash

from radix.index import MAX_WORKERS, Match, PrefixIndex
from radix.index_memory import IndexMemory
from radix.index_view import IndexView
from radix.shared_index import SharedIndex


class NaiveIndex:
    """A set of holders for each segment, and a list of segments from the least recently used."""

    def __init__(self, limit_segments: int = 1_000_000) -> None:
        self.limit = limit_segments
        self.holders: dict[int, set[int]] = {}
        self.parents: dict[int, int | None] = {}
        self.tokens: dict[int, int] = {}
        self.order: list[int] = []

    def __len__(self) -> int:
        return len(self.holders)

    def lineage(self, segment: int | None) -> list[int]:
        """A held segment and its ancestors, the deepest first."""
        found = []
        while segment is not None:
            found.append(segment)
            segment = self.parents[segment]
        return found

    def _use(self, segment: int | None) -> None:
        for used in self.lineage(segment):
            self.order.remove(used)
            self.order.append(used)

    def _drop(self, segment: int) -> None:
        del self.holders[segment], self.parents[segment], self.tokens[segment]
        self.order.remove(segment)

    def store(self, worker: int, parent: int | None, segment: int, tokens: int) -> bool:
        if not 0 <= worker < MAX_WORKERS or not 0 <= tokens < 2**63:
            return False
        if parent is not None and not self.holds(worker, parent):
            return False
        if segment in self.holders:
            if self.parents[segment] != parent:
                return False
        elif len(self) == self.limit:
            others = [other for other in self.order if other not in self.lineage(parent)]
            if not others:
                return False
            self._drop(others[0])
        self.parents[segment] = parent
        self.tokens[segment] = tokens
        self.holders.setdefault(segment, set()).add(worker)
        if segment not in self.order:
            self.order.append(segment)
        self._use(segment)
        return True

    def remove(self, worker: int, segment: int) -> int:
        lost = [s for s in self.holders if self.holds(worker, s) and segment in self.lineage(s)]
        for lost_segment in lost:
            self.holders[lost_segment].discard(worker)
        for lost_segment in lost:
            if not self.holders[lost_segment]:
                self._drop(lost_segment)
        return len(lost)

    def clear(self, worker: int) -> int:
        roots = [s for s, parent in self.parents.items() if parent is None]
        return sum(self.remove(worker, root) for root in roots)

    def holds(self, worker: int, segment: int) -> bool:
        return worker in self.holders.get(segment, ())

    def matches(self, hashes: Sequence[int]) -> list[Match]:
        depths: dict[int, int] = {}
        for depth, segment in enumerate(hashes, 1):
            for worker in self.holders.get(segment, ()):
                depths[worker] = depth
        return [
            Match(
                sum(1 << worker for worker in depths if depths[worker] == depth),
                depth,
                self.tokens[hashes[depth - 1]],
            )
            for depth in sorted(set(depths.values()), reverse=True)
        ]

    def touch(self, hashes: Sequence[int], depth: int) -> None:
        held = [segment for segment in hashes[: max(depth, 0)] if segment in self.holders]
        if held:
            self._use(held[-1])

    def snapshot(self, worker: int) -> Iterator[tuple[int | None, int, int]]:
        held = [segment for segment in self.order if self.holds(worker, segment)]
        # Ancestors are younger, so from the youngest on parents come first.
        return iter([(self.parents[s], s, self.tokens[s]) for s in reversed(held)])

    def check(self) -> None:
        for segment, parent in self.parents.items():
            assert self.holders[segment]
            assert parent is None or self.holders[segment] <= self.holders[parent]
        assert sorted(self.order) == sorted(self.holders)


class ViewedIndex:
    """A shared index that is looked up in by a view. Its segments are hashes of the test's ints."""

    def __init__(self, limit_segments: int = 10_000) -> None:
        self.writer = SharedIndex(make_memory(limit_segments))
        self.view = IndexView(self.writer._memory)
        self._ints: dict[int, int] = {}

    def _hash(self, segment: int) -> int:
        found = xxhash.xxh3_128_intdigest(b"%d" % segment)
        self._ints[found] = segment
        return found

    def __len__(self) -> int:
        assert len(self.view) == len(self.writer)
        return len(self.view)

    def holds(self, worker: int, segment: int) -> bool:
        held = self.view.holds(worker, self._hash(segment))
        assert held is self.writer.holds(worker, self._hash(segment))
        return held

    def matches(self, hashes: Sequence[int]) -> list[Match]:
        return self.view.matches([*map(self._hash, hashes)])

    def touch(self, hashes: Sequence[int], depth: int) -> None:
        self.writer.touch([*map(self._hash, hashes)], depth)

    def store(self, worker: int, parent: int | None, segment: int, tokens: int) -> bool:
        above = None if parent is None else self._hash(parent)
        return self.writer.store(worker, above, self._hash(segment), tokens)

    def remove(self, worker: int, segment: int) -> int:
        return self.writer.remove(worker, self._hash(segment))

    def clear(self, worker: int) -> int:
        return self.writer.clear(worker)

    def snapshot(self, worker: int) -> Iterator[tuple[int | None, int, int]]:
        ints = self._ints
        return iter(
            [
                (None if parent is None else ints[parent], ints[segment], tokens)
                for parent, segment, tokens in self.writer.snapshot(worker)
            ]
        )

    def check(self) -> None:
        self.writer.check()


def make_memory(limit_segments: int) -> IndexMemory:
    """A memory as a process makes it, of this process alone."""
    buffer = bytearray(IndexMemory.size_bytes(limit_segments))

    def erase(at: int, size: int) -> None:
        buffer[at : at + size] = bytes(size)

    return IndexMemory(memoryview(buffer), limit_segments, erase)


@pytest.fixture
def viewed_index() -> type[ViewedIndex]:
    return ViewedIndex


@pytest.fixture
def naive_index() -> type[NaiveIndex]:
    return NaiveIndex


@pytest.fixture(params=[NaiveIndex, PrefixIndex, ViewedIndex])
def make_index(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes an index; all that were made are checked when the test ends."""
    made: list[Any] = []

    def make(limit_segments: int = 10_000) -> Any:
        made.append(request.param(limit_segments))
        return made[-1]

    yield make
    for index in made:
        index.check()
