"""A node's life with real engines: it starts, recovers, drains, and leaves nothing running."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest
import requests
from sgl_ext_cpu.engine_processes import find_engine
from sgl_ext_cpu.gate import Gate
from sgl_ext_cpu.node import ROOT, Node, StartNode

from tests.waiting import HANG_S, until

# More tokens than the test will wait for: the stream runs until something ends it.
ENDLESS = {
    "model": "m",
    "max_tokens": 100_000,
    "stream": True,
    "temperature": 0,  # by chance an answer may end at once
    "messages": [{"role": "user", "content": "go on"}],
}


@pytest.fixture
def own_node(start_node: StartNode, own_gate: Gate, tmp_path: Path) -> Iterator[Node]:
    """One engine behind a balancer, for a test that breaks it."""
    with start_node(tmp_path, "--drain-s", "600", environment=own_gate.environment) as started:
        yield started


@pytest.fixture
def own_gate() -> Iterator[Gate]:
    """The gate before each step of that engine."""
    with Gate() as gate:
        yield gate


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    """The gate before each step of both engines of the pair."""
    with Gate() as gate:
        yield gate


@pytest.fixture(scope="module")
def pair(
    start_node: StartNode, gate: Gate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    """Two engines behind two balancer processes, for tests after which both serve again."""
    folder = tmp_path_factory.mktemp("pair")
    flags = ("--instances", "2", "--processes", "2")
    with start_node(folder, *flags, environment=gate.environment) as started:
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
    return requests.get(f"{node.url}/health", timeout=HANG_S).status_code


def test_a_killed_engine_ends_its_streams_with_an_error_event_and_comes_back(
    own_node: Node, own_gate: Gate, tmp_path: Path
) -> None:
    paths = ("/v1/messages", "/v1/chat/completions")
    launcher = psutil.Process(own_node.process.pid)
    (engine,) = (p for p in launcher.children() if "sgl_ext.engine.serve" in p.cmdline())
    with ExitStack() as stack:
        streams = {path: stack.enter_context(open_stream(own_node, path)) for path in paths}
        own_gate.close()  # the engine that comes back is not ready before the gate opens
        engine.kill()
        last = {path: [line for line in lines if line][-2:] for path, lines in streams.items()}
    assert last["/v1/messages"][0] == b"event: error"
    # It may be all that follows the first event.
    assert last["/v1/chat/completions"][-1].startswith(b'data: {"error":')

    # Until the balancer has heard of it, a request may still reach the dying engine.
    until(lambda: requests.get(f"{own_node.url}/health", timeout=HANG_S).status_code == 503)
    answer = own_node.post("/v1/messages", {**ENDLESS, "stream": False})
    assert answer.status_code == 529
    assert answer.json()["error"]["type"] == "overloaded_error"

    own_gate.open()
    until(lambda: requests.get(f"{own_node.url}/health", timeout=HANG_S).status_code == 200)
    assert own_node.post("/v1/messages", {**ENDLESS, "stream": False, "max_tokens": 2}).ok
    assert "restarts in" in (tmp_path / "launch.out").read_text()
    (worker,) = requests.get(f"{own_node.url}/health", timeout=HANG_S).json()["workers"]
    assert worker["id"].startswith("engine-0.2@"), (
        "nothing is remembered of the one that was killed"
    )


def test_sigterm_lets_a_running_answer_finish_and_takes_no_new_one(
    own_node: Node, own_gate: Gate
) -> None:
    children = psutil.Process(own_node.process.pid).children(recursive=True)
    with own_gate.closed(), ThreadPoolExecutor(1) as pool:
        running = pool.submit(own_node.post, "/v1/messages", {**ENDLESS, "max_tokens": 60})
        own_gate.run_until(lambda step: any(said > 9 for _, said in step.requests.values()))
        own_node.process.send_signal(signal.SIGTERM)
        until(lambda: health(own_node) == 503)
        answer = own_node.post("/v1/messages", ENDLESS)
        assert answer.status_code == 529
        assert answer.headers["retry-after"]
        assert answer.headers["connection"] == "close"
        own_gate.open()
        assert "message_stop" in running.result().text
    assert own_node.process.wait(timeout=HANG_S) == 0
    _, alive = psutil.wait_procs(children, timeout=HANG_S)
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
        assert node.process.wait(timeout=HANG_S) == 0
        _, alive = psutil.wait_procs(children, timeout=HANG_S)
        assert alive == []
        assert "second signal: ending at once" in (tmp_path / "launch.out").read_text()


def ask(node: Node, number: int, max_tokens: int = 30, *, stream: bool = False) -> str:
    """ "" if the request is answered in full, else what came in place of that."""
    system = f"{number} " * 300
    body = {**ENDLESS, "stream": stream, "max_tokens": max_tokens, "system": system}
    answer = node.post("/v1/messages", body)
    is_whole = "message_stop" in answer.text if stream else "stop_reason" in answer.text
    return "" if answer.ok and is_whole else answer.text[-500:]


def workers(node: Node) -> list[dict[str, Any]]:
    health = requests.get(f"{node.url}/health", timeout=HANG_S).json()
    found: list[dict[str, Any]] = health["workers"]
    return found


def all_ready(node: Node) -> bool:
    return len(workers(node)) == 2 and all(worker["ready"] for worker in workers(node))


def test_no_request_is_lost_when_a_process_of_an_engine_is_killed(pair: Node, gate: Gate) -> None:
    def busiest() -> dict[str, Any]:
        return max(workers(pair), key=lambda worker: int(worker["in_flight"]))

    def restarts() -> int:
        return (pair.log_dir / "launch.out").read_text().count("restarts in")

    with ThreadPoolExecutor(50) as pool:
        for before, part in enumerate(("scheduler", "detokenizer")):
            until(lambda: all_ready(pair))
            assert restarts() == before
            with gate.closed():
                at = gate.mark()
                asked = [pool.submit(ask, pair, number) for number in range(50)]
                gate.count(12, "arrived", at)
                until(lambda: busiest()["in_flight"] > 3)
                getattr(find_engine(busiest()["url"]), part).kill()
            until(lambda before=before: restarts() > before)  # type: ignore[misc]
            assert {answered.result() for answered in asked} == {""}
    until(lambda: all_ready(pair))
    assert restarts() == 2, "no other engine ended with one"


@pytest.mark.slow
def test_no_request_is_lost_while_engines_restart_one_after_another(pair: Node) -> None:
    ended = Event()

    def ask_until_ended(number: int) -> list[str]:
        answers = []
        while not ended.is_set():
            answers.append(ask(pair, number, 20, stream=bool(number % 2)))
            number += 4
        return answers

    def restart(**order: object) -> dict[str, Any]:
        begun = pair.post("/sgl_ext/restart", order)
        assert begun.status_code == 202, begun.text
        url = f"{pair.url}/sgl_ext/restart"
        until(lambda: requests.get(url, timeout=HANG_S).json()["state"] != "running")
        found: dict[str, Any] = requests.get(url, timeout=HANG_S).json()
        return found

    until(lambda: all_ready(pair))
    before = {worker["id"] for worker in workers(pair)}
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask_until_ended, number) for number in range(4)]
        try:
            restarted = restart(engine_args=["--max-running-requests", "7"])
        finally:
            ended.set()
        answers = [answer for each in asked for answer in each.result()]
    assert (restarted["state"], restarted["error"]) == ("done", None)
    assert set(answers) == {""}
    assert len(answers) > 20
    until(lambda: all_ready(pair))
    assert before.isdisjoint(worker["id"] for worker in workers(pair))
    for engine in pair.engines:
        info = requests.get(f"{engine}/server_info", timeout=HANG_S).json()
        assert info["max_running_requests"] == 7


def test_an_engine_that_does_not_start_shows_its_exception_and_where_its_log_is(
    start_node: StartNode, tmp_path: Path
) -> None:
    flags = "--json-model-override-args", '{"architectures": ["FooForCausalLM"]}'
    with pytest.raises(RuntimeError) as failed, start_node(tmp_path, *flags):
        pass
    output = str(failed.value)
    assert "status=1" in output
    assert "engine-0 ended with exit code" in output
    assert "FooForCausalLM" in output
    assert f"Its whole log: {tmp_path / 'engine-0.log'}" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model-path", "m", "--instances", "0"], "--instances='0': must be an integer of"),
        (["--model-path", "/nope"], "model_path='/nope': does not exist"),
    ],
)
def test_a_wrong_command_line_ends_with_2_before_a_process_starts(
    flags: list[str], said: str, tmp_path: Path
) -> None:
    assert f"sgl-ext serve: {said}" in refused_start(2, tmp_path, *flags)


def test_what_a_later_start_may_find_ends_with_1(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused_start(1, tmp_path, "--model-path=m", f"--nccl-port={port}")
    assert f"--nccl-port={port}: Address already in use" in said


def refused_start(code: int, folder: Path, *flags: str) -> str:
    """The one line with which a node says why it does not start, and that it left nothing."""
    command = [sys.executable, "-m", "sgl_ext.launch", "--log-dir", str(folder / "logs"), *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == code
    assert ended.stderr.count("\n") == 1
    assert not os.path.exists(folder / "logs")
    return ended.stderr
