"""Announcing what the tier that engines share holds: once, whichever engines there are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_ext.engine.http.event_broadcaster import EventBroadcaster, SharedAnnouncer
from tests.engine.http.test_event_broadcaster import Reader, line
from tests.engine.tiers.test_segment_notes import KEYS, SEGMENTS, Engine, root

__all__ = ["root"]
ROWS = [
    [f"{segment:032x}", None if parent is None else f"{parent:032x}", tokens]
    for segment, parent, tokens in SEGMENTS
]


@pytest.fixture
def engine(root: Path) -> Engine:
    """An engine that has stored three segments."""
    engine = Engine(root)
    engine.store(KEYS)
    engine.notes.add(SEGMENTS, KEYS)
    engine.notes.write(5)
    return engine


@pytest.fixture
def two(engine: Engine) -> Iterator[list[SharedAnnouncer]]:
    """Two engines' parts in announcing."""
    both = [SharedAnnouncer(engine.pages.path) for _ in range(2)]
    yield both
    for each in both:
        each.close()


def test_one_engine_announces_what_all_stored(engine: Engine, two: list[SharedAnnouncer]) -> None:
    first, second = two
    assert first.step() == [{"shared_cleared": True}, {"shared": ROWS}]
    assert (first.step(), second.step(), len(first)) == ([], [], 3)
    engine.pages.drop(KEYS[1])
    assert first.step() == [{"shared_removed": [ROWS[1][0]]}], "and with it what is below"
    engine.store(KEYS)
    assert first.step() == [{"shared": ROWS[1:]}]
    assert second.step() == []


def test_when_it_ends_another_engine_goes_on_from_nothing(engine: Engine) -> None:
    first, second = (SharedAnnouncer(engine.pages.path) for _ in range(2))
    assert first.step()
    engine.pages.drop(KEYS[2])
    assert second.step() == []
    first.close()
    assert second.step() == [{"shared_cleared": True}, {"shared": ROWS[:2]}]
    second.close()


async def test_a_balancer_is_sent_it_by_one_engine_at_once_or_with_a_snapshot(
    engine: Engine, root: Path
) -> None:
    both = [EventBroadcaster() for _ in range(2)]
    readers = [Reader(each) for each in both]
    for reader in readers:
        await reader.have(2)
    for broadcaster in both:
        first = {"publishes": ["prefixes", "host", "load"], "machine": "m"}
        broadcaster.apply(line(**first, shared_pages=str(engine.pages.path)))
        await broadcaster.announce()
    await readers[0].have(5)
    await readers[1].have(3)
    assert readers[1].lines[2] == {"seq": 2, **first}, "without the path"
    assert [row.get("shared") for row in readers[0].lines[3:]] == [None, ROWS]
    engine.pages.drop(KEYS[2])
    for broadcaster in both:
        await broadcaster.announce()
    readers += [Reader(each) for each in both]
    await readers[2].have(3)
    await readers[3].have(2)
    snapshot, stored, last = readers[2].lines
    assert (snapshot["machine"], snapshot["shared_cleared"]) == ("m", True)
    assert (stored["shared"], last["complete"]) == (ROWS[:2], True)
    assert readers[3].lines[0]["machine"] == "m"
    assert "shared_cleared" not in readers[3].lines[0]
    assert {"shared_segments"} <= {table for table, *_ in both[0].tables()}
    for each in readers:
        each.left.set()
        await each.task
