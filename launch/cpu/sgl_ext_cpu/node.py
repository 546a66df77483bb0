"""Servers for benches and tests, as processes: a node of real engines, or a balancer alone."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import requests

ROOT = Path(__file__).parents[3]
"""The checkout."""
CPU_CONFIG = ROOT / "launch/cpu.toml"

_START_TIMEOUT_S = 600.0

FORKING = {"SGLEXT_CPU_FORK": "1"}
"""The variable with which an engine forks its processes, and starts in two thirds of the time."""


@dataclass(frozen=True)
class RunningServer:
    """A server's address and its process."""

    url: str
    process: subprocess.Popen[bytes]


@dataclass(frozen=True)
class Node:
    """A launcher with its balancer and engines, all real processes."""

    url: str
    engines: tuple[str, ...]
    process: subprocess.Popen[bytes]
    log_dir: Path

    def post(self, path: str, body: Any, **options: Any) -> requests.Response:
        """Posts JSON to the balancer."""
        return requests.post(self.url + path, json=body, timeout=300, **options)

    def flush(self) -> None:
        """Empties every engine's cache."""
        requests.post(f"{self.url}/flush_cache", timeout=60).raise_for_status()

    def metric(self, name: str) -> float:
        """The sum of a counter over all engines and labels."""
        return sum(self.metric_by_engine(name))

    def metric_by_engine(self, name: str) -> list[float]:
        """A counter, summed over its labels, of each engine in order."""
        pages = [requests.get(f"{engine}/metrics", timeout=30).text for engine in self.engines]
        found = [[line for line in p.splitlines() if line.startswith(name)] for p in pages]
        return [sum(float(line.rsplit(" ", 1)[1]) for line in lines) for lines in found]


StartNode = Callable[..., AbstractContextManager[Node]]
"""Starts a node with a log directory and flags of the launcher."""


def local_model(size: str) -> Path:
    """A made model of this size; made once per checkout."""
    from sgl_ext_cpu.model import make_model

    return Path(make_model(ROOT / ".models" / size, size))


@contextmanager
def running_node(
    model: Path,
    log_dir: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
    config: Path = CPU_CONFIG,
) -> Iterator[Node]:
    """Starts the launcher, yields once it serves, and ends it with SIGTERM.

    `environment` adds to this process's variables. The balancer's port is a free one if none
    is given. Raises RuntimeError with the launcher's output if it does not come up.
    """
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sgl_ext.launch", "--config", str(config)]
    command += ["--model-path", str(model), "--port", str(port), "--log-dir", str(log_dir), *flags]
    output = log_dir / "launch.out"

    def serving() -> bool:
        return "sgl-ext is serving" in output.read_text()

    # launch/cpu.toml names the CPU platform, as for every user.
    whole = {"SGLANG_PLATFORM": "", **(environment or {})}
    with running_process(command, output, serving, environment=whole) as process:
        workers = requests.get(f"{url}/health", timeout=30).json()["workers"]
        engines = dict.fromkeys(worker["url"] for worker in workers)  # each rank is a worker
        yield Node(url, tuple(engines), process, log_dir)


@contextmanager
def running_balancer(
    workers: Sequence[str], log: Path, *flags: str, cores: Collection[int] = ()
) -> Iterator[RunningServer]:
    """Starts a balancer process in front of these workers, and ends it with SIGTERM."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "sgl_ext.balancer.serve", "--drain-min-s=0"]
    command += ["--port", url.rpartition(":")[2]]
    for worker in workers:
        command += ["--worker", worker]
    ready = partial(is_healthy, url)
    with running_process([*command, *flags], log, ready, cores=cores) as process:
        yield RunningServer(url, process)


@contextmanager
def running_process(
    command: Sequence[str],
    log: Path,
    ready: Callable[[], bool],
    *,
    environment: Mapping[str, str] | None = None,
    cores: Collection[int] = (),
    end_signal: signal.Signals = signal.SIGTERM,
    own_session: bool = False,
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a process in the checkout, yields once `ready()` is true, and ends it.

    Its output goes to `log`. `environment` adds to this process's variables; `cores` are the
    only ones the process may use, all where none are given. own_session: it leads a session of its
    own, which is killed if this process dies.
    Raises RuntimeError with the end of the log if the process ends or is not ready in time.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            start_new_session=own_session,
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        )
    guard = _session_guard(process.pid) if own_session else None
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                text = log.read_text(errors="replace")[-8000:]
                status = process.poll()
                raise RuntimeError(f"{' '.join(command)} did not start ({status=}):\n{text}")
            time.sleep(0.05)
        yield process
    finally:
        process.send_signal(end_signal)
        try:
            process.wait(timeout=90)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            if guard is not None:
                guard.kill()
                guard.wait()


def _session_guard(leader: int) -> subprocess.Popen[bytes]:
    """Kills a session's processes once this process has died, and its end of the pipe with it."""
    command = ["sh", "-c", f"read -r _; kill -s KILL -- -{leader}"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def is_healthy(url: str) -> bool:
    """Whether the server at this address answers `/health` with success."""
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.RequestException:
        return False


def free_port() -> int:
    """A port that is free, below those that the system gives to outgoing connections.

    A server may take up to a minute to listen on it: an outgoing connection must not take it
    in the meantime.
    """
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
