"""Prefix events: applied in order, or dropped and counted; the index never breaks."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix.in_flight_prefixes import InFlightPrefixes
from radix.index import PrefixIndex
from sgl_ext.balancer.routing.prefix_events import (
    EventStreamBroken,
    Fault,
    PrefixEventReader,
)
from sgl_ext.pin_mirror import PinMirror

WORKER, OTHER = 3, 5
NOW = 100.0


def name(number: int) -> str:
    return f"{number:032x}"


def line(seq: int, **event: Any) -> bytes:
    return orjson.dumps({"seq": seq, **event})


def snapshot(*stored: tuple[int, int | None, int], seq: int = 1) -> bytes:
    named = [[name(s), None if p is None else name(p), tokens] for s, p, tokens in stored]
    return line(seq, snapshot=True, cleared=True, stored=named)


class Mirrored:
    """A feed with its index."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.expected = InFlightPrefixes()
        self.pins = PinMirror()
        self.reader = PrefixEventReader(WORKER, self.index, self.expected, self.pins)

    def held(self) -> list[tuple[int | None, int, int]]:
        return list(self.index.snapshot(WORKER))


def test_a_snapshot_replaces_only_that_workers_segments() -> None:
    mirrored = Mirrored()
    mirrored.index.store(WORKER, None, 9, 10)
    mirrored.index.store(OTHER, None, 9, 10)
    mirrored.reader.apply(snapshot((1, None, 100), (2, 1, 200)), NOW)
    assert mirrored.held() == [(None, 1, 100), (1, 2, 200)]
    assert mirrored.index.holds(OTHER, 9)


def test_events_change_the_index() -> None:
    mirrored = Mirrored()
    mirrored.reader.apply(snapshot((1, None, 100), (2, 1, 200)), NOW)
    mirrored.reader.apply(line(2, stored=[[name(3), name(2), 300]]), NOW)
    mirrored.reader.apply(line(3, removed=[name(2)]), NOW)
    assert mirrored.held() == [(None, 1, 100)], "and what is below it"
    mirrored.reader.apply(line(4, cleared=True), NOW)
    assert mirrored.held() == []


def test_a_flush_drops_what_the_worker_had_computed() -> None:
    mirrored = Mirrored()
    mirrored.reader.apply(snapshot(), NOW)
    mirrored.expected.end(mirrored.expected.expect(WORKER, [7]), NOW + 5)
    # Sent after the flush, and before its event arrived.
    mirrored.expected.expect(WORKER, [8])
    mirrored.reader.apply(line(2, cleared=True), NOW)
    assert not mirrored.expected.deepest([7])
    assert mirrored.expected.deepest([8])


def test_a_first_snapshot_keeps_in_flight_prefixes() -> None:
    mirrored = Mirrored()
    mirrored.expected.expect(WORKER, [7])
    mirrored.reader.apply(snapshot(), NOW)
    assert len(mirrored.expected) == 1


@pytest.mark.parametrize("seq", [3, 100])
def test_a_gap_breaks_the_stream(seq: int) -> None:
    mirrored = Mirrored()
    mirrored.reader.apply(snapshot((1, None, 100)), NOW)
    with pytest.raises(EventStreamBroken) as broken:
        mirrored.reader.apply(line(seq, removed=[name(1)]), NOW)
    assert str(broken.value) == Fault.GAP
    assert mirrored.index.holds(WORKER, 1)


def test_a_stream_must_begin_with_a_snapshot() -> None:
    with pytest.raises(EventStreamBroken):
        Mirrored().reader.apply(line(1, stored=[[name(1), None, 1]]), NOW)


def test_a_repeated_line_is_dropped_and_counted() -> None:
    mirrored = Mirrored()
    mirrored.reader.apply(snapshot((1, None, 100), seq=4), NOW)
    mirrored.reader.apply(line(4, removed=[name(1)]), NOW)
    mirrored.reader.apply(line(2, removed=[name(1)]), NOW)
    assert (mirrored.reader.repeated, mirrored.index.holds(WORKER, 1)) == (2, True)


def test_a_segment_whose_parent_is_not_held_is_counted() -> None:
    mirrored = Mirrored()
    mirrored.reader.apply(snapshot(), NOW)
    mirrored.reader.apply(line(2, stored=[[name(2), name(1), 5]]), NOW)
    assert (mirrored.reader.orphans, mirrored.held()) == (1, [])


def test_conversations_of_one_line_are_stored_each_for_itself() -> None:
    mirrored = Mirrored()
    mirrored.expected.expect(WORKER, [12, 31])
    rows = [(10, None), (11, 10), (20, 99), (21, 20), (12, 11), (30, 10), (31, 30)]
    mirrored.reader.apply(snapshot(*[(s, parent, s) for s, parent in rows]), NOW)
    assert {s for _, s, _ in mirrored.held()} == {10, 11, 12, 30, 31}
    assert mirrored.reader.orphans == 2
    assert not mirrored.expected.expects(WORKER), "all is confirmed"
    mirrored.index.check()


@pytest.mark.parametrize("digits", ["AB" * 16, " " * 32, "é" * 32, "0x" * 16, "1 " * 16])
def test_segments_are_written_in_small_hex_digits(digits: str) -> None:
    for row in ([digits, None, 1], [name(1), digits, 1]):
        mirrored = Mirrored()
        with pytest.raises(EventStreamBroken):
            mirrored.reader.apply(line(1, snapshot=True, stored=[row]), NOW)
        assert mirrored.held() == []


def test_a_confirmed_and_evicted_segment_is_not_in_flight() -> None:
    mirrored = Mirrored()
    mirrored.reader.apply(snapshot(), NOW)
    sent = mirrored.expected.expect(WORKER, [1, 2])
    mirrored.reader.apply(line(2, stored=[[name(1), None, 100], [name(2), name(1), 200]]), NOW)
    mirrored.reader.apply(line(3, removed=[name(1)]), NOW)
    assert mirrored.expected.deepest([1, 2]) == {}
    mirrored.expected.end(sent, until_s=5)
    assert mirrored.expected.expire(5) == 0, "it was confirmed"


def test_the_load_is_read() -> None:
    mirrored = Mirrored()
    mirrored.reader.apply(snapshot(), NOW)
    load = {"running": 3, "pending_tokens": 700}
    assert mirrored.reader.apply(line(2, load=load), NOW).load == load


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"stored": []}',
        line(-1),
        line(True),
        orjson.dumps({"seq": "2"}),
        line(2, stored=[["x", None, 1]]),
        line(2, stored=[[name(1), None, -1]]),
        line(2, stored=[[name(1), None]]),
        line(2, stored=[[name(1), None, 1 << 60]]),
        line(2, stored=[[name(1), name(1), 1]]),
        line(2, stored={"a": 1}),
        line(2, removed=[name(1).upper() + "0"]),
        line(2, removed=5),
        line(2, removed=[None]),
        line(2, load=[1]),
        line(2, load={"running": "many"}),
        line(2, load={"max_running": -1}),
        line(2, load_share=1.5),
        line(2, stored=[[name(1), None, 1], [name(2), 7, 1]]),
    ],
)
def test_a_malformed_line_changes_nothing(raw: bytes) -> None:
    mirrored = Mirrored()
    mirrored.reader.apply(snapshot((1, None, 100)), NOW)
    with pytest.raises(EventStreamBroken) as broken:
        mirrored.reader.apply(raw, NOW)
    assert str(broken.value) == Fault.MALFORMED
    assert mirrored.held() == [(None, 1, 100)]


names = st.integers(0, 6).map(name)
events = st.fixed_dictionaries(
    {"seq": st.integers(0, 12)},
    optional={
        "snapshot": st.booleans(),
        "cleared": st.booleans(),
        "publishes": st.lists(st.sampled_from(["prefixes", "load"]), max_size=2),
        "removed": st.lists(names, max_size=3),
        "stored": st.lists(
            st.tuples(names, st.none() | names, st.integers(0, 1000)).map(list), max_size=5
        ),
        "load": st.dictionaries(st.sampled_from(["running", "queued"]), st.integers(0, 5)),
    },
)
junk = st.binary(max_size=20) | st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["seq", "stored", "removed", "load"]), inner)
    ),
).map(orjson.dumps)


@given(st.lists(events.map(orjson.dumps) | junk, max_size=30))
def test_no_events_break_the_index(lines: list[bytes]) -> None:
    mirrored = Mirrored()
    mirrored.index.store(OTHER, None, 99, 1)
    for raw in lines:
        try:
            mirrored.reader.apply(raw, NOW)
        except EventStreamBroken:
            mirrored.reader = PrefixEventReader(
                WORKER, mirrored.index, mirrored.expected, mirrored.pins
            )
        mirrored.index.check()
        assert mirrored.index.holds(OTHER, 99), "a worker speaks for itself alone"


PIN = {"prefix": name(1), "segment": name(2), "tokens": 100, "left_s": 9.5, "session": "s"}


def test_pins_are_followed() -> None:
    mirrored = Mirrored()
    mirrored.reader.apply(snapshot(), NOW)
    mirrored.reader.apply(line(2, pinned=[PIN]), NOW)
    assert mirrored.pins.rows(NOW) == [PIN]
    mirrored.reader.apply(line(3, unpinned=[name(1)]), NOW)
    assert mirrored.pins.rows(NOW) == []


@pytest.mark.parametrize(
    "event",
    [
        {"unpinned": ["x"]},
        {"pinned": [PIN | {"prefix": 5}]},
        {"pinned": [PIN | {"segment": "x"}]},
        {"pinned": [PIN | {"tokens": -1}]},
        {"pinned": [PIN | {"left_s": "long"}]},
        {"pinned": [PIN | {"session": None}]},
        {"pinned": [{}]},
        {"pinned": 7},
    ],
)
def test_impossible_pins_are_malformed(event: dict[str, Any]) -> None:
    mirrored = Mirrored()
    with pytest.raises(EventStreamBroken, match="malformed"):
        mirrored.reader.apply(line(1, snapshot=True, **event), NOW)


HOST, SHARED = 7, 8


class Tiered(Mirrored):
    """A worker with a host and a machine that has a shared tier."""

    def __init__(self) -> None:
        super().__init__()
        self.reader.find_tiers = lambda event: (HOST, SHARED)
        first = {"snapshot": True, "cleared": True, "publishes": ["prefixes", "host", "load"]}
        self.reader.apply(
            line(1, **first, stored=[[name(1), None, 100], [name(2), name(1), 200]]), NOW
        )

    def on(self, slot: int) -> list[int]:
        return [segment for _, segment, _ in self.index.snapshot(slot)]


def test_a_demoted_prefix_is_held_by_the_host_until_it_is_removed_there() -> None:
    tiered = Tiered()
    tiered.reader.apply(line(2, removed=[name(2)], host=[[name(2), name(1), 200]]), NOW)
    assert (tiered.held(), tiered.on(HOST)) == ([(None, 1, 100)], [1, 2])
    tiered.reader.apply(line(3, removed=[name(1)], host=[[name(1), None, 100]]), NOW)
    assert (tiered.held(), tiered.on(HOST)) == ([], [1, 2])
    tiered.reader.apply(line(4, host_removed=[name(2)]), NOW)
    assert tiered.on(HOST) == [1]
    tiered.reader.apply(line(5, stored=[[name(1), None, 100]]), NOW)
    assert tiered.held() == [(None, 1, 100)]
    tiered.reader.apply(line(6, removed=[name(1)], host_removed=[name(1)]), NOW)
    assert len(tiered.index) == 0
    tiered.index.check()


def test_a_flush_clears_the_host_and_not_the_shared_tier() -> None:
    tiered = Tiered()
    tiered.reader.apply(line(2, removed=[name(2)], host=[[name(2), name(1), 200]]), NOW)
    tiered.reader.apply(line(3, shared=[[name(2), name(1), 200]]), NOW)
    tiered.reader.apply(line(4, cleared=True), NOW)
    assert (tiered.held(), tiered.on(HOST), tiered.on(SHARED)) == ([], [], [1, 2])
    tiered.reader.apply(line(5, shared_removed=[name(2)]), NOW)
    assert tiered.on(SHARED) == [1]


def test_an_engine_that_announces_the_shared_tier_from_now_on_begins_with_nothing() -> None:
    """Another one announced before it, and may have said what is there no more."""
    tiered = Tiered()
    tiered.reader.apply(line(2, shared=[[name(1), None, 100], [name(2), name(1), 200]]), NOW)
    tiered.reader.apply(line(3, shared_cleared=True, shared=[[name(1), None, 100]]), NOW)
    assert (tiered.on(SHARED), tiered.held()) == ([1], [(None, 1, 100), (1, 2, 200)])
    tiered.reader.apply(line(4, shared_cleared=True), NOW)
    assert tiered.on(SHARED) == []


def test_tiers_that_were_not_announced_are_counted_and_change_nothing() -> None:
    mirrored = Mirrored()
    mirrored.reader.apply(snapshot((1, None, 100)), NOW)
    mirrored.reader.apply(line(2, host=[[name(2), name(1), 200]], shared_removed=[name(1)]), NOW)
    assert (mirrored.held(), mirrored.reader.orphans) == ([(None, 1, 100)], 1)


def test_a_host_segment_below_an_unknown_one_is_counted() -> None:
    tiered = Tiered()
    tiered.reader.apply(line(2, host=[[name(5), name(4), 200]]), NOW)
    assert (tiered.on(HOST), tiered.reader.orphans) == ([], 1)


@pytest.mark.parametrize("field", ["host_removed", "shared_removed"])
def test_a_tiers_segments_are_checked(field: str) -> None:
    with pytest.raises(EventStreamBroken, match=Fault.MALFORMED):
        Tiered().reader.apply(line(2, **{field: ["x" * 32]}), NOW)
