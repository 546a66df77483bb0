"""The ordered queue: its head is in order, and it sorts rarely."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import admission_queue
from scheduler.admission_queue import MOST_NEW, SORTED_FOR_S, Entry, OrderedQueue
from scheduler.order import Served, Waiting


def names(entries: Sequence[Entry[str]]) -> list[str | None]:
    return [entry.item for entry in entries]


def test_new_entries_are_in_order() -> None:
    waits = OrderedQueue[str](0.0, Served())
    waits.add("usual", Waiting(0, 100.0, 5))
    assert names(waits.head(9, 100.0)) == ["usual"]
    waits.add("cheap", Waiting(0, 100.1, 1))
    waits.add("person", Waiting(10, 100.1, 9))
    assert names(waits.head(9, 100.1)) == ["person", "cheap", "usual"]
    assert names(waits.head(2, 100.1)) == ["person", "cheap"]


def test_a_long_wait_moves_an_entry_up_within_a_second() -> None:
    waits = OrderedQueue[str](10.0, Served())
    waits.add("long", Waiting(0, 100.0, 5))
    waits.add("cheap", Waiting(0, 105.0, 1))
    waits.sort(109.9)
    assert names(waits.head(9, 109.9)) == ["cheap", "long"]
    assert names(waits.head(9, 109.9 + SORTED_FOR_S)) == ["long", "cheap"]


def test_what_waits_decides_how_long_a_window_is() -> None:
    asked: list[int] = []

    def window_s(tokens: int) -> float:
        asked.append(tokens)
        return 30.0 if tokens > 10 else 0.0

    waits = OrderedQueue[str](10.0, Served(), window_of=window_s)
    waits.add("dear", Waiting(0, 100.0, 9))
    waits.add("cheap", Waiting(0, 112.0, 2))
    assert names(waits.head(9, 112.0)) == ["cheap", "dear"], "11 tokens wait"
    waits.remove("cheap")
    waits.add("cheaper", Waiting(0, 113.0, 1))
    assert names(waits.sort(113.0)) == ["dear", "cheaper"], "10 tokens wait"
    waits.remove("cheaper")
    waits.remove("cheaper")
    waits.sort(114.0)
    assert asked == [11, 10, 9]


def test_removed_items_are_not_referenced() -> None:
    class Who:
        pass

    waits = OrderedQueue[Who](0.0, Served())
    gone = []
    for number in range(300):
        item = Who()
        gone.append(weakref.ref(item))
        waits.add(item, Waiting(0, 100.0, number))
        if number == 200:
            waits.head(9, 100.0)
        waits.remove(item)
        del item
    gc.collect()
    assert not any(one() for one in gone)
    assert len(waits) == len(waits.head(9, 100.0)) == 0


def test_adding_an_entry_does_not_sort_the_whole_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_in_all = []
    original = admission_queue.in_order

    def counted(waiting: list[Waiting], *args: Any) -> list[int]:
        sorted_in_all.append(len(waiting))
        return original(waiting, *args)

    monkeypatch.setattr(admission_queue, "in_order", counted)
    waits = OrderedQueue[int](0.0, Served())
    for number in range(10_000):
        waits.add(number, Waiting(0, 100.0, number))
    waits.head(32, 100.0)
    assert sorted_in_all == [10_000]
    for number in range(MOST_NEW):
        waits.remove(number)
        assert waits.head(32, 100.5)[0].item == number + 1
    assert sorted_in_all == [10_000], "nothing came, so nothing is sorted"
    for number in range(MOST_NEW):
        waits.add(-number - 1, Waiting(0, 100.5, 0))
        waits.head(32, 100.5)
    assert max(sorted_in_all[1:]) <= 32 + MOST_NEW
    waits.add(10_000, Waiting(0, 100.5, 0))
    waits.head(32, 100.5)
    assert sorted_in_all[-1] == len(waits), "too many are new"


comings = st.tuples(st.integers(-1, 2), st.integers(0, 9), st.sampled_from("ab"))


@given(st.lists(comings | st.integers(0, 40), max_size=60), st.integers(1, 5))
def test_the_head_is_the_beginning_of_the_whole_order(
    events: list[tuple[int, int, str] | int], most: int
) -> None:
    waits = OrderedQueue[int](0.0, Served())
    number = 0
    for event in events:
        if isinstance(event, int):
            waits.remove(event)
        else:
            priority, cost, _ = event
            waits.add(number, Waiting(priority, 100.0 + number / 1000, cost))
            number += 1
        found = [entry.item for entry in waits.head(most, 100.1)]
        whole = OrderedQueue[int](0.0, Served())
        for entry in waits:
            assert entry.item is not None
            whole.add(entry.item, entry.waiting)
        assert found == [entry.item for entry in whole.sort(100.1)][:most]
