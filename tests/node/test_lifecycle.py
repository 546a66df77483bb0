"""A node's life with real engines: it starts, recovers, drains, and leaves nothing running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from sgl_ext_cpu.engine_processes import find_engine
from sgl_ext_cpu.node import ROOT, Node, StartNode

from sgl_ext.temporary_folder import ENGINE_FOLDERS, remove_stale
from tests.waiting import until

# More tokens than the test will wait for: the stream runs until something ends it.
ENDLESS = {
    "model": "m",
    "max_tokens": 100_000,
    "stream": True,
    "messages": [{"role": "user", "content": "go on"}],
}


@pytest.fixture
def own_node(start_node: StartNode, tmp_path: Path) -> Iterator[Node]:
    """One engine behind a balancer, for a test that breaks it."""
    with start_node(tmp_path, "--drain-s", "5") as started:
        yield started


@contextmanager
def open_stream(
    node: Node, path: str = "/v1/messages", **more: object
) -> Iterator[Iterator[bytes]]:
    """The lines of a stream that has given its first event."""
    with node.post(path, {**ENDLESS, **more}, stream=True) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        yield lines


def health(node: Node) -> int:
    return requests.get(f"{node.url}/health", timeout=30).status_code


def test_a_killed_engine_ends_its_streams_with_an_error_event_and_comes_back(
    own_node: Node, tmp_path: Path
) -> None:
    paths = ("/v1/messages", "/v1/chat/completions")
    launcher = psutil.Process(own_node.process.pid)
    (engine,) = (p for p in launcher.children() if "sgl_ext.engine.serve" in p.cmdline())
    with ExitStack() as stack:
        streams = {path: stack.enter_context(open_stream(own_node, path)) for path in paths}
        engine.kill()
        last = {path: [line for line in lines if line][-2:] for path, lines in streams.items()}
    assert last["/v1/messages"][0] == b"event: error"
    # It may be all that follows the first event.
    assert last["/v1/chat/completions"][-1].startswith(b'data: {"error":')

    # Until the balancer has heard of it, a request may still reach the dying engine.
    until(lambda: requests.get(f"{own_node.url}/health", timeout=30).status_code == 503)
    answer = own_node.post("/v1/messages", {**ENDLESS, "stream": False})
    assert answer.status_code == 529
    assert answer.json()["error"]["type"] == "overloaded_error"

    until(lambda: requests.get(f"{own_node.url}/health", timeout=30).status_code == 200)
    assert own_node.post("/v1/messages", {**ENDLESS, "stream": False, "max_tokens": 2}).ok
    assert "restarts in" in (tmp_path / "launch.out").read_text()
    (worker,) = requests.get(f"{own_node.url}/health", timeout=30).json()["workers"]
    assert worker["id"].startswith("engine-0.2@"), (
        "nothing is remembered of the one that was killed"
    )


def test_processes_that_a_node_starts_end_when_its_launcher_is_killed(
    start_node: StartNode, tmp_path: Path
) -> None:
    """Here nothing is forked: these are the processes that a user's node has."""
    with start_node(tmp_path, from_nursery=False) as node:
        assert node.post("/v1/messages", {**ENDLESS, "stream": False, "max_tokens": 2}).ok
        children = psutil.Process(node.process.pid).children(recursive=True)
        assert len(children) >= 4
        opened = [Path(file.path) for child in children for file in child.open_files()]
        folders = {file.parent for file in opened if ENGINE_FOLDERS in str(file)}
        assert len(folders) == 1
        remove_stale(ENGINE_FOLDERS)
        assert all(folder.exists() for folder in folders)
        node.process.kill()
        _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
    remove_stale(ENGINE_FOLDERS)
    assert not any(folder.exists() for folder in folders)


def test_sigterm_lets_a_running_answer_finish_and_takes_no_new_one(own_node: Node) -> None:
    children = psutil.Process(own_node.process.pid).children(recursive=True)
    with open_stream(own_node, max_tokens=60) as stream:
        own_node.process.send_signal(signal.SIGTERM)
        until(lambda: health(own_node) == 503)
        answer = own_node.post("/v1/messages", ENDLESS)
        assert answer.status_code == 529
        assert answer.headers["retry-after"]
        assert answer.headers["connection"] == "close"
        assert any(b"message_stop" in line for line in stream)
    assert own_node.process.wait(timeout=60) == 0
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


def test_a_closed_terminal_ends_nothing_and_a_second_ctrl_c_ends_all_at_once(
    start_node: StartNode, tmp_path: Path
) -> None:
    with start_node(tmp_path, "--drain-s", "600") as node:
        children = psutil.Process(node.process.pid).children(recursive=True)
        with open_stream(node) as stream:
            for process in (*children, node.process):
                process.send_signal(signal.SIGHUP)
            for _ in range(20):
                assert next(stream) is not None
            node.process.send_signal(signal.SIGINT)
            until(lambda: health(node) == 503)
            assert node.process.poll() is None
            node.process.send_signal(signal.SIGINT)
            last = [line for line in stream if line][-2:]
        assert last[0] == b"event: error"
        assert b"The server is shutting down." in last[1]
        assert node.process.wait(timeout=60) == 0
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []
        assert "second signal: ending at once" in (tmp_path / "launch.out").read_text()


def test_no_request_is_lost_when_a_process_of_an_engine_is_killed(
    start_node: StartNode, tmp_path: Path
) -> None:
    def ask(number: int) -> int:
        body = {**ENDLESS, "stream": False, "max_tokens": 200, "system": f"{number} " * 300}
        return node.post("/v1/messages", body).status_code

    def workers() -> list[dict[str, Any]]:
        health = requests.get(f"{node.url}/health", timeout=30).json()
        found: list[dict[str, Any]] = health["workers"]
        return found

    def busiest() -> dict[str, Any]:
        return max(workers(), key=lambda worker: int(worker["in_flight"]))

    started = start_node(tmp_path, "--instances", "2")
    with started as node, ThreadPoolExecutor(12) as pool:
        for part in ("scheduler", "detokenizer"):
            until(lambda: all(worker["ready"] for worker in workers()))
            asked = [pool.submit(ask, number) for number in range(12)]
            until(lambda: busiest()["in_flight"] > 3)
            getattr(find_engine(busiest()["url"]), part).kill()
            until(lambda: not all(worker["ready"] for worker in workers()))
            assert {answered.result() for answered in asked} == {200}


def test_a_flag_that_sglang_does_not_know_ends_the_start_with_sglangs_own_message(
    start_node: StartNode, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError) as failed, start_node(tmp_path, "--no-such-flag", "7"):
        pass
    output = str(failed.value)
    assert "status=1" in output
    assert "engine-0 ended with exit code" in output
    assert "unrecognized arguments: --no-such-flag 7" in output
    assert "launch.py" not in output


def test_bad_configuration_stops_before_a_process_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sgl_ext.launch", "--model-path", "m", "--instances", "0"]
    command += ["--log-dir", str(tmp_path / "logs")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "sgl-ext: --instances='0': must be an integer of at least 1\n"
    assert not os.path.exists(tmp_path / "logs")
