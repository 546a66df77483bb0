"""A shared index under a writer that changes it meanwhile, dies, or has more than fits."""

from collections.abc import Callable
from copy import copy
from random import Random
from typing import Any

import pytest
import xxhash

from radix import index_memory
from radix.index import SharedIndex, halves_of
from radix.index_memory import HALF, MAX_HOLDERS, MAX_WORKERS, PROBES, IndexMemory, IndexView, Match
from tests.radix.conftest import make_memory

WORKERS = 6


def hashed(number: int) -> int:
    return xxhash.xxh3_128_intdigest(b"%d" % number)


TREE: list[list[int]] = [
    [hashed(n) for n in (1, 2, 3, 4, 5)],
    [hashed(n) for n in (1, 2, 6, 7)],
    [hashed(n) for n in (1, 8, 9)],
    [hashed(n) for n in (10, 11, 12, 13)],
]


def store_chain(index: SharedIndex, worker: int, *chain: int) -> None:
    parent = None
    for depth, segment in enumerate(chain, 1):
        index.store(worker, parent, segment, 1000 * depth)
        parent = segment


class Watched:
    """A column of the memory, with something that happens at each access."""

    def __init__(self, column: Any, happens: Callable[[], None]) -> None:
        self._column = column
        self._happens = happens

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, place: Any) -> Any:
        self._happens()
        return self._column[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self._column[place] = value
        self._happens()


class Interleaving:
    """A writer and a reader of one memory, of which each acts between the other's accesses."""

    def __init__(self, seed: int, *, reads_between_writes: bool) -> None:
        self.random = Random(seed)
        self.memory = make_memory(12)  # so few that segments are forgotten all the time
        self.index = SharedIndex(self.memory)
        self.view = IndexView(self.memory)
        self.is_between = False
        table = self.memory.tables[0]
        happens = self.read if reads_between_writes else self.write
        watched: Any = {
            name: Watched(getattr(table, name), lambda: self.between(happens))
            for name in ("slots", "low", "holders", "tokens", "sets", "used")
        }
        if reads_between_writes:
            self.index._slots, self.index._holders = watched["slots"], watched["holders"]
        else:
            seen = copy(table)
            for name, column in watched.items():
                setattr(seen, name, column)
            self.view = IndexView(self.memory, seen)

    def between(self, act: Callable[[], None]) -> None:
        if not self.is_between and self.random.random() < 0.5:
            self.is_between = True
            act()
            self.is_between = False

    def write(self) -> None:
        random, chain = self.random, self.random.choice(TREE)
        worker = random.choice((*range(WORKERS - 1), MAX_HOLDERS - 1))
        act = random.randrange(8)
        if act == 0:
            self.index.clear(worker)
        elif act < 3:
            self.index.remove(worker, random.choice(chain))
        else:
            store_chain(self.index, worker, *chain[: random.randint(1, len(chain))])

    def read(self) -> None:
        chain = self.random.choice(TREE)
        check_answer(self.view.matches(chain), len(chain))
        self.view.touch(chain, len(chain))
        self.view.holds(self.random.randrange(-1, WORKERS), chain[0])
        assert len(self.view) >= 0


def check_answer(found: list[Match], length: int) -> None:
    """Whatever was written meanwhile, an answer has the form of an answer."""
    answered = 0
    for match in found:
        assert 0 < match.workers < 1 << MAX_HOLDERS
        assert not match.workers & answered
        assert match.tokens >= 0
        answered |= match.workers
    depths = [match.depth for match in found]
    assert depths == sorted(set(depths), reverse=True)
    assert all(1 <= depth <= length for depth in depths)


@pytest.mark.parametrize("reads_between_writes", [True, False])
@pytest.mark.parametrize("seed", range(25))
def test_lookups_between_any_two_writes_raise_nothing_and_end(
    seed: int, reads_between_writes: bool
) -> None:
    both = Interleaving(seed, reads_between_writes=reads_between_writes)
    for _ in range(60):
        both.write()
        both.read()
    both.is_between = True
    both.index.check()
    for chain in TREE:
        assert both.view.matches(chain) == both.index.matches(chain)


def test_memory_that_holds_anything_answers_without_an_exception() -> None:
    """A reader's table can be erased or half written at any time."""
    memory = make_memory(12)
    random = Random(7)
    table = memory.tables[0]
    for _ in range(300):
        for place in range(len(table.slots)):
            table.slots[place] = random.choice((0, random.randint(0, 12)))
        for row in range(1, 13):
            holders = random.choice(
                (0, 1, MAX_HOLDERS, 2**32 - 1, MAX_WORKERS + random.randint(1, 12))
            )
            table.holders[row] = holders
            table.low[row] = random.choice(TREE[0]) & HALF
        for place in range(0, len(table.sets), index_memory.SET_BYTES):
            table.sets[place] = random.randrange(256)
        for chain in TREE:
            check_answer(IndexView(memory).matches(chain), len(chain))


def test_a_writer_that_starts_again_leaves_what_there_is_until_it_is_complete() -> None:
    memory = make_memory(100)
    view, chain = IndexView(memory), TREE[0]
    first = SharedIndex(memory)
    store_chain(first, 3, *chain)
    assert view.matches(chain) == [Match(1 << 3, 5, 5000)], "the first one fills what is looked up"
    assert not memory.is_complete
    first.publish()
    assert memory.is_complete
    for worker in (4, 5, 4):
        second = SharedIndex(memory)
        before = view.matches(chain)
        store_chain(second, worker, *chain[:2])
        assert (view.matches(chain), memory.is_complete) == (before, True)
        second.publish()
        assert view.matches(chain) == [Match(1 << worker, 2, 2000)]
        second.check()


def test_a_writer_that_dies_before_it_is_complete_is_replaced_by_another() -> None:
    memory = make_memory(100)
    view, chain = IndexView(memory), TREE[0]
    store_chain(SharedIndex(memory), 1, *chain)
    for _ in range(3):
        store_chain(SharedIndex(memory), 2, *chain)
    assert view.matches(chain) == [Match(1 << 1, 5, 5000)]
    last = SharedIndex(memory)
    store_chain(last, 3, *chain[:1])
    last.publish()
    assert view.matches(chain) == [Match(1 << 3, 1, 1000)]


def test_what_a_reader_used_is_forgotten_later() -> None:
    memory = make_memory(2)
    index, view = SharedIndex(memory), IndexView(memory)
    a, b, c, d = map(hashed, range(4))
    store_chain(index, 0, a)
    store_chain(index, 0, b)
    view.touch([a, c], 2)
    store_chain(index, 0, c)
    assert [view.holds(0, segment) for segment in (a, b, c)] == [True, False, True]
    store_chain(index, 0, d)
    assert [view.holds(0, segment) for segment in (a, c, d)] == [False, True, True], "one use"


def test_segments_that_clash_beyond_the_probes_are_counted_and_rejected() -> None:
    memory = make_memory(1000)
    index, view = SharedIndex(memory), IndexView(memory)
    last = len(memory.tables[0].slots)
    clashing = [number << 30 | 5 * last + 7 for number in range(PROBES + 10)]
    stored = [index.store_chain(0, None, halves_of([segment]), [1]) for segment in clashing]
    assert stored == [1] * PROBES + [0] * 10
    assert [view.holds(0, segment) for segment in clashing] == [True] * PROBES + [False] * 10
    assert index.unlisted == 10
    index.check()
    for segment in clashing:
        index.remove(0, segment)
        assert not view.holds(0, segment)
    assert index.store(0, None, clashing[-1], 1)
    assert view.holds(0, clashing[-1])
    assert not any(memory.tables[0].slots[place] for place in range(last) if place != 7)


def test_more_sets_of_workers_than_fit_are_counted_and_only_the_writer_knows_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_memory, "MAX_SETS", 2)
    memory = make_memory(100)
    index, view = SharedIndex(memory), IndexView(memory)
    for number in range(4):
        for worker in (number, number + 1):
            store_chain(index, worker, hashed(number))
    assert [view.holders(hashed(number)) for number in range(4)] == [0b11, 0b110, 0, 0]
    assert index.matches([hashed(3)]) == [Match(0b11000, 1, 1000)]
    assert index.unlisted == 2
    index.clear(0)
    store_chain(index, 9, hashed(3))
    assert view.holders(hashed(3)) == 1 << 9 | 0b11000, "a set that nobody uses is free again"


def test_workers_beyond_those_that_can_be_held_apart_are_rejected() -> None:
    memory = make_memory(100)
    index, view = SharedIndex(memory), IndexView(memory)
    for worker in (MAX_HOLDERS - 1, MAX_HOLDERS, MAX_HOLDERS + 5):
        store_chain(index, worker, *TREE[0])
    assert view.matches(TREE[0]) == [Match(1 << MAX_HOLDERS - 1, 5, 5000)]
    index.clear(MAX_HOLDERS - 1)
    assert view.matches(TREE[0]) == []


def test_a_segment_takes_few_bytes() -> None:
    assert IndexMemory.size_bytes(1_000_000) / 2 / 1_000_000 < 45
