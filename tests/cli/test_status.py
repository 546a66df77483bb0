"""`sgl-ext status`: what people and programs read, and its exit code."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from rich.console import Console

from sgl_ext.cli.status import Engine, engines_table
from tests.cli.conftest import Run
from tests.cli.fake_node import FakeNode, state_of

PATH = "GET /sgl_ext/state"


def test_people_see_engines_queue_and_cache(node: FakeNode, run: Run) -> None:
    node.answers[PATH] = state_of()
    code, out, err = run("status")
    assert (code, err) == (0, "")
    assert "sgl-ext 0.1.0 (0123456789ab), SGLang 0.5.23" in out
    assert "ok   model tiny   up 1 h 1 min   4 in flight   3 of 1,024 queued" in out
    figures = "hit rate 90.0%   TTFT p50 0.9 s, p99 4 s   1.5 MB not sent again"
    assert f"(3 at priority 10)   {figures}" in out
    ready, loading = out.splitlines()[-2:]
    row = "engine-0@box:30000 ready 3 1 12,000 2,000 50,000 94.1%"
    assert " ".join(ready.split()) == row
    assert " ".join(loading.split()[1:]) == "starting: loading weights 42% - - - - - -"
    assert "\x1b" not in out


def test_programs_get_the_document_as_it_is(node: FakeNode, run: Run) -> None:
    node.answers[PATH] = state_of()
    code, out, _ = run("status", "--json")
    assert code == 0
    assert json.loads(out) == state_of()


@pytest.mark.parametrize("status", ["draining", "no engine is ready"])
def test_a_node_that_is_not_ready_is_exit_code_1(node: FakeNode, run: Run, status: str) -> None:
    node.answers[PATH] = state_of(node={"status": status}, engines=[])
    code, out, _ = run("status")
    assert code == 1
    assert status in out
    assert run("status", "--json")[0] == 1


def test_unknown_figures_are_left_out(node: FakeNode, run: Run) -> None:
    down = {"id": "b", "state": "unreachable", "fault": "refuses the engine secret"}
    node.answers[PATH] = {"node": {"status": "ok"}, "engines": [down, {"id": "a"}]}
    code, out, _ = run("status")
    assert code == 0
    assert "hit rate" not in out.splitlines()[1]
    assert out.splitlines()[-2].split() == ["a", "unknown", *"------"]
    assert "b       unreachable: refuses the engine secret" in out.splitlines()[-1]


def test_what_works_less_well_stands_beside_the_state(node: FakeNode, run: Run) -> None:
    noted = {"id": "a", "state": "ready", "note": "publishes no prefixes"}
    node.answers[PATH] = state_of(engines=[noted])
    assert "ready: publishes no prefixes" in run("status")[1]


def test_a_state_of_another_form_is_another_version(node: FakeNode, run: Run) -> None:
    node.answers[PATH] = state_of(engines=[{"id": 7}])
    code, out, err = run("status")
    assert (code, out) == (1, "")
    assert "another version of sgl-ext: Expected `str`, got `int`" in err
    assert "$.engines[0].id" in err


def test_engines_are_in_the_order_of_their_numbers(node: FakeNode, run: Run) -> None:
    ids = ["engine-0.3@box:1", "engine-1@box:1", "engine-9@box:1", "engine-10.2@box:1"]
    node.answers[PATH] = state_of(engines=[{"id": id} for id in reversed(ids)])
    out = run("status")[1]
    assert [line.split()[0] for line in out.splitlines()[-4:]] == ids


def test_names_of_engines_stay_whole_in_a_narrow_terminal() -> None:
    console = Console(width=60, file=io.StringIO())
    engines = msgspec.convert(state_of()["engines"], list[Engine])
    with console.capture() as captured:
        console.print(engines_table(engines))
    for engine in engines:
        assert engine.id in captured.get()


def test_a_degraded_node_says_what_is_missing_and_is_exit_code_3(node: FakeNode, run: Run) -> None:
    last = {"time_s": 4649.0, "cause": "SIGKILL"}
    gone = {"id": "engine-1@box", "state": "ended", "crashes": 2, "last_exit": last}
    status = {"status": "degraded", "engines_ready": 1, "engines_wanted": 2, "now_s": 4661.0}
    lost = [{"reason": "No engine is ready.", "count": 300}, {"reason": "a.", "count": 44}]
    rows = [{"id": "engine-0@box"}, gone]
    node.answers[PATH] = state_of(node=status, engines=rows, failures=lost)
    code, out, _ = run("status")
    assert code == 3
    assert "degraded: 1 of 2 engines ready" in out.splitlines()[1]
    why = "300 x No engine is ready; 44 x a"
    last_line = f"344 requests refused or failed in the last minute: {why}"
    assert out.splitlines()[-2] == last_line
    assert out.splitlines()[-1] == "engine-1@box ended 12 s ago: SIGKILL; 2 times in all"
    assert run("status", "--json")[0] == 3
