"""The contract of a prefix index, which a naive one passes too, and its cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import log2
from typing import Any

import pytest

from radix.index import PrefixIndex, halves_of
from radix.index_memory import (
    MAX_HOLDERS,
    MAX_SEGMENTS,
    MAX_TOKENS,
    MAX_WORKERS,
    Match,
    index_bytes,
    segments_within,
)

A, B, C, D, E, F, X, Y = range(101, 109)
Make = Callable[..., Any]


def store_chain(index: Any, worker: int, *chain: int) -> None:
    parent = None
    for depth, segment in enumerate(chain, 1):
        assert index.store(worker, parent, segment, 1000 * depth)
        parent = segment


@pytest.fixture
def pictured(make_index: Make) -> Any:
    """The index drawn at the top of the module."""
    index = make_index()
    store_chain(index, 2, A, B, F)
    store_chain(index, 0, A, C)
    store_chain(index, 1, A, C, D, E)
    return index


def test_each_worker_is_in_its_longest_match(pictured: Any) -> None:
    assert pictured.matches([A, C, D, E, X]) == [
        Match(workers=0b010, depth=4, tokens=4000),
        Match(workers=0b001, depth=2, tokens=2000),
        Match(workers=0b100, depth=1, tokens=1000),
    ]
    assert pictured.matches([A]) == [Match(0b111, 1, 1000)]
    assert pictured.matches([A, B]) == [Match(0b100, 2, 2000), Match(0b011, 1, 1000)]


def test_an_unknown_prompt_and_an_empty_one_match_nowhere(pictured: Any) -> None:
    assert pictured.matches([X, Y]) == []
    assert pictured.matches([]) == []


def test_holds_is_about_one_worker_and_segment(pictured: Any) -> None:
    assert pictured.holds(1, E)
    assert not pictured.holds(0, E)
    assert not pictured.holds(0, X)
    assert len(pictured) == 6


def test_an_orphan_is_rejected(pictured: Any) -> None:
    before = list(pictured.snapshot(0))
    assert not pictured.store(0, D, E, 9)  # the parent is held, but by another worker
    assert not pictured.store(0, X, Y, 9)
    assert not pictured.store(0, X, X, 9)
    assert list(pictured.snapshot(0)) == before
    assert pictured.matches([A, C, D, E])[0] == Match(0b010, 4, 4000)


def test_a_second_parent_is_rejected(pictured: Any) -> None:
    assert not pictured.store(1, A, E, 9)
    assert not pictured.store(1, None, E, 9)
    assert not pictured.store(1, E, A, 9)  # this would be a circle
    assert pictured.matches([A, C, D, E])[0] == Match(0b010, 4, 4000)


def test_a_repeated_store_renews_the_tokens(pictured: Any) -> None:
    assert pictured.store(1, D, E, 4321)
    assert pictured.matches([A, C, D, E])[0].tokens == 4321
    assert len(pictured) == 6


def test_a_removal_includes_everything_below_for_that_worker_only(pictured: Any) -> None:
    assert pictured.remove(1, C) == 3
    assert pictured.matches([A, C, D, E]) == [Match(0b001, 2, 2000), Match(0b110, 1, 1000)]
    assert len(pictured) == 4  # no worker is left at D and E
    assert pictured.remove(1, C) == 0
    assert pictured.remove(0, X) == 0
    assert pictured.remove(2, A) == 3


def test_a_cleared_worker_holds_nothing(pictured: Any) -> None:
    assert pictured.clear(1) == 4
    assert list(pictured.snapshot(1)) == []
    assert pictured.matches([A, C, D, E]) == [Match(0b001, 2, 2000), Match(0b100, 1, 1000)]
    assert pictured.clear(1) == 0
    assert pictured.clear(0) + pictured.clear(2) == 5
    assert len(pictured) == 0


def test_a_snapshot_replays_into_an_empty_index(pictured: Any, make_index: Make) -> None:
    copy = make_index()
    for parent, segment, tokens in pictured.snapshot(1):
        assert copy.store(1, parent, segment, tokens)
    assert copy.matches([A, C, D, E]) == [Match(0b010, 4, 4000)]
    assert sorted(copy.snapshot(1), key=str) == sorted(pictured.snapshot(1), key=str)


def test_a_snapshot_is_of_the_moment(pictured: Any) -> None:
    taken = pictured.snapshot(1)
    first = next(taken)
    pictured.clear(1)
    assert [first, *taken] == [
        (None, A, 1000),
        (A, C, 2000),
        (C, D, 3000),
        (D, E, 4000),
    ]


def test_the_least_recently_used_leaf_is_forgotten_first(make_index: Make) -> None:
    index = make_index(4)
    store_chain(index, 0, A, B)
    store_chain(index, 1, C, D)
    store_chain(index, 0, X)
    assert [index.holds(0, A), index.holds(0, B)] == [True, False]  # the leaf goes, not its parent
    store_chain(index, 0, Y)
    assert not index.holds(0, A)
    assert index.holds(1, D)
    assert len(index) == 4


def test_a_touched_prefix_outlives_others(make_index: Make) -> None:
    index = make_index(4)
    store_chain(index, 0, A, B)
    store_chain(index, 0, C, D)
    index.touch([A, B, X], 2)
    store_chain(index, 0, X)
    assert [index.holds(0, segment) for segment in (A, B, C, D, X)] == [1, 1, 1, 0, 1]


def test_no_more_than_the_depth_is_touched(make_index: Make) -> None:
    index = make_index(3)
    store_chain(index, 0, A, B)
    store_chain(index, 0, C)
    index.touch([A, B], 1)
    store_chain(index, 0, X)
    assert [index.holds(0, segment) for segment in (A, B, C, X)] == [1, 0, 1, 1]


def test_storing_again_is_a_use(make_index: Make) -> None:
    index = make_index(2)
    store_chain(index, 0, A)
    store_chain(index, 0, B)
    store_chain(index, 1, A)
    store_chain(index, 0, C)
    assert [index.holds(0, segment) for segment in (A, B, C)] == [1, 0, 1]


def test_a_lookup_is_not_a_use(make_index: Make) -> None:
    index = make_index(2)
    store_chain(index, 0, A)
    store_chain(index, 0, B)
    assert index.matches([A]) == [Match(0b1, 1, 1000)]
    assert index.holds(0, A)
    assert len(list(index.snapshot(0))) == 2
    store_chain(index, 0, C)
    assert [index.holds(0, segment) for segment in (A, B, C)] == [0, 1, 1]


def test_touching_the_unknown_does_nothing(make_index: Make) -> None:
    index = make_index(2)
    store_chain(index, 0, A)
    store_chain(index, 0, B)
    for hashes, depth in (([], 3), ([X, Y], 2), ([A], 0), ([A], -1)):
        index.touch(hashes, depth)
    index.touch([B, X], 99)
    store_chain(index, 0, C)
    assert [index.holds(0, segment) for segment in (A, B, C)] == [0, 1, 1]


def test_a_chain_does_not_push_itself_out(make_index: Make) -> None:
    index = make_index(3)
    store_chain(index, 0, A, B, C)
    assert not index.store(0, C, D, 9)
    assert index.matches([A, B, C, D]) == [Match(0b1, 3, 3000)]


def test_odd_numbers_are_rejected_or_stored(make_index: Make) -> None:
    index = make_index()
    for worker in (-1, MAX_WORKERS, 2**80):
        assert not index.store(worker, None, A, 1)
        assert not index.holds(worker, A)
        assert index.remove(worker, A) == index.clear(worker) == 0
        assert list(index.snapshot(worker)) == []
    for tokens in (-1, MAX_TOKENS + 1):
        assert not index.store(0, None, A, tokens)
        assert index.store_chain(0, None, [A, B], [1, tokens]) == 1
        index.clear(0)
    assert len(index) == 0
    store_chain(index, 0, 0, -1, 2**200)
    assert index.matches([0, -1, 2**200]) == [Match(0b1, 3, 3000)]
    assert index.store(MAX_HOLDERS - 1, None, 0, MAX_TOKENS)


def test_a_chain_is_stored_up_to_the_first_segment_that_is_rejected(make_index: Make) -> None:
    index = make_index()
    store_chain(index, 0, A, B)
    assert index.store_chain(1, None, [A, C, D], [1, 2, 3]) == 3
    assert index.store_chain(1, D, [E, F, B, X], [4, 5, 6, 7]) == 2, "B has another parent"
    assert index.matches([A, C, D, E, F]) == [Match(0b10, 5, 5), Match(0b01, 1, 1)]
    assert index.store_chain(1, X, [Y], [9]) == 0, "an orphan"
    assert index.store_chain(1, F, [X, X], [8, 9]) == 1, "no segment is its own parent"
    assert index.store_chain(1, X, [], []) == 0


def test_a_chain_that_exceeds_the_limit_pushes_out_others_and_not_itself(make_index: Make) -> None:
    index = make_index(4)
    store_chain(index, 0, X, Y)
    assert index.store_chain(0, None, [A, B, C], [1, 2, 3]) == 3
    assert [index.holds(0, segment) for segment in (X, Y)] == [True, False]
    assert index.store_chain(0, C, [D, E, F], [4, 5, 6]) == 1
    assert index.matches([A, B, C, D, E]) == [Match(0b1, 4, 4)]


def test_chains_are_stored_where_others_were_forgotten(make_index: Make) -> None:
    index = make_index()
    store_chain(index, 0, A, B, C)
    index.remove(0, B)
    assert index.store_chain(0, A, [D, E, F], [2, 3, 4]) == 3
    assert index.matches([A, D, E, F]) == [Match(0b1, 4, 4)]


@pytest.mark.parametrize("limit_bytes", [1, 10**6, 2**28, 10**9, 2**40])
def test_as_many_segments_as_fit_the_bytes(limit_bytes: int) -> None:
    most = segments_within(limit_bytes)
    assert most == 1 or index_bytes(most) <= limit_bytes
    assert most == MAX_SEGMENTS or index_bytes(most + 1) > limit_bytes


def test_a_segment_takes_less_than_100_bytes() -> None:
    for segments in (10_000, 1_000_000, 2**21 + 1, 5_000_000):
        assert index_bytes(segments) / segments < 80


class Counted(Sequence[int]):
    """A chain that counts how often it is read."""

    def __init__(self, chain: list[int]) -> None:
        self.chain = chain
        self.read = 0

    def __len__(self) -> int:
        return len(self.chain)

    def __getitem__(self, place: Any) -> Any:
        self.read += 1
        return self.chain[place]


@pytest.mark.parametrize("depths", [[1000], [1000, 10], [731, 500, 12, 3]])
def test_a_lookup_takes_a_logarithm_of_probes_for_each_distinct_depth(depths: list[int]) -> None:
    index = PrefixIndex()
    chain = random.Random(7).sample(range(2**60), 1000)
    for worker in range(1024):
        store_chain(index, worker, *chain[: depths[worker % len(depths)]])
    asked = Counted(chain)
    assert [match.depth for match in index.matches(asked)] == depths
    assert asked.read <= 1 + len(depths) * (log2(len(chain)) + 1)


def test_a_worker_that_gets_a_known_segment_gets_all_above_it() -> None:
    index = PrefixIndex()
    index.store_chain(0, None, halves_of([1, 2, 3]), [10, 20, 30])
    assert index.extend(5, 2)
    assert [segment for _, segment, _ in index.snapshot(5)] == [1, 2]
    assert not index.extend(5, 9)
    assert not index.extend(-1, 2)
    index.check()
    assert index.extend(5, 3)
    index.clear(0)
    assert index.matches([1, 2, 3])[0].tokens == 30
    index.check()
