"""A session has one name, the id that its client prints, wherever a node shows it.

A session keeps it when its tools change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
from rich.console import Console
from sgl_ext_cpu.node import Node

from sgl_ext.cli.node import KEY_VARIABLE
from sgl_ext.cli.node import Node as Address
from sgl_ext.cli.status import read_state
from sgl_ext.cli.top import dashboard
from sgl_ext.doctor.comparison import compare
from tests.clients.agents import Person, Project
from tests.clients.scripts import GREETING, SUM
from tests.waiting import HANG_S, until

pytestmark = pytest.mark.installs

_TENANT, _ADMIN = "Gil", "root"
_ASKED = 2
"""How many times each session that is asked again was asked."""


class Printed(NamedTuple):
    """The ids that clients print: of a session with two turns, the second with other tools, of one
    with one turn, and of one of Codex with two."""

    changed: str
    short: str
    codex: str


@pytest.fixture(scope="module")
def printed(
    scripted: Node,
    claude_code: Path,
    codex: Path,
    scripted_model: str,
    api_keys: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Printed:
    home, folder = (tmp_path_factory.mktemp(name) for name in ("home", "project"))
    project = Project(claude_code, scripted.url, home, folder, key=api_keys[_TENANT])
    changed = project.ask(SUM)
    again = project.ask("And why?", "--continue", "--disallowedTools", "Bash")
    assert (changed["result"].strip(), again["result"].strip()) == ("Four.", "Because.")
    short = project.ask(GREETING)
    settings = 'model_reasoning_effort = "none"'
    own = tmp_path_factory.mktemp("codex")
    person = Person(codex, scripted.url, scripted_model, own, settings, api_keys[_TENANT])
    (begun,) = (e for e in person.run("one", SUM) if e["type"] == "thread.started")
    (resumed,) = (
        e
        for e in person.run("one", "resume", "--last", "And why?")
        if e["type"] == "thread.started"
    )
    assert again["session_id"] == changed["session_id"]
    assert resumed["thread_id"] == begun["thread_id"]
    return Printed(changed["session_id"], short["session_id"], begun["thread_id"])


def get(node: Node, path: str, key: str) -> Any:
    return requests.get(node.url + path, headers={"x-api-key": key}, timeout=HANG_S).json()


@pytest.fixture(scope="module")
def state(printed: Printed, scripted: Node, api_keys: dict[str, str]) -> dict[str, Any]:
    """What the page and `top` show. It has the pins once an engine has reported them."""
    documents: list[dict[str, Any]] = []

    def has_pins() -> bool:
        documents.append(get(scripted, "/sgl_ext/state", api_keys[_ADMIN]))
        return {printed.changed, printed.short} <= {p["session"] for p in documents[-1]["pins"]}

    until(has_pins)
    return documents[-1]


@pytest.fixture(scope="module")
def log(printed: Printed, scripted: Node) -> list[dict[str, Any]]:
    """The lines of the request log of these sessions, once it has all of them."""
    found: list[dict[str, Any]] = []

    def is_written() -> bool:
        lines = (scripted.log_dir / "requests.jsonl").read_text().splitlines()
        found[:] = [each for line in lines if (each := json.loads(line))["tenant"] == _TENANT]
        asked = [each["session"] for each in found if each["prompt_tokens"]]
        return asked.count(printed.codex) >= _ASKED and asked.count(printed.short) >= 1

    until(is_written)
    return found


def test_each_session_is_one_row_with_the_id_that_its_client_prints(
    state: dict[str, Any], printed: Printed
) -> None:
    rows = [row for row in state["sessions"] if row["tenant"] == _TENANT]
    assert {row["id"] for row in rows} >= set(printed)
    turns = {row["id"]: row["turns"] for row in rows}
    assert len(turns) == len(rows), "no session has two rows"
    assert turns[printed.changed] >= _ASKED
    assert turns[printed.codex] == _ASKED


def test_top_shows_that_id_of_sessions_and_pins(state: dict[str, Any], printed: Printed) -> None:
    address = Address("http://box:1")
    console = Console(width=400, height=400)
    with console.capture() as captured:
        console.print(dashboard(read_state(state, address), address.url, None, 400, 400))
    words = captured.get().split()
    # A row of its own, and one for each of its pins.
    assert words.count(printed.codex) >= 1
    assert min(words.count(printed.changed), words.count(printed.short)) >= 2


def test_a_pin_names_it(printed: Printed, scripted: Node, api_keys: dict[str, str]) -> None:
    pins = get(scripted, "/v1/pins", api_keys[_TENANT])["pins"]
    assert {pin["session"] for pin in pins} >= {printed.changed, printed.short}


def test_the_log_is_searched_by_it(
    printed: Printed,
    scripted: Node,
    api_keys: dict[str, str],
    log: list[dict[str, Any]],
) -> None:
    assert {each["session"] for each in log if each["prompt_tokens"]} >= set(printed)
    for session in printed:
        own = {each["id"] for each in log if each["session"] == session}
        command = [sys.executable, "-m", "sgl_ext", "requests", "--session", session, "--json"]
        environment = {**os.environ, KEY_VARIABLE: api_keys[_ADMIN]}
        done = subprocess.run(
            [*command, "--url", scripted.url], env=environment, check=True, capture_output=True
        )
        assert {row["id"] for row in json.loads(done.stdout)["requests"]} == own


def test_the_doctor_compares_the_turns_of_the_same_sessions(
    printed: Printed,
    log: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    """The share of turns that begin as before is that which the client's ids give, and other tools
    are a divergence between turns of one session."""
    lines = [each for each in log if each["session"] in printed and each["prompt_tokens"]]
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    figures = compare(path, path)["before"]
    assert figures["tasks"] == len(printed)
    turns: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for each in lines:
        agent = (each["client"] or {}).get("request_class", "")
        turns[each["session"], agent].append(each["prefix_hash"])
    same = [a == b for prefixes in turns.values() for a, b in pairwise(prefixes)]
    assert figures["same_prefix_share"] == round(sum(same) / len(same), 4) < 1
    changed = [each["divergence"] for each in lines if each["session"] == printed.changed]
    assert [d["part"] for d in changed if d and d["scope"] == "session"] == ["tools"]
