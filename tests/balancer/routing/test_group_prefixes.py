"""Two processes of a group: one writes the index, the other only looks up in it."""

from typing import Any

import orjson
import pytest

from sgl_ext.balancer.cluster.group_memory import GroupMemory
from sgl_ext.balancer.routing.prefix_events import EventStreamBroken, PrefixEventReader
from sgl_ext.balancer.routing.prefixes import Prefixes
from sgl_ext.pin_mirror import PinMirror
from sgl_ext.reading.segments import Chain

WORKER, OTHER, NOW = 3, 4, 100.0
CHAIN = Chain(hashes=[number << 100 | number for number in (1, 2, 3)], ends=[100, 200, 300])
NAMES = [f"{segment:032x}" for segment in CHAIN.hashes]
FIRST, SECOND = [NAMES[0], None, 1000], [NAMES[1], NAMES[0], 2000]


class Process:
    """A process of the group, subscribed to one worker."""

    def __init__(self, memory: GroupMemory, *, writes: bool) -> None:
        self.prefixes = Prefixes(memory.index, writes=writes)
        written, in_flight = self.prefixes.written, self.prefixes.in_flight
        self.reader = PrefixEventReader(WORKER, written, in_flight, PinMirror())

    def held(self) -> tuple[int, int]:
        """The tokens that the worker holds of the chain, and those that it will hold."""
        held = self.prefixes.lookup(CHAIN)[WORKER]
        return held.tokens, held.expected_tokens


class Group:
    def __init__(self) -> None:
        memory = GroupMemory(100)
        self.writer = Process(memory, writes=True)
        self.other = Process(memory, writes=False)
        self.both = (self.writer, self.other)
        self._seq = 0

    def send(self, *processes: Process, **event: Any) -> None:
        for process in processes or self.both:
            process.reader.apply(orjson.dumps({"seq": self._seq, **event}), NOW)
        self._seq += 1


@pytest.fixture
def group() -> Group:
    group = Group()
    group.send(snapshot=True, cleared=True, stored=[FIRST, SECOND])
    return group


def test_both_find_what_the_worker_holds(group: Group) -> None:
    assert [process.held()[0] for process in group.both] == [2000, 2000]
    group.send(removed=[NAMES[1]])
    assert [process.held()[0] for process in group.both] == [1000, 1000]
    group.send(cleared=True)
    assert [process.held()[0] for process in group.both] == [0, 0]


def test_gaps_and_malformed_lines_end_the_stream_of_a_process_that_writes_nothing(
    group: Group,
) -> None:
    for line in (b'{"seq":9}', b'{"seq":1,"removed":["x"]}', b"["):
        with pytest.raises(EventStreamBroken):
            group.other.reader.apply(line, NOW)


def test_what_is_in_flight_stays_until_the_index_has_it(group: Group) -> None:
    """The other process may have read the event before the index was written."""
    in_flight = group.other.prefixes.in_flight
    in_flight.end(in_flight.expect(WORKER, CHAIN.hashes[2:]), NOW + 5)
    third = [NAMES[2], NAMES[1], 3000]
    group.send(group.other, stored=[third])
    group.other.prefixes.sweep()
    assert len(in_flight) == 1
    assert group.other.held()[1] > 2000
    group.writer.reader.apply(orjson.dumps({"seq": 1, "stored": [third]}), NOW)
    group.other.prefixes.sweep()
    assert (len(in_flight), in_flight.expire(NOW + 9)) == (0, 0), "it was confirmed"
    assert group.other.held() == (3000, 3000)


def test_what_is_never_held_counts_as_unconfirmed(group: Group) -> None:
    in_flight = group.other.prefixes.in_flight
    in_flight.end(in_flight.expect(WORKER, CHAIN.hashes[2:]), NOW + 5)
    group.other.prefixes.sweep()
    assert in_flight.expire(NOW + 9) == 1


def test_what_a_worker_evicts_is_not_in_flight(group: Group) -> None:
    in_flight = group.other.prefixes.in_flight
    in_flight.end(in_flight.expect(WORKER, CHAIN.hashes[2:]), NOW + 5)
    group.send(removed=[NAMES[2]])
    assert len(in_flight) == 0


def test_only_the_process_that_writes_forgets_a_worker_in_the_index(group: Group) -> None:
    group.other.prefixes.forget_worker(WORKER)
    assert group.writer.held()[0] == 2000
    group.writer.prefixes.forget_worker(WORKER)
    assert group.other.held()[0] == 0
