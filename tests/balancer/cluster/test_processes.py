"""Several balancer processes on one port serve as one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import ClassVar

import psutil
import pytest
import requests
from sgl_ext_cpu.node import free_port

from sgl_ext import keys
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.segments import read_chain
from tests.waiting import HANG_S, until

pytestmark = pytest.mark.long

COUNT = 3
BODY = {"model": "bench", "messages": [{"role": "user", "content": "Hello"}]}


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen([sys.executable, *command])
    try:
        yield running
    finally:
        running.terminate()
        running.wait(timeout=HANG_S)


class Answers(BaseHTTPRequestHandler):
    """A worker that is healthy, answers chat completions at once, and others not at all."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200 if self.path in ("/health", "/ready") else 404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.path != "/v1/chat/completions":
            Event().wait()
        self.answer(200)

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


class Publishes(Answers):
    """A worker that holds `held`, a chain of segments of 1,000 tokens each, and publishes it."""

    held: ClassVar[Sequence[int]] = ()

    def do_GET(self) -> None:
        if self.path != "/sgl_ext/events":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        names = [f"{segment:032x}" for segment in self.held]
        stored = list(zip(names, [None, *names], count(1000, 1000), strict=False))
        line = {"snapshot": True, "cleared": True, "complete": True, "publishes": ["prefixes"]}
        line["stored"] = stored
        with suppress(ConnectionError):
            for number in count():
                self.wfile.write(json.dumps({"seq": number, **line}).encode() + b"\n")
                line = {"alive": True}
                time.sleep(0.5)


@contextmanager
def answering_worker(handler: type[Answers] = Answers) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def balancer() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with serving() as started:
        yield started


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A balancer for tests that do not harm its processes."""
    with serving() as started:
        yield started


@pytest.fixture
def shared_url(shared: tuple[str, subprocess.Popen[bytes]]) -> str:
    return shared[0]


@contextmanager
def serving(
    *flags: str, worker: type[Answers] = Answers
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A balancer of several processes before one worker that answers at once."""
    port = free_port()
    serve = ("-m", "sgl_ext.balancer.serve", "--port", str(port), "--processes", str(COUNT))
    with (
        answering_worker(worker) as engine,
        process(*serve, "--drain-s", "1", "--worker", engine, *flags) as running,
    ):
        url = f"http://127.0.0.1:{port}"
        until(lambda: len(psutil.Process(running.pid).children()) == COUNT)
        until(lambda: all(status(url) == 200 for _ in range(20)))
        yield url, running


def status(url: str, path: str = "/health", key: str = "") -> int:
    """An answer's status on a connection of its own, which any of the processes may take."""
    try:
        return requests.get(url + path, headers={"x-api-key": key}, timeout=HANG_S).status_code
    except requests.ConnectionError:
        return 0


def counted(url: str) -> float:
    page = requests.get(url + "/metrics", timeout=HANG_S).text
    name = 'sgl_ext_requests_total{path="/v1/chat/completions",status="200"} '
    return sum(float(line.removeprefix(name)) for line in page.splitlines() if name in line)


def test_processes_serve_and_count_as_one(shared_url: str) -> None:
    for _ in range(30):
        answer = requests.post(shared_url + "/v1/chat/completions", json=BODY, timeout=HANG_S)
        assert answer.status_code == 200
    until(lambda: counted(shared_url) == 30)
    page = requests.get(shared_url + "/metrics", timeout=HANG_S).text
    for number in range(COUNT):
        line = f'process_resident_memory_bytes{{process="{number}"}}'
        assert page.count(line) == 1, "each process has its own memory"
    assert "sgl_ext_workers_joined_total 1.0" in page, "all of them have the same workers"


def test_any_process_tells_the_state_of_all(shared_url: str) -> None:
    session = {"x-session-id": "several", "x-tenant-id": "several"}
    for _ in range(12):
        requests.post(
            shared_url + "/v1/chat/completions", json=BODY, headers=session, timeout=HANG_S
        ).raise_for_status()

    def told() -> bool:
        states = [
            requests.get(shared_url + "/sgl_ext/state", timeout=HANG_S).json() for _ in range(9)
        ]
        return all(
            ("several", 12) in [(row["name"], row["requests"]) for row in state["tenants"]]
            and 12 in [row["turns"] for row in state["sessions"]]
            and state["queue"]["limit"] == COUNT * 1024
            for state in states
        )

    until(told)


def test_a_worker_that_joins_one_joins_all(shared_url: str) -> None:
    joined = f"http://127.0.0.1:{free_port()}"
    answer = requests.post(shared_url + "/sgl_ext/workers", json={"url": joined}, timeout=HANG_S)
    assert answer.status_code == 201

    def known() -> bool:
        pages = [
            requests.get(shared_url + "/sgl_ext/workers", timeout=HANG_S).json() for _ in range(12)
        ]
        return all(joined in [worker["url"] for worker in page["workers"]] for page in pages)

    until(known)


def test_all_processes_share_one_store(shared_url: str) -> None:
    blocks = [{"id": "rules", "layer": "stable", "content": "Be brief."}]
    kept = requests.post(
        shared_url + "/v1/contexts", json={"blocks": blocks}, timeout=HANG_S
    ).json()
    path = f"/v1/contexts/{kept['context_id']}"
    assert all(status(shared_url, path) == 200 for _ in range(12))
    assert requests.delete(shared_url + path, timeout=HANG_S).status_code == 200
    assert all(status(shared_url, path) == 404 for _ in range(12))


def test_a_tenant_has_one_allowance_in_all_processes(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f"[tenants.slow]\nrequests_per_minute = {COUNT}\n")
    (alice, _), (bob, name), (slow, _) = (
        keys.add_key(path, tenant) for tenant in ("alice", "bob", "slow")
    )

    def seen(path: str, key: str = "") -> set[int]:
        return {status(url, path, key) for _ in range(12)}

    with serving("--keys", str(path)) as (url, _):
        blocks = [{"id": "rules", "layer": "stable", "content": "Be brief."}]
        headers = {"x-api-key": alice}
        kept = requests.post(
            url + "/v1/contexts", json={"blocks": blocks}, headers=headers, timeout=HANG_S
        ).json()
        context = f"/v1/contexts/{kept['context_id']}"
        assert seen(context, alice) == {200}
        assert seen(context, bob) == {404}
        assert seen(context) == {401}
        assert seen("/sgl_ext/workers", alice) == {403}

        headers = {"x-api-key": slow}
        answers = [
            requests.post(url + "/v1/chat/completions", json=BODY, headers=headers, timeout=HANG_S)
            for _ in range(20)
        ]
        let_in = [answer.status_code for answer in answers].count(200)
        assert 1 <= let_in <= COUNT, "each process has its part of a limit"
        assert {answer.status_code for answer in answers} == {200, 429}

        keys.revoke_key(path, name)
        until(lambda: seen(context, bob) == {401})
        assert seen(context, alice) == {200}


def test_all_processes_look_up_in_one_index_and_a_killed_writer_is_replaced() -> None:
    Publishes.held = read_chain(of_path("/v1/chat/completions"), BODY).hashes

    def held(url: str) -> set[int]:
        """What the processes know that the worker holds, each asked several times."""
        path = url + "/sgl_ext/explain/v1/chat/completions"
        answers = []
        for _ in range(12):
            with suppress(requests.ConnectionError):  # of the process that was killed
                answers.append(requests.post(path, json=BODY, timeout=HANG_S))
        return {answer.json()["workers"][0]["held_tokens"] for answer in answers}

    def is_ready(url: str) -> bool:
        return all(status(url, "/ready") == 200 for _ in range(12))

    tokens = 1000 * len(Publishes.held)
    with serving(worker=Publishes) as (url, running):
        until(lambda: is_ready(url))
        assert held(url) == {tokens}
        group = psutil.Process(running.pid)
        writer = min(group.children(), key=lambda child: child.create_time())
        writer.kill()
        until(lambda: writer.pid not in [child.pid for child in group.children()])
        until(lambda: len(group.children()) == COUNT)
        until(lambda: is_ready(url))
        assert held(url) == {tokens}, "what the one before it wrote"
        Publishes.held = Publishes.held[:1]
        writer = max(group.children(), key=lambda child: child.create_time())
        writer.kill()
        until(lambda: held(url) == {1000})


def test_no_process_outlives_the_first(balancer: tuple[str, subprocess.Popen[bytes]]) -> None:
    _, running = balancer
    children = psutil.Process(running.pid).children()
    running.kill()
    _, alive = psutil.wait_procs(children, timeout=HANG_S)
    assert not alive


def test_processes_end_together(balancer: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, running = balancer
    children = psutil.Process(running.pid).children()
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=HANG_S) == 0
    assert not any(child.is_running() for child in children)
    assert status(url) == 0


def to_all(running: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """What a terminal sends reaches every process."""
    for child in (*psutil.Process(running.pid).children(), running):
        child.send_signal(number)


def test_a_closed_terminal_ends_no_process(shared: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, running = shared
    before = psutil.Process(running.pid).children()
    to_all(running, signal.SIGHUP)
    assert all(status(url) == 200 for _ in range(20))
    assert psutil.Process(running.pid).children() == before


def test_a_signal_to_the_first_process_changes_settings_in_all(tmp_path: Path) -> None:
    file = tmp_path / "balancer.toml"
    file.write_text("[tenants.people]\nmax-priority = 5\n")

    def priority() -> int:
        headers = {"x-tenant-id": "people", "x-sgl-ext-priority": "99"}
        path = "/sgl_ext/explain/v1/messages"
        answer = requests.post(url + path, json=BODY, headers=headers, timeout=HANG_S)
        return int(answer.json()["priority"])

    with serving("--config", str(file)) as (url, running):
        assert priority() == 5
        file.write_text("[tenants.people]\nmax-priority = 25\n")
        running.send_signal(signal.SIGHUP)
        until(lambda: {priority() for _ in range(2 * COUNT)} == {25})


def test_ctrl_c_drains_and_a_second_one_ends_at_once() -> None:
    answers: list[requests.Response] = []

    def ask() -> None:
        answers.append(requests.post(url + "/v1/messages", json=BODY, timeout=HANG_S))

    def in_flight() -> int:
        page = requests.get(url + "/health", timeout=HANG_S).json()
        return sum(worker["in_flight"] for worker in page["workers"])

    with serving("--drain-s", "600") as (url, running):
        asking = Thread(target=ask)
        asking.start()
        until(lambda: in_flight() == 1)
        to_all(running, signal.SIGINT)
        until(lambda: {status(url) for _ in range(6)} == {503})
        assert running.poll() is None
        assert not answers
        to_all(running, signal.SIGINT)
        assert running.wait(timeout=HANG_S) == 0
        asking.join(timeout=HANG_S)
    assert [answer.status_code for answer in answers] == [529]


def test_an_unusable_store_ends_them_with_a_reason(tmp_path: Path) -> None:
    command = ["-m", "sgl_ext.balancer.serve", "--processes", "2", "--store", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert ended.returncode == 1
    assert f"sgl-ext balancer: store={str(tmp_path)!r}: cannot be used" in ended.stderr


def test_a_port_in_use_ends_them_with_a_reason(tmp_path: Path) -> None:
    port = free_port()
    import socket

    with socket.create_server(("127.0.0.1", port)):
        command = ["-m", "sgl_ext.balancer.serve", "--port", str(port), "--processes", "2"]
        ended = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=HANG_S, check=False
        )
    assert ended.returncode == 1
    assert f"port={port}" in ended.stderr
