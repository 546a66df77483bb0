"""The index as plainly as it can be written, and every index that passes the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import xxhash

from radix.index import PrefixIndex, SharedIndex, halves_of
from radix.index_memory import MAX_TOKENS, MAX_WORKERS, IndexMemory, IndexView, Match


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
        if not 0 <= worker < MAX_WORKERS or not 0 <= tokens <= MAX_TOKENS:
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

    def store_chain(
        self, worker: int, parent: int | None, segments: Sequence[int], tokens: Sequence[int]
    ) -> int:
        for stored, (segment, count) in enumerate(zip(segments, tokens, strict=True)):
            if not self.store(worker, parent, segment, count):
                return stored
            parent = segment
        return len(segments)

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


class HashedIndex:
    """An index of this process alone. Its segments are hashes of the test's ints."""

    def __init__(self, limit_segments: int = 10_000) -> None:
        self.writer = self.make(limit_segments)
        self.reader: Any = self.writer
        self._ints: dict[int, int] = {}

    def make(self, limit_segments: int) -> PrefixIndex:
        return PrefixIndex(limit_segments)

    def _hash(self, segment: int) -> int:
        found = xxhash.xxh3_128_intdigest(b"%d" % segment)
        self._ints[found] = segment
        return found

    def __len__(self) -> int:
        assert len(self.reader) == len(self.writer)
        return len(self.reader)

    def holds(self, worker: int, segment: int) -> bool:
        held = self.reader.holds(worker, self._hash(segment))
        assert held is self.writer.holds(worker, self._hash(segment))
        return bool(held)

    def matches(self, hashes: Sequence[int]) -> list[Match]:
        found = self.writer.matches([*map(self._hash, hashes)])
        assert found == self.reader.matches([*map(self._hash, hashes)])
        return found

    def touch(self, hashes: Sequence[int], depth: int) -> None:
        self.writer.touch([*map(self._hash, hashes)], depth)

    def _above(self, parent: int | None) -> int | None:
        return None if parent is None else self._hash(parent)

    def store(self, worker: int, parent: int | None, segment: int, tokens: int) -> bool:
        return self.writer.store(worker, self._above(parent), self._hash(segment), tokens)

    def store_chain(
        self, worker: int, parent: int | None, segments: Sequence[int], tokens: Sequence[int]
    ) -> int:
        halves = halves_of(map(self._hash, segments))
        return self.writer.store_chain(worker, self._above(parent), halves, tokens)

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


class ViewedIndex(HashedIndex):
    """A shared index that is looked up in by a view."""

    def make(self, limit_segments: int) -> PrefixIndex:
        return SharedIndex(make_memory(limit_segments))

    def __init__(self, limit_segments: int = 10_000) -> None:
        super().__init__(limit_segments)
        assert isinstance(self.writer, SharedIndex)
        self.reader = IndexView(self.writer._memory)


def make_memory(limit_segments: int) -> IndexMemory:
    """A memory as a process makes it, of this process alone."""
    buffer = bytearray(IndexMemory.size_bytes(limit_segments))

    def erase(at: int, size: int) -> None:
        buffer[at : at + size] = bytes(size)

    return IndexMemory(memoryview(buffer), limit_segments, erase)


@pytest.fixture
def hashed_index() -> type[HashedIndex]:
    return HashedIndex


@pytest.fixture
def viewed_index() -> type[ViewedIndex]:
    return ViewedIndex


@pytest.fixture
def naive_index() -> type[NaiveIndex]:
    return NaiveIndex


@pytest.fixture(params=[NaiveIndex, HashedIndex, ViewedIndex])
def make_index(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes an index; all that were made are checked when the test ends."""
    made: list[Any] = []

    def make(limit_segments: int = 10_000) -> Any:
        made.append(request.param(limit_segments))
        return made[-1]

    yield make
    for index in made:
        index.check()
