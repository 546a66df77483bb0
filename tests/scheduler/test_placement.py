"""Placement: same prefix, same worker; none far above its share; stable when workers change."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from scheduler.placement import LOAD_SLACK, WorkerLoad, place

names = st.text("abcdef0123456789:", min_size=1, max_size=12)
workers = st.lists(
    st.builds(WorkerLoad, names, st.integers(0, 50)),
    min_size=1,
    max_size=8,
    unique_by=lambda w: w.name,
)
prefixes = st.integers(0, 2**64 - 1)


def idle(count: int) -> list[WorkerLoad]:
    return [WorkerLoad(f"http://127.0.0.1:{30001 + i}", 0) for i in range(count)]


@given(prefixes, workers)
def test_the_choice_is_a_worker_within_the_bound_whatever_their_order(
    prefix: int, loads: list[WorkerLoad]
) -> None:
    chosen = place(prefix, loads)
    assert chosen == place(prefix, loads[::-1])
    load = {worker.name: worker.in_flight for worker in loads}[chosen or ""]
    total = sum(worker.in_flight for worker in loads) + 1
    assert load < math.ceil(LOAD_SLACK * total / len(loads))


@given(prefixes, st.integers(2, 8))
def test_a_worker_that_leaves_moves_only_its_own_prefixes(prefix: int, count: int) -> None:
    loads = idle(count)
    chosen = place(prefix, loads)
    for gone in loads:
        if gone.name != chosen:
            assert place(prefix, [w for w in loads if w is not gone]) == chosen


def test_many_prefixes_use_every_worker() -> None:
    chosen = Counter(place(prefix, idle(4)) for prefix in range(4000))
    assert min(chosen.values()) > 800


def test_one_hot_prefix_spreads_and_stays_balanced() -> None:
    load = {worker.name: 0 for worker in idle(4)}
    for _ in range(100):
        name = place(7, [WorkerLoad(*item) for item in load.items()])
        load[name or ""] += 1
    assert max(load.values()) <= math.ceil(LOAD_SLACK * 100 / 4)


def test_without_a_prefix_the_least_loaded_takes_it() -> None:
    assert place(None, [WorkerLoad("a", 2), WorkerLoad("c", 1), WorkerLoad("b", 1)]) == "b"
    assert place(None, []) is None
    assert place(1, []) is None
