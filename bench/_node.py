"""A node of real engines for a bench or a test: started and ended as a user would."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

ROOT = Path(__file__).parent.parent
_START_TIMEOUT_S = 600.0

FORKING = {"SGL_EXT_CPU_FORK": "1"}
"""Variables with which an engine starts in two thirds of the time; see docs/cpu.md."""


@dataclass(frozen=True)
class Node:
    """A launcher with its balancer and engines, all real processes."""

    url: str
    engines: tuple[str, ...]
    process: subprocess.Popen[str]
    log_dir: Path

    def post(self, path: str, body: Any, **options: Any) -> requests.Response:
        """Posts JSON to the balancer."""
        return requests.post(self.url + path, json=body, timeout=300, **options)

    def flush(self) -> None:
        """Empties every engine's cache."""
        answer = requests.post(f"{self.url}/flush_cache", params={"timeout": 30}, timeout=60)
        answer.raise_for_status()

    def metric(self, name: str) -> float:
        """The sum of a counter over all engines and labels."""
        return sum(self.metric_by_engine(name))

    def metric_by_engine(self, name: str) -> list[float]:
        """A counter, summed over its labels, of each engine in order."""
        pages = [requests.get(f"{engine}/metrics", timeout=30).text for engine in self.engines]
        found = [[line for line in p.splitlines() if line.startswith(name)] for p in pages]
        return [sum(float(line.rsplit(" ", 1)[1]) for line in lines) for lines in found]


def local_model(size: str) -> Path:
    """A model of the maker's, made once a checkout."""
    from sgl_ext_cpu.model import make_model

    return Path(make_model(ROOT / ".models" / size, size))


@contextmanager
def running_node(
    model: Path, log_dir: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[Node]:
    """Starts the launcher, yields once it serves, and ends it with SIGTERM.

    `environment` adds to this process's variables.
    Raises RuntimeError with the launcher's own words if it does not come up.
    """
    port = free_port()
    command = [sys.executable, "-m", "sgl_ext.launch", "--config", str(ROOT / "launch/cpu.toml")]
    command += ["--model-path", str(model), "--port", str(port), "--log-dir", str(log_dir), *flags]
    log_dir.mkdir(parents=True, exist_ok=True)
    output = log_dir / "launch.out"
    with output.open("w") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
    try:
        _await_panel(process, output)
        url = f"http://127.0.0.1:{port}"
        workers = requests.get(f"{url}/health", timeout=30).json()["workers"]
        yield Node(url, tuple(worker["url"] for worker in workers), process, log_dir)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=90)


def _await_panel(process: subprocess.Popen[str], output: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while "sgl-ext is serving" not in output.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the node did not start:\n{output.read_text()}")
        time.sleep(0.25)


def free_port() -> int:
    """A port nobody listens on, below those that outgoing connections are given.

    What listens there comes up to a minute later: a connection could have taken it by then.
    """
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
