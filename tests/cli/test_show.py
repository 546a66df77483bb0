"""What is printed controls no terminal, whatever names clients choose."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from sgl_ext.cli.show import cell, duration, plain, table
from tests.cli.conftest import Run
from tests.cli.fake_node import FakeNode, state_of

EVIL = "\x1b]0;owned\x07[bold red]x[/] \u202e\r\n:smile:"


def printed(value: object) -> str:
    console = Console(width=200, force_terminal=True)
    with console.capture() as captured:
        console.print(table(("name",), [[value]]))
    return captured.get()


def test_a_name_cannot_control_the_terminal_and_is_no_markup() -> None:
    assert plain(EVIL) == "?]0;owned?[bold red]x[/] ???:smile:"
    shown = printed(EVIL)
    assert "?]0;owned?[bold red]x[/] ???:smile:" in shown
    assert "\x07" not in shown
    assert "\u202e" not in shown
    assert "\x1b]" not in printed([EVIL])


@pytest.mark.parametrize("argv", [["status"], ["status", "--json"], ["pins"], ["clients"]])
def test_no_verb_prints_control_characters(node: FakeNode, run: Run, argv: list[str]) -> None:
    state = state_of()
    state["node"]["model"] = state["engines"][0]["id"] = state["engines"][0]["state"] = EVIL
    pin = state["pins"][0] | {"session": EVIL, "owner": EVIL}
    node.answers = {
        "GET /sgl_ext/state": state,
        "GET /v1/pins": {"pins": [pin]},
        "GET /v1/models": {"data": [{"id": EVIL}]},
    }
    code, out, _ = run(*argv)
    assert code == 0
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(out)
    if "--json" in argv:
        assert json.loads(out) == state


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        ("", "-"),
        (True, "yes"),
        (1234567, "1,234,567"),
        (0.5, "0.5"),
        (1234.0, "1,234"),
        (0.12345, "0.123"),
        ({"a": [1]}, '{"a": [1]}'),
    ],
)
def test_values_are_shown_as_people_read_them(value: object, shown: str) -> None:
    assert cell(value).plain == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 s"), (59.9, "59 s"), (61, "1 min 1 s"), (3661, "1 h 1 min"), (90_000, "1 d 1 h")],
)
def test_durations_have_two_units(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
