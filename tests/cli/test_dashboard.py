"""What `top` shows fits its terminal and shares its lines fairly."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from sgl_ext.cli.node import Node
from sgl_ext.cli.status import read_state
from sgl_ext.cli.top import dashboard, shared_out, sparkline
from tests.cli.fake_node import state_of

NODE = Node("http://box:30000")


def busy() -> dict[str, Any]:
    state = state_of()
    state["sessions"] = [state["sessions"][0] | {"id": f"session-{n}"} for n in range(200)]
    state["pins"] = [state["pins"][0] | {"prefix": f"{n:032x}"} for n in range(50)]
    return state | {"counts": {"sessions": 5000, "pins": 50}}


def lines(document: dict[str, Any], width: int, height: int, note: str | None = None) -> list[str]:
    console = Console(width=width, height=height)
    found = read_state(document, NODE)
    with console.capture() as captured:
        console.print(dashboard(found, NODE.url, note, width, height))
    return captured.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 10), (20, 5), (1, 1)])
def test_it_fits_any_terminal(width: int, height: int) -> None:
    shown = lines(busy(), width, height)
    assert max(map(len, shown)) <= width
    assert len(shown) <= max(height, 4)


def test_everything_has_a_place_at_80_by_24() -> None:
    shown = lines(busy(), 80, 24)
    text = "\n".join(shown)
    assert shown[0].startswith("sgl-ext  http://box:30000  ok  tiny  up 1 h 1 min")
    assert shown[0].endswith("q: quit")
    assert "hit rate      90.0%" in text
    assert "TTFT p99        4 s" in text
    assert "3 of 1,024 queued" in shown[3]
    assert "engine-0  ready" in text
    assert "engine-1  starting: loading weights" in text
    assert "sessions (5 of 5,000)" in text
    assert "pins (4 of 50)" in text
    assert "51.2K   98.0%   4 s" in text
    assert "alice           7   99.0K   50.0%" in text
    assert len(shown) == 24


def test_a_broken_connection_is_in_the_first_line() -> None:
    assert lines(busy(), 80, 24, "no node answers")[0].startswith("no node answers")


def test_lines_are_shared_out_and_what_one_leaves_goes_to_others() -> None:
    assert shared_out(10, [2, 50, 3]) == [2, 5, 3]
    assert shared_out(10, [50, 50]) == [5, 5]
    assert shared_out(10, [1, 2]) == [1, 2]
    assert shared_out(-3, [1, 2]) == [0, 0]
    assert shared_out(5, []) == []


def test_a_sparkline_averages_groups_and_leaves_unknown_values_blank() -> None:
    assert sparkline([0.0, 0.5, 1.0], 3, 1.0) == "▁▅█"
    assert sparkline([0.0, None, 2.0], 5) == "  ▁ █"
    assert sparkline([0, 0, 1, 3, 4, 4], 3) == "▁▅█"
    assert sparkline([9, 1, 1, 3, 3], 2) == "█▄"
    assert sparkline([], 3) == "   "
    assert sparkline([0.0], 1) == "▁"


def test_models_and_the_latest_events_have_tables() -> None:
    event = {"time_s": 1_700_000_000.0, "kind": "crashed", "level": "error", "text": "SIGKILL"}
    events = [event | {"subject": f"engine-{n}@box:30000", "times": n + 1} for n in range(9)]
    models = [{"name": name, "engines": 2, "ready": 1, "in_flight": 3} for name in ("big", "fast")]
    document = busy() | {"events": events, "models": models}
    text = "\n".join(lines(document, 120, 60))
    assert "big" in text
    assert "1 of 2" in text
    assert "events (5 of 9)" in text
    assert text.index("engine-8") < text.index("engine-7")
    assert "SIGKILL (9 times)" in text
    assert "engine-3  SIGKILL" not in text
    assert "models" not in "\n".join(lines(document | {"models": models[:1]}, 120, 60))
    assert len(lines(document, 80, 24)) <= 24
