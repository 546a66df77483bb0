"""`restart`, `drain` and `add`: what they order, and what people see until it is done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sgl_ext.cli import engines
from tests.cli.conftest import Run
from tests.cli.fake_node import FakeNode, Refused

HOST = "http://127.0.0.1"
WORKERS = {
    "workers": [
        {"id": "engine-0@box:30000", "url": f"{HOST}:30001", "in_flight": 2, "ready": True},
        {"id": "engine-1.2@box:30000", "url": f"{HOST}:30002", "in_flight": 0, "ready": True},
    ]
}


def operation(state: str, *engines: tuple[str, str], error: str | None = None) -> dict[str, Any]:
    rows = [{"name": name, "state": at, "reason": None} for name, at in engines]
    return {"id": "r1", "state": state, "engines": rows, "error": error}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_POLL_S", 0)


def restarts(node: FakeNode, *answers: Any) -> None:
    """The node answers a restart with the first of these, and then with the others."""
    later = iter(answers[1:])

    def go_on(_: Any) -> Any:
        found = next(later)
        if isinstance(found, Exception):
            raise found
        return found

    node.answers |= {"POST /sgl_ext/restart": answers[0], "GET /sgl_ext/restart": go_on}


def test_a_rolling_restart_shows_each_change_until_it_is_done(node: FakeNode, run: Run) -> None:
    restarts(
        node,
        operation("running", ("engine-0", "draining"), ("engine-1", "waiting")),
        operation("running", ("engine-0", "starting"), ("engine-1", "waiting")),
        Refused(503, "the balancer restarts"),
        operation("done", ("engine-0", "ready"), ("engine-1", "ready")),
    )
    code, out, err = run("restart", "--rolling")
    assert (code, err) == (0, "")
    assert [line.strip() for line in out.splitlines()] == [
        "engine-0: draining",
        "engine-1: waiting",
        "engine-0: starting",
        "engine-0: ready",
        "engine-1: ready",
        "restarted: engine-0, engine-1",
    ]
    order = {"engine": None, "model": None, "model_path": None, "engine_args": None}
    assert node.asked[0] == ("POST /sgl_ext/restart", order)


@pytest.mark.parametrize(
    ("argv", "order"),
    [
        (["engine-0"], ("engine-0", None, None)),
        (["engine-0", "--model-path", "/m"], ("engine-0", "/m", None)),
        (["--rolling", "--", "--tp", "2"], (None, None, ["--tp", "2"])),
        (["engine-0", "--", "--tp", "--json"], ("engine-0", None, ["--tp", "--json"])),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_an_order_names_engine_model_and_flags(
    node: FakeNode, run: Run, argv: list[str], order: tuple[Any, ...]
) -> None:
    restarts(node, operation("done", ("engine-0", "ready")))
    assert run("restart", *argv)[0] == 0
    keys = ("engine", "model_path", "engine_args")
    assert node.asked[0][1] == {"model": None, **dict(zip(keys, order, strict=True))}


def test_without_waiting_the_operation_is_only_begun(node: FakeNode, run: Run) -> None:
    restarts(node, operation("running", ("engine-0", "draining")))
    code, out, _ = run("restart", "engine-0", "--no-wait")
    assert (code, out) == (0, "restarting: engine-0\n")
    code, out, _ = run("restart", "engine-0", "--no-wait", "--json")
    assert json.loads(out) == operation("running", ("engine-0", "draining"))


def test_a_failed_restart_is_exit_code_1_with_its_reason(node: FakeNode, run: Run) -> None:
    running = operation("running", ("engine-0", "starting"))
    restarts(
        node,
        running,
        operation("failed", ("engine-0", "failed"), error="its log:\n\x1b[1mold\nmemory"),
    )
    code, out, err = run("restart", "engine-0")
    assert code == 1
    assert out.splitlines() == ["engine-0: starting", "engine-0: failed"]
    assert err == "sgl-ext: restart: its log:\n?[1mold\nmemory\n"


@pytest.mark.parametrize("status", [409, 501])
def test_a_refused_restart_is_exit_code_1(node: FakeNode, run: Run, status: int) -> None:
    restarts(node, Refused(status, "one restart runs"))
    assert run("restart", "--rolling")[::2] == (1, f"sgl-ext: {node.url}: one restart runs\n")


@pytest.mark.parametrize("name", ["engine-1", "engine-1.2@box:30000", "http://127.0.0.1:30002"])
def test_an_engine_is_drained_by_name_id_or_url(node: FakeNode, run: Run, name: str) -> None:
    node.answers["GET /sgl_ext/workers"] = WORKERS
    node.answers["DELETE /sgl_ext/workers"] = WORKERS["workers"][1]
    code, out, _ = run("drain", name)
    assert code == 0
    assert out.startswith("engine-1.2@box:30000 drains and has 0 requests in flight.")
    assert "Take it back: sgl-ext undrain engine-1.2@box:30000" in out
    assert node.asked[-1][0] == "DELETE /sgl_ext/workers?id=engine-1.2%40box%3A30000"


def test_a_second_drain_and_that_of_the_last_engine_are_refused(node: FakeNode, run: Run) -> None:
    first, second = WORKERS["workers"]
    node.answers["GET /sgl_ext/workers"] = {"workers": [first, {**second, "draining": True}]}
    code, _, err = run("drain", "engine-1")
    assert (code, "drains already. Take it back: sgl-ext undrain" in err) == (1, True)
    code, _, err = run("drain", "engine-0")
    assert (code, "To drain it all the same: --force" in err) == (1, True)
    assert all(asked[0].startswith("GET") for asked in node.asked)


def test_draining_can_wait_until_the_engine_has_left(node: FakeNode, run: Run) -> None:
    lists: Iterator[Any] = iter([WORKERS] * 4 + [{"workers": WORKERS["workers"][1:]}])
    node.answers["GET /sgl_ext/workers"] = lambda _: next(lists)
    node.answers["DELETE /sgl_ext/workers"] = WORKERS["workers"][0]
    code, out, _ = run("drain", "engine-0", "--wait")
    assert code == 0
    assert out.startswith("engine-0@box:30000 is drained.")
    assert "Take it back: sgl-ext undrain engine-0@box:30000" in out
    assert next(lists, None) is None


def test_an_engine_that_drains_is_taken_back_by_its_name(node: FakeNode, run: Run) -> None:
    row = {**WORKERS["workers"][0], "state": "draining"}
    node.answers["GET /sgl_ext/workers"] = {"workers": [row]}
    node.answers["POST /sgl_ext/workers"] = row
    assert run("undrain", "engine-0") == (0, "engine-0@box:30000 gets requests again\n", "")
    assert node.asked[-1] == ("POST /sgl_ext/workers", {"url": row["url"]})
    node.answers["GET /sgl_ext/workers"] = {"workers": [{**row, "state": "ready"}]}
    code, _, err = run("undrain", "engine-0")
    assert (code, "does not drain: it is ready" in err) == (1, True)
    code, _, err = run("undrain", "engine-7")
    assert (code, "comes back with sgl-ext add URL" in err) == (1, True)


def test_an_unknown_engine_is_answered_with_those_that_there_are(node: FakeNode, run: Run) -> None:
    node.answers["GET /sgl_ext/workers"] = WORKERS
    code, _, err = run("drain", "engine-7")
    assert code == 1
    assert "no engine is engine-7; there are: engine-0@box:30000, engine-1.2@box:30000" in err


def test_an_ambiguous_name_is_a_wrong_command_line(node: FakeNode, run: Run) -> None:
    rows = [{"id": f"engine-0@{box}:30000", "url": f"http://{box}:30001"} for box in "ab"]
    node.answers["GET /sgl_ext/workers"] = {"workers": rows}
    code, _, err = run("drain", "engine-0")
    assert code == 2
    assert "engine-0 may be engine-0@a:30000 or engine-0@b:30000" in err


def test_an_engine_is_added_by_its_url(node: FakeNode, run: Run) -> None:
    row = {"id": "http://gpu:1", "url": "http://gpu:1", "state": "ready", "ready": False}
    node.answers["POST /sgl_ext/workers"] = row
    code, out, _ = run("add", "http://gpu:1")
    assert code == 0
    assert node.asked == [("POST /sgl_ext/workers", {"url": "http://gpu:1", "wait": False})]
    assert ["ready", "no"] in [line.split() for line in out.splitlines()]
    assert json.loads(run("add", "http://gpu:1", "--json")[1]) == row


def test_an_engine_with_ranks_drains_as_a_whole(node: FakeNode, run: Run) -> None:
    first = {**WORKERS["workers"][0], "rank": 0}
    ranks = [first, {**first, "id": f"{first['id']}#1", "rank": 1}]
    node.answers["GET /sgl_ext/workers"] = {"workers": ranks}
    node.answers["DELETE /sgl_ext/workers"] = first
    for name in ("engine-0", first["url"]):
        code, _, err = run("drain", name)
        assert (code, "is the last engine that is ready" in err) == (1, True)
        assert run("drain", name, "--force")[0] == 0
        assert node.asked[-1][0] == "DELETE /sgl_ext/workers?id=engine-0%40box%3A30000"


def test_the_last_engine_of_a_model_needs_force(node: FakeNode, run: Run) -> None:
    own = {**WORKERS["workers"][0], "model": "large"}
    other = {**own, "id": "engine-9@box:30000", "url": "http://box:30009", "model": "small"}
    node.answers["GET /sgl_ext/workers"] = {"workers": [own, other | {"ready": True}]}
    code, _, err = run("drain", "engine-0")
    assert (code, "is the last engine of the model large that is ready" in err) == (1, True)


def test_a_drained_engine_is_taken_back_by_its_name(node: FakeNode, run: Run) -> None:
    row = {**WORKERS["workers"][0], "state": "drained", "draining": True}
    node.answers["GET /sgl_ext/workers"] = {"workers": [row]}
    node.answers["POST /sgl_ext/workers"] = {**row, "state": "ready"}
    assert run("add", "engine-0")[0] == 0
    assert node.asked[-1] == ("POST /sgl_ext/workers", {"url": row["url"], "wait": False})
    code, _, err = run("drain", "engine-0")
    assert (code, "is drained already" in err) == (1, True)


def test_adding_can_wait_until_the_engine_is_ready(node: FakeNode, run: Run) -> None:
    row = {"id": "http://c:1", "url": "http://c:1", "state": "ready", "ready": False}
    later = iter([{"workers": [row]}, {"workers": [{**row, "ready": True}]}])
    node.answers["POST /sgl_ext/workers"] = row
    node.answers["GET /sgl_ext/workers"] = lambda _: next(later)
    code, out, _ = run("add", "http://c:1", "--wait")
    assert code == 0
    assert node.asked[0] == ("POST /sgl_ext/workers", {"url": "http://c:1", "wait": True})
    assert next(later, None) is None
    assert "yes" in out


def test_draining_waits_until_a_listed_engine_is_drained(node: FakeNode, run: Run) -> None:
    first = WORKERS["workers"][0]
    drained = {"workers": [{**first, "state": "drained"}, WORKERS["workers"][1]]}
    lists: Iterator[Any] = iter([WORKERS] * 3 + [drained])
    node.answers["GET /sgl_ext/workers"] = lambda _: next(lists)
    node.answers["DELETE /sgl_ext/workers"] = first
    assert run("drain", "engine-0", "--wait")[0] == 0


def test_the_last_restart_is_shown(node: FakeNode, run: Run) -> None:
    node.answers["GET /sgl_ext/restart"] = operation("running", ("engine-0", "draining"))
    code, out, _ = run("restart", "--status")
    assert (code, "engine-0" in out, "draining" in out) == (0, True, True)
    node.answers["GET /sgl_ext/restart"] = operation("failed", ("engine-0", "failed"), error="no")
    assert run("restart", "--status")[0] == 1
