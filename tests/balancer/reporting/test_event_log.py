"""The events of a node: their order, their bounds, and what outlives a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting import event_log
from sgl_ext.balancer.reporting.event_log import (
    FILE_BYTES,
    LINE_BYTES,
    MOST_WAITING,
    REPEAT_S,
    SHOWN,
    EventLog,
    EventWatch,
)
from sgl_ext.balancer.routing.workers import Workers
from sgl_ext.membership.member import Member


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


def shown(events: EventLog) -> list[tuple[str, str, str, int]]:
    return [(e["kind"], e["subject"], e["text"], e["times"]) for e in events.latest()]


def test_all_processes_have_one_list_that_outlives_them(tmp_path: Path) -> None:
    path, clock = tmp_path / "run" / "events.jsonl", Clock()
    launcher, balancer = EventLog(path, clock), EventLog(path, clock)
    assert balancer.latest() == []
    launcher.add("crashed", "engine-1", "SIGKILL")
    launcher.write()
    balancer.add("unreachable", "engine-1@box", "Connection refused")
    balancer.write()
    launcher.add("restarted", "engine-1")
    launcher.write()
    found = [
        ("crashed", "engine-1", "SIGKILL", 1),
        ("unreachable", "engine-1@box", "Connection refused", 1),
        ("restarted", "engine-1", "", 1),
    ]
    for events in (launcher, balancer, EventLog(path, clock)):
        assert shown(events) == found
    assert [e["level"] for e in balancer.latest()] == ["error", "error", "info"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_happens_again_and_again_is_one_event_a_minute(tmp_path: Path) -> None:
    clock = Clock()
    events = EventLog(tmp_path / "events", clock)
    for _ in range(1000):
        events.add("limit reached", "queue", "it was full")
    events.write()
    assert shown(events) == [("limit reached", "queue", "it was full", 1)]
    clock.now_s += REPEAT_S
    events.write()
    assert shown(events)[1:] == [("limit reached", "queue", "it was full", 999)]
    clock.now_s += REPEAT_S
    events.write()
    events.add("limit reached", "queue", "it was full", 3)
    events.write()
    assert shown(events)[2:] == [("limit reached", "queue", "it was full", 3)]


def test_the_file_has_a_bound_and_at_least_the_last_events(tmp_path: Path) -> None:
    path, clock = tmp_path / "events", Clock()
    events = EventLog(path, clock)
    for number in range(3 * SHOWN):
        clock.now_s += REPEAT_S
        events.add("added", f"engine-{number}" + "\x00" * 200, "\N{SNOWMAN}\x01" * 500)
        events.write()
        assert path.stat().st_size <= FILE_BYTES
    assert len(events.latest()) == SHOWN
    assert max(map(len, path.read_bytes().splitlines())) < LINE_BYTES
    assert {each.name for each in tmp_path.iterdir()} == {"events", "events.1"}


def test_what_waits_has_a_bound_and_what_is_lost_is_told(tmp_path: Path) -> None:
    clock = Clock()
    events = EventLog(tmp_path / "events", clock)
    for number in range(MOST_WAITING + 5):
        events.add("added", f"engine-{number}")
    events.write()
    events.write()
    assert shown(events)[-1][::3] == ("events lost", 5)


def test_a_disk_that_fails_loses_nothing_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    events = EventLog(tmp_path / "events", Clock())
    events.add("crashed", "engine-0")
    with monkeypatch.context() as patched:
        patched.setattr(event_log, "_append_lines", fails)
        with pytest.raises(OSError, match="No space left"):
            events.write()
    events.write()
    assert [kind for kind, *_ in shown(events)] == ["crashed"]


def test_a_broken_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(b'{"time_s": 1, "ki\n')
    events = EventLog(path, Clock())
    events.add("started", "node")
    events.write()
    assert [kind for kind, *_ in shown(events)] == ["started"]


ONE, TWO = Member(id="1", url="http://a:1"), Member(id="2", url="http://b:1")


def watched(*, is_first: bool = True) -> tuple[EventWatch, Metrics, Workers, EventLog]:
    events, metrics = EventLog(None, Clock()), Metrics()
    workers = Workers(metrics, lambda: 100.0)
    workers.apply("x", [ONE, TWO])
    watch = EventWatch(events, metrics, workers, is_first=is_first)
    watch.look()
    return watch, metrics, workers, events


def test_each_change_of_an_engine_is_an_event_once() -> None:
    watch, _, workers, events = watched()
    assert shown(events) == [], "what was there before has not happened"
    one = workers.find("1")
    assert one is not None
    workers.mark(one, ready=True)
    watch.look()
    watch.look()
    workers.mark(one, ready=False, cause="Connection refused")
    watch.look()
    workers.mark(one, ready=True)
    workers.remove(one, 1.0)
    watch.look()
    workers.apply("x", [ONE, Member(id="3", url="http://c:1")])
    watch.look()
    assert shown(events) == [
        ("ready", "1", "", 1),
        ("unreachable", "1", "Connection refused", 1),
        ("drained", "1", "", 1),
        ("added", "3", "http://c:1", 1),
        ("left", "2", "", 1),
    ]


def test_an_engine_that_is_started_again_does_not_leave() -> None:
    watch, _, workers, events = watched()
    names = {"name": "engine-0@box", "url": "http://a:1"}
    workers.apply("x", [Member(id="engine-0@box", **names), TWO])
    watch.look()
    workers.apply("x", [Member(id="engine-0@box", state="ended", **names), TWO])
    watch.look()
    workers.apply("x", [Member(id="engine-0.2@box", **names), TWO])
    watch.look()
    assert [kind for kind, *_ in shown(events)] == ["added", "left"], "1 left for it"


def test_limits_failures_and_refused_pins_are_events_with_their_number() -> None:
    watch, metrics, workers, events = watched()
    metrics.requests_rejected.inc(7)
    metrics.tenant_rate_limited.counts["alice", "tokens"] += 2
    metrics.store_events.counts[("failed",)] += 1
    metrics.store_events.counts[("written",)] += 1
    metrics.suspect_requests.counts[("convicted",)] += 1
    metrics.suspect_requests.counts[("cleared",)] += 1
    metrics.file_reloads.counts["keys", "refused"] += 1
    one = workers.find("1")
    assert one is not None
    one.report = {"pins_declined": {"budget": 3, "unknown": 1}}
    watch.look()
    watch.look()
    found = {(kind, subject, times) for kind, subject, _, times in shown(events)}
    assert found == {
        ("limit reached", "queue", 7),
        ("limit reached", "alice", 2),
        ("store failed", "store", 1),
        ("request convicted", "request", 1),
        ("reload refused", "keys", 1),
        ("pins refused", "1", 4),
    }


def test_a_cache_or_tier_that_turns_off_and_on_is_an_event() -> None:
    watch, _, workers, events = watched()
    one = workers.find("1")
    assert one is not None
    for off in ([], ["shared tier (full)"], ["shared tier (full)", "tokens"], ["tokens"]):
        one.note_faults(off, None)
        watch.look()
    assert shown(events) == [
        ("cache off", "1", "shared tier (full)", 1),
        ("cache off", "1", "tokens", 1),
        ("cache on", "1", "shared tier (full)", 1),
    ]


def test_only_the_first_process_of_a_balancer_tells_of_engines() -> None:
    watch, metrics, workers, events = watched(is_first=False)
    one = workers.find("1")
    assert one is not None
    workers.mark(one, ready=True)
    metrics.bodies_rejected.inc()
    watch.look()
    assert [(kind, subject) for kind, subject, *_ in shown(events)] == [
        ("limit reached", "byte budget")
    ]
