"""The processes of a group agree on slots, and see what one of them writes."""

import os
from collections.abc import Callable

import pytest

from radix.index import SharedIndex
from radix.index_memory import MAX_HOLDERS, IndexView, Match
from sgl_ext.balancer.cluster.group_memory import GroupMemory
from sgl_ext.balancer.routing.workers import Slots

Make = Callable[[], Slots]
A, B, C = (number << 100 | number for number in (1, 2, 3))


@pytest.fixture
def memory() -> GroupMemory:
    return GroupMemory(1000)


@pytest.fixture(params=["a process of its own", "a group"])
def slots(request: pytest.FixtureRequest, memory: GroupMemory) -> Slots:
    return memory.slots(0) if request.param == "a group" else Slots()


def test_each_worker_has_a_slot_of_its_own_which_is_taken_again_after_it_left(slots: Slots) -> None:
    taken = [slots.take(name) for name in "abc"]
    assert taken == [0, 1, 2]
    slots.give_back(1)
    assert slots.take("d") == 1
    assert slots.take("e") == 3


def test_more_workers_than_can_be_held_apart_have_slots(slots: Slots) -> None:
    taken = [slots.take(str(number)) for number in range(MAX_HOLDERS + 3)]
    assert len(set(taken)) == len(taken)
    slots.give_back(taken[-2])
    assert slots.take("another") == taken[-2]


def test_processes_have_the_same_slots_whatever_their_order(memory: GroupMemory) -> None:
    first, second = memory.slots(0), memory.slots(1)
    assert [first.take(name) for name in "abc"] == [0, 1, 2]
    assert [second.take(name) for name in "cdba"] == [2, 3, 1, 0]
    assert first.take("d") == 3


def test_a_slot_is_free_after_the_worker_left_in_every_process(memory: GroupMemory) -> None:
    first, second = memory.slots(0), memory.slots(1)
    for slots in (first, second):
        slots.take("a")
    first.give_back(0)
    assert first.take("b") == 1
    second.give_back(0)
    assert [second.take("c"), second.take("b")] == [0, 1]


def test_a_process_that_starts_again_has_what_the_others_have(memory: GroupMemory) -> None:
    first, second = memory.slots(0), memory.slots(1)
    first.take("only there")
    for slots in (first, second):
        slots.take("a")
    again = memory.slots(0)
    assert second.take("b") == 0, "what the dead process alone had is free"
    assert [again.take("a"), again.take("b")] == [1, 0]


def test_a_worker_is_ready_in_all_once_each_process_that_has_it_found_it_so(
    memory: GroupMemory,
) -> None:
    first, second = memory.slots(0), memory.slots(1)
    slot = first.take("a")
    first.mark(slot, ready=True)
    assert first.all_ready(slot), "the other one does not have it yet"
    second.take("a")
    assert not first.all_ready(slot)
    second.mark(slot, ready=True)
    assert first.all_ready(slot)
    second.mark(slot, ready=True)
    assert first.all_ready(slot), "said twice it is the same"
    second.mark(slot, ready=False)
    assert not first.all_ready(slot)
    second.give_back(slot)
    assert first.all_ready(slot)


def test_a_slot_is_not_ready_when_the_next_worker_takes_it(slots: Slots) -> None:
    slot = slots.take("a")
    slots.mark(slot, ready=True)
    assert slots.all_ready(slot)
    slots.give_back(slot)
    assert slots.take("b") == slot
    assert not slots.all_ready(slot)


def test_a_process_that_starts_again_has_found_nothing_ready(memory: GroupMemory) -> None:
    first, second = memory.slots(0), memory.slots(1)
    slot = first.take("a")
    for slots in (first, second):
        slots.take("a")
        slots.mark(slot, ready=True)
    again = memory.slots(1)
    assert first.all_ready(slot), "it does not have it yet"
    again.take("a")
    assert not first.all_ready(slot)


def in_another_process(action: Callable[[], bool]) -> bool:
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if action() else 1
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


@pytest.fixture
def view(memory: GroupMemory) -> IndexView:
    return IndexView(memory.index)


def test_what_one_process_writes_others_find(memory: GroupMemory, view: IndexView) -> None:
    def write() -> bool:
        index = SharedIndex(memory.index)
        assert memory.slots(3).take("a") == 0
        stored = index.store(0, None, A, 10) and index.store(0, A, B, 20)
        index.publish()
        return stored

    assert in_another_process(write)
    assert memory.index.is_complete
    assert view.matches([A, B, C]) == [Match(1, 2, 20)]
    assert memory.slots(1).take("a") == 0


def test_the_unused_half_is_erased_for_the_next_writer(
    memory: GroupMemory, view: IndexView
) -> None:
    for segment in (A, B, C, A, B):
        index = SharedIndex(memory.index)
        assert len(index) == 0
        index.store(0, None, segment, 10)
        index.publish()
        assert [each for each in (A, B, C) if view.holds(0, each)] == [segment]
        index.check()


def test_it_is_erased_where_pages_cannot_be_given_back(
    monkeypatch: pytest.MonkeyPatch, memory: GroupMemory, view: IndexView
) -> None:
    class Mapped:
        def madvise(self, *_: int) -> None:
            raise OSError

    monkeypatch.setattr(memory, "_mapped", Mapped())
    test_the_unused_half_is_erased_for_the_next_writer(memory, view)
