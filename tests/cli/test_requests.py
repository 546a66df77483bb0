"""`sgl-ext requests`: who was refused and why, and what took a session its time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sgl_ext.cli import requests
from tests.cli.conftest import Run
from tests.cli.fake_node import FakeNode

PATH = "GET /sgl_ext/requests"


def row(name: str, **about: Any) -> dict[str, Any]:
    usual = {
        **{"id": name, "time": 1_700_000_000.0, "status": 200, "outcome": "complete"},
        **{"tenant": "", "session": "s1", "ttft_ms": 109.0, "total_ms": 900.0, "error": None},
        **{"prompt_tokens": 2254, "cached_tokens": 2076, "sentence": "waited 0 ms"},
    }
    return usual | about


def document(*rows: dict[str, Any], **about: Any) -> dict[str, Any]:
    searched = {"lines": 9, "back_to_s": 1_700_000_000.0, "complete": True}
    return {"requests": [*rows], "found": len(rows), "groups": [], "searched": searched} | about


def test_a_row_says_where_its_time_went(node: FakeNode, run: Run) -> None:
    node.answers[PATH] = document(row("req_1"))
    code, out, _ = run("requests", "--session", "s1", "--slow")
    assert code == 0
    assert node.asked == [("GET /sgl_ext/requests?limit=20&session=s1&slow=1", None)]
    heads, cells = (line.split("  ") for line in out.splitlines())
    assert [head.strip() for head in heads if head.strip()] == [
        *("time", "status", "session", "id", "first token", "cached", "why")
    ]
    assert [cell.strip() for cell in cells if cell][-4:] == [
        "req_1",
        "109 ms",
        "92.1%",
        "waited 0 ms",
    ]


def test_models_are_told_apart_where_there_are_several(node: FakeNode, run: Run) -> None:
    rows = row("req_1", served_model="large"), row("req_2", served_model="small")
    node.answers[PATH] = document(*rows)
    assert " model " in run("requests")[1].splitlines()[0]
    node.answers[PATH] = document(rows[1])
    assert " model " not in run("requests", "--model", "small")[1].splitlines()[0]
    assert node.asked[-1] == ("GET /sgl_ext/requests?limit=20&model=small", None)


def test_who_was_refused_and_why_is_one_command(node: FakeNode, run: Run) -> None:
    refused = {"status": 529, "outcome": "rejected", "sentence": "refused with 529", "ttft_ms": 0}
    group = {"tenant": "ci", "status": 529, "outcome": "rejected", "error": "The queue is full."}
    node.answers[PATH] = document(
        row("req_1", **refused, tenant="ci"), groups=[group | {"requests": 12}]
    )
    code, out, _ = run("requests", "--status", "refused", "--since", "5m")
    assert code == 0
    assert node.asked[0][0].endswith("?limit=20&status=refused&since=300.000")
    assert out.splitlines()[-1].split() == ["12", "529", "ci", "The", "queue", "is", "full."]


def test_a_list_that_is_cut_says_how_far_it_goes(node: FakeNode, run: Run) -> None:
    searched = {"lines": 9, "back_to_s": 1_700_000_000.0, "complete": False}
    node.answers[PATH] = document(searched=searched)
    assert "an earlier time was not read" in run("requests")[1]
    node.answers[PATH] = document(searched={"lines": 0, "back_to_s": None, "complete": True})
    assert run("requests")[1] == "There are no requests yet.\n"


@pytest.mark.parametrize("since", ["soon", "0", "-5m", "5 parsecs", "nan", "inf"])
def test_a_wrong_time_says_what_is_right(node: FakeNode, run: Run, since: str) -> None:
    code, _, err = run("requests", f"--since={since}")
    assert (code, node.asked) == (2, [])
    assert "must be a time, as 10m, 2h or 1d" in err


def test_it_follows_and_prints_each_request_once(
    node: FakeNode, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests.time, "sleep", lambda _: None)
    first, second = row("req_1"), row("req_2", time=1_700_000_001.0)
    answers = iter([document(first), document(second, first), document(second, first)])

    class Ends(Exception):
        pass

    def get(_: Any, path: str) -> Any:
        try:
            return next(answers)
        except StopIteration:
            raise Ends from None

    monkeypatch.setattr(requests.Node, "get", get)
    printed: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text, **_: printed.append(text))
    with pytest.raises(Ends):
        requests.requests(follow=True, as_json=True, url=node.url)
    assert [json.loads(line)["id"] for line in printed] == ["req_1", "req_2"]


def test_slow_does_not_follow(node: FakeNode, run: Run) -> None:
    assert run("requests", "--slow", "-f")[0] == 2


def test_how_far_it_read_is_a_line_of_its_own(node: FakeNode, run: Run) -> None:
    searched = {"lines": 9, "back_to_s": 1_700_000_000.0, "complete": False}
    node.answers[PATH] = document(row("req_1"), searched=searched)
    assert run("requests", "-n", "1")[1].splitlines()[-2:][0] == ""
    assert run("requests", "-n", "1")[1].splitlines()[-1].startswith("Read back to ")
