"""Lines of prefix events: written by an engine, read by a balancer."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, get_type_hints

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix.residency_changes import Changes, Stored
from sgl_ext.wire import events
from sgl_ext.wire.events import (
    EngineLoad,
    Line,
    MalformedEvent,
    Row,
    StoringEvent,
    Subscribers,
    encode,
    lines_of,
    name_of,
    numbered,
    read_event,
    read_subscribers,
    runs_of,
)

segments = st.integers(0, 2**128 - 1)
names = segments.map(name_of)
tokens = st.integers(0, 2**40 - 1)
rows = st.lists(
    st.tuples(names, st.none() | names, tokens).filter(lambda row: row[0] != row[1]).map(list),
    min_size=1,
    max_size=4,
)
shares = st.floats(0, 1, exclude_min=True)
pins = st.fixed_dictionaries(
    {
        "prefix": names,
        "segment": st.none() | names,
        "tokens": tokens,
        "ttl_s": st.floats(0, 1e6),
        "left_s": st.floats(0, 1e6),
        "tier": st.sampled_from(["device", "host"]),
        "hits": st.integers(0, 99),
        "owner": st.text(max_size=3),
        "session": st.text(max_size=3),
    }
)
texts = st.lists(st.text(max_size=3), max_size=3)
lines = st.fixed_dictionaries(
    {},
    optional={
        "snapshot": st.just(True),
        "cleared": st.just(True),
        "alive": st.just(True),
        "complete": st.just(True),
        "publishes": st.lists(st.sampled_from(["prefixes", "host", "load"]), max_size=3),
        "machine": st.text(min_size=1, max_size=9),
        "shared_cleared": st.just(True),
        "removed": st.lists(names, min_size=1, max_size=3),
        "stored": rows,
        "host_removed": st.lists(names, min_size=1, max_size=3),
        "host": rows,
        "shared_removed": st.lists(names, min_size=1, max_size=3),
        "shared": rows,
        "unpinned": st.lists(names, min_size=1, max_size=3),
        "pinned": st.lists(pins, min_size=1, max_size=2),
        "load": st.fixed_dictionaries(
            {},
            optional={
                **dict.fromkeys(EngineLoad.__annotations__, tokens),
                "pins_declined": st.dictionaries(st.text(max_size=9), tokens, max_size=3),
            },
        ),
        "load_share": shares,
        "shared_share": shares,
        "caches_off": texts,
        "degraded": texts.filter(bool),
    },
)


def sent(line: Any, number: int = 0) -> bytes:
    return numbered(encode(line), number)


def read(line: Any) -> StoringEvent:
    event, _ = read_event(sent(line), with_stored=True)
    assert isinstance(event, StoringEvent)
    return event


@given(lines.filter(bool), st.integers(0, 2**40 - 1))
def test_what_is_written_arrives(line: Line, number: int) -> None:
    bytes_sent = sent(line, number)
    assert bytes_sent.endswith(b"\n")
    event, _ = read_event(bytes_sent, with_stored=True)
    assert event.seq == number
    found = msgspec.to_builtins(event)
    defaults = msgspec.to_builtins(StoringEvent(number))
    assert found == defaults | line | {"seq": number}
    lean, stored = read_event(bytes_sent, with_stored=False)
    assert not hasattr(lean, "stored")
    assert not stored.segments
    assert msgspec.to_builtins(lean).items() <= found.items() or lean.removed == event.removed


def test_both_ends_have_the_same_fields() -> None:
    for_the_http_process = {"shared_pages", "tiers_off", "stored_all"}
    written = {*get_type_hints(Line)} - for_the_http_process
    assert written | {"seq"} == {*StoringEvent.__struct_fields__}


@given(st.lists(st.tuples(segments, st.none() | segments, tokens), max_size=7), st.booleans())
def test_changes_arrive_in_lines_of_a_bounded_length(
    changed: list[tuple[int, int | None, int]], is_cleared: bool
) -> None:
    stored: list[Stored] = [row for row in changed if row[0] != row[1]]
    removed = [segment for segment, _, _ in changed]
    changes = Changes(is_cleared, removed, stored)
    before, events.LINE_SEGMENTS = events.LINE_SEGMENTS, 2
    try:
        found = [read(line) for line in lines_of(changes) if line]
    finally:
        events.LINE_SEGMENTS = before
    assert all(len(event.stored) <= 2 for event in found)
    assert [row.segment for event in found for row in event.stored] == [
        name_of(segment) for segment, _, _ in stored
    ]
    if found:
        assert (found[0].cleared is True) == is_cleared
        assert found[0].removed == [*map(name_of, removed)]


def test_the_bytes_of_lines() -> None:
    """What other readers rely on."""
    a, b = name_of(10), name_of(11)
    assert sent({"alive": True}, 7) == b'{"seq":7,"alive":true}\n'
    line: Line = {"removed": [a], "stored": [[b, a, 9]], "load": {"running": 1, "queued": 0}}
    assert (
        sent(line, 3)
        == (
            f'{{"seq":3,"removed":["{a}"],"stored":[["{b}","{a}",9]],'
            '"load":{"running":1,"queued":0}}\n'
        ).encode()
    )


def test_fields_of_a_later_version_are_ignored() -> None:
    event = read({"later": {"a": 1}, "load": {"running": 2, "later": "x"}, "removed": [name_of(1)]})
    assert event.load == {"running": 2}
    assert event.removed == [name_of(1)]


@given(lines.filter(bool), st.data())
def test_a_line_that_was_cut_is_malformed(line: Line, data: st.DataObject) -> None:
    whole = sent(line).rstrip(b"\n")
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(MalformedEvent):
        read_event(cut, with_stored=True)


@given(st.binary(max_size=30))
def test_no_bytes_raise_anything_else(junk: bytes) -> None:
    for with_stored in (True, False):
        with suppress(MalformedEvent):
            read_event(junk, with_stored=with_stored)


def test_columns_show_where_a_row_does_not_follow_the_one_before() -> None:
    a, b, c = map(name_of, (1, 2, 3))
    line: Line = {"stored": [[a, None, 5], [b, a, 9], [c, a, 7]]}
    event, stored = read_event(sent(line), with_stored=True)
    assert isinstance(event, StoringEvent)
    assert event.stored == [Row(a, None, 5), Row(b, a, 9), Row(c, a, 7)]
    assert [*runs_of(stored)] == [(0, 2), (2, 3)]
    assert [*stored.halves] == [0, 1, 0, 2, 0, 3]


@given(st.integers(0, 2**40))
def test_the_number_of_readers_arrives(number: int) -> None:
    assert read_subscribers(msgspec.json.encode(Subscribers(number))) == number


@pytest.mark.parametrize("wrong", [b"", b"{}", b"[]", b'{"subscribers":null}', b'{"subscribers":'])
def test_another_answer_is_an_error(wrong: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        read_subscribers(wrong)
    assert read_subscribers(orjson.dumps({"subscribers": 2, "later": 1})) == 2
