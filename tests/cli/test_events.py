"""`sgl-ext events`: what people and programs read of what happened on a node."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sgl_ext.cli import events
from tests.cli.conftest import Run
from tests.cli.fake_node import FakeNode, state_of

PATH = "GET /sgl_ext/state"


def event(at_s: float, kind: str, text: str = "", times: int = 1) -> dict[str, Any]:
    about = {"level": "error", "subject": "engine-1", "text": text, "times": times}
    return {"time_s": at_s, "kind": kind, **about}


CRASH = event(1.0, "crashed", "SIGKILL; it restarts in 1 s")
FULL = event(2.0, "limit reached", "it was full\x1b[31m", 7)
READY = event(3.0, "ready")


def test_people_see_when_what_and_how_often(node: FakeNode, run: Run) -> None:
    node.answers[PATH] = state_of(events=[CRASH, FULL])
    code, out, err = run("events")
    assert (code, err) == (0, "")
    first, second = out.splitlines()
    assert first.endswith("  crashed  engine-1: SIGKILL; it restarts in 1 s")
    assert second.endswith("  limit reached  engine-1: it was full?[31m (7 times)")
    assert run("events", "-n", "1")[1].count("\n") == 1


def test_programs_get_them_as_they_are(node: FakeNode, run: Run) -> None:
    node.answers[PATH] = state_of(events=[CRASH, FULL])
    code, out, _ = run("events", "--json")
    assert (code, json.loads(out)) == (0, [CRASH, FULL])


def test_following_prints_each_event_once(
    node: FakeNode, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.answers[PATH] = state_of(events=[CRASH])
    node.live = lambda: iter([state_of(events=[CRASH, FULL]), state_of(events=[FULL, READY])])

    def once(before: list[Any], now: list[Any]) -> list[Any]:
        found = list(new_events(before, now))
        if not now or now[-1] == READY:
            raise KeyboardInterrupt
        return found

    new_events = events.new_events
    monkeypatch.setattr(events, "new_events", once)
    _, out, _ = run("events", "-f", "--json")
    assert [json.loads(line)["kind"] for line in out.splitlines()] == ["crashed", "limit reached"]


@pytest.mark.parametrize(
    ("before", "now", "new"),
    [
        ([], [CRASH], [CRASH]),
        ([CRASH], [CRASH], []),
        ([CRASH], [CRASH, FULL, READY], [FULL, READY]),
        ([CRASH], [FULL, READY], [FULL, READY]),
    ],
)
def test_new_events_follow_the_last_one(before: Any, now: Any, new: Any) -> None:
    assert events.new_events(before, now) == new


def test_a_node_of_another_version_says_so(node: FakeNode, run: Run) -> None:
    node.answers[PATH] = {"node": {"status": "ok"}}
    code, _, err = run("events")
    assert (code, "another version" in err) == (1, True)
