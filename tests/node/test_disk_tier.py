"""A node with a disk tier: what its engines computed outlives their restarts, and its own end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from sgl_ext_cpu.node import Node, StartNode

from tests.node.test_routing import CHAT, explained
from tests.waiting import HANG_S, until

PAGE = 16
FLAGS = (
    *("--instances", "2", "--page-size", str(PAGE), "--max-total-tokens", "4096"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "1.5", "--drain-s", "5"),
)


@pytest.fixture
def start(start_node: StartNode, tmp_path: Path) -> Any:
    """Starts the node, each time with the same disk tier."""
    tier = ("--disk-tier", str(tmp_path / "tier"), "--disk-tier-bytes", str(64 << 20))

    @contextmanager
    def started(*more: str) -> Iterator[Node]:
        with start_node(tmp_path / "logs", *FLAGS, *tier, *more) as node:
            yield node

    return started


def turn(name: str) -> dict[str, Any]:
    """A request of about a thousand tokens."""
    system = {"role": "system", "content": f"{name}: you are the tester of restarts. " * 100}
    messages = [system, {"role": "user", "content": "Hello"}]
    return {"model": "m", "max_tokens": 4, "temperature": 0, "messages": messages}


def ask(node: Node, request: dict[str, Any]) -> tuple[str, int, int]:
    """The answer's text, and the tokens of its prompt and those of them that were cached."""
    answer = node.post(CHAT, request)
    assert answer.ok, answer.text
    found = answer.json()
    usage = found["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return found["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def until_stored(node: Node, folder: Path, request: dict[str, Any]) -> None:
    """Waits until the tier has a request's prompt, and the balancer knows."""
    most = 0.8 * ask(node, request)[1]

    def is_known() -> bool:
        rows = explained(node, request)["workers"]
        return all(
            sum(row[f"{k}_tokens"] for k in ("held", "host", "shared")) > most for row in rows
        )

    until(is_known)


def shared_tokens(node: Node, request: dict[str, Any]) -> list[int]:
    return [row["shared_tokens"] for row in explained(node, request)["workers"]]


def kill(node: Node) -> None:
    """Kills all processes of a node at once."""
    launcher = psutil.Process(node.process.pid)
    processes = [launcher, *launcher.children(recursive=True)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=HANG_S)


def test_a_node_that_was_killed_finds_what_its_engines_had_computed(
    start: Any, tmp_path: Path
) -> None:
    first, second = turn("first"), turn("second")
    with start() as node:
        answers = [ask(node, each) for each in (first, second)]
        assert answers[0][2] < 100
        until_stored(node, tmp_path, first)
        until_stored(node, tmp_path, second)
        kill(node)
    with start() as node:
        until(lambda: min(shared_tokens(node, first)) > 0.8 * answers[0][1])
        for request, (text, tokens, _) in zip((first, second), answers, strict=True):
            again = ask(node, request)
            assert again[0] == text
            assert again[2] >= tokens - 2 * PAGE
        page = node.metric('sgl_ext_shared_tier_pages_total{result="corrupt"')
        assert page == 0
        # A page that another model wrote is no page of this one: its folder has another name.
        spaces = [one for one in (tmp_path / "tier").iterdir() if one.is_dir()]
        assert len(spaces) == 2, "pages and their notes"


def test_a_rolling_restart_leaves_what_policies_kept_on_the_device(
    start: Any, tmp_path: Path
) -> None:
    """`write_through_selective` stores what was read twice: the rest is stored as engines end."""
    request = turn("selective")
    with start("--hicache-write-policy", "write_through_selective") as node:
        text, tokens, _ = ask(node, request)
        assert max(shared_tokens(node, request)) == 0
        begun = requests.post(f"{node.url}/sgl_ext/restart", json={}, timeout=HANG_S)
        assert begun.ok, begun.text

        def state() -> str:
            return str(requests.get(f"{node.url}/sgl_ext/restart", timeout=HANG_S).json()["state"])

        until(lambda: state() != "running")
        assert state() == "done"
        until(lambda: min(shared_tokens(node, request)) > 0.8 * tokens)
        again = ask(node, request)
        assert again[0] == text
        assert again[2] >= tokens - 2 * PAGE
