"""Under any sequence of calls the index answers as the naive one does."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

WORKERS = 4
workers = st.integers(0, WORKERS - 1)
segments = st.integers(0, 11)
tokens = st.integers(0, 9)


class Machine(RuleBasedStateMachine):
    """One small index and its model, fed alike; few segments, so that all paths cross."""

    def __init__(self, naive_index: Any, limit: int, index: Any) -> None:
        super().__init__()
        self.model = naive_index(limit)
        self.index = index(limit)

    def both(self, verb: str, *values: Any) -> None:
        assert getattr(self.index, verb)(*values) == getattr(self.model, verb)(*values)

    def chain_to(self, data: st.DataObject) -> list[int]:
        """A held segment's chain, or none, and behind it what nobody holds."""
        held = data.draw(st.sampled_from([None, *sorted(self.model.parents)]))
        unknown = [segment for segment in range(200) if segment not in self.model.parents]
        behind = data.draw(st.lists(st.sampled_from(unknown[:12]), max_size=3, unique=True))
        return [*reversed(self.model.lineage(held)), *behind]

    @rule(worker=workers, parent=st.none() | segments, segment=segments, tokens=tokens)
    def store_anything(self, worker: int, parent: int | None, segment: int, tokens: int) -> None:
        self.both("store", worker, parent, segment, tokens)

    @rule(data=st.data(), worker=workers, segment=segments, tokens=tokens)
    def store_below(self, data: st.DataObject, worker: int, segment: int, tokens: int) -> None:
        held = [s for s in sorted(self.model.parents) if self.model.holds(worker, s)]
        self.both("store", worker, data.draw(st.sampled_from([None, *held])), segment, tokens)

    @rule(data=st.data(), worker=workers, tokens=tokens)
    def store_what_another_holds(self, data: st.DataObject, worker: int, tokens: int) -> None:
        parent = None
        for segment in self.chain_to(data):
            self.both("store", worker, parent, segment, tokens)
            parent = segment

    @rule(data=st.data(), worker=workers, parent=st.none() | segments, tokens=tokens)
    def store_a_chain(
        self, data: st.DataObject, worker: int, parent: int | None, tokens: int
    ) -> None:
        chain = self.chain_to(data)
        if parent is not None:
            chain = data.draw(st.lists(segments, max_size=4))
        self.both("store_chain", worker, parent, chain, [tokens + n for n in range(len(chain))])

    @rule(data=st.data(), depth=st.integers(-1, 6))
    def touch(self, data: st.DataObject, depth: int) -> None:
        self.both("touch", self.chain_to(data), depth)

    @rule(hashes=st.lists(segments, max_size=5), depth=st.integers(-1, 6))
    def touch_anything(self, hashes: list[int], depth: int) -> None:
        self.both("touch", hashes, depth)

    @rule(worker=st.integers(-1, WORKERS), segment=segments)
    def remove(self, worker: int, segment: int) -> None:
        self.both("remove", worker, segment)

    @rule(worker=st.integers(-1, WORKERS))
    def clear(self, worker: int) -> None:
        self.both("clear", worker)

    @rule(data=st.data())
    def match(self, data: st.DataObject) -> None:
        self.both("matches", self.chain_to(data))

    @rule(hashes=st.lists(segments, max_size=5))
    def match_anything(self, hashes: list[int]) -> None:
        """What is no chain has no longest match, but nobody is said to hold what he does not."""
        answered = 0
        for match in self.index.matches(hashes):
            assert not match.workers & answered
            answered |= match.workers
            for worker in range(WORKERS):
                if match.workers >> worker & 1:
                    assert self.model.holds(worker, hashes[match.depth - 1])

    @rule(worker=workers)
    def replay(self, worker: int) -> None:
        copy = type(self.index)(100)
        for parent, segment, tokens in self.index.snapshot(worker):
            assert copy.store(worker, parent, segment, tokens)
        copy.check()
        assert set(copy.snapshot(worker)) == set(self.model.snapshot(worker))
        assert len(copy) == len(list(self.model.snapshot(worker)))

    @invariant()
    def they_agree(self) -> None:
        self.index.check()
        self.model.check()
        assert len(self.index) == len(self.model)
        for worker in range(WORKERS):
            assert set(self.index.snapshot(worker)) == set(self.model.snapshot(worker))


def run(naive_index: Any, limit: int, examples: int, index: Any) -> None:
    run_state_machine_as_test(
        lambda: Machine(naive_index, limit, index),
        settings=settings(max_examples=examples, stateful_step_count=40, deadline=None),
    )


def test_it_agrees_with_the_naive_index(naive_index: Any, hashed_index: Any) -> None:
    run(naive_index, limit=100, examples=40, index=hashed_index)


def test_it_agrees_with_a_small_limit(naive_index: Any, hashed_index: Any) -> None:
    """What is forgotten, and in which order, is the same."""
    run(naive_index, limit=5, examples=60, index=hashed_index)


def test_it_agrees_with_a_limit_of_one(naive_index: Any, hashed_index: Any) -> None:
    run(naive_index, limit=1, examples=10, index=hashed_index)


def test_a_view_of_a_shared_index_agrees_with_the_naive_index(
    naive_index: Any, viewed_index: Any
) -> None:
    run(naive_index, limit=100, examples=30, index=viewed_index)


def test_a_view_of_a_small_shared_index_agrees_with_the_naive_index(
    naive_index: Any, viewed_index: Any
) -> None:
    run(naive_index, limit=5, examples=30, index=viewed_index)
