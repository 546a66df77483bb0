"""A balancer process to attack, before an engine that is a script, and what its own figures say."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import requests
from sgl_ext_cpu.node import running_balancer

_LIMIT_S = 120


class _Engine(BaseHTTPRequestHandler):
    """Answers every request at once."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/ready" else 404)

    def do_POST(self) -> None:
        left = int(self.headers.get("content-length", 0))
        while left > 0:
            left -= len(self.rfile.read(min(left, 1 << 20))) or left
        self._answer(200)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass


@dataclass
class Target:
    """The balancer under attack.

    idle_kb: its memory before the first attack.
    """

    url: str
    pid: int
    idle_kb: int = 0
    _open: ExitStack = field(default_factory=ExitStack)

    def connect(self) -> socket.socket:
        """A connection that stays open until `hang_up`."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        connection = socket.create_connection((parts.hostname, parts.port or 80), _LIMIT_S)
        return self._open.enter_context(closing(connection))

    def hang_up(self) -> None:
        """Closes all connections."""
        self._open.close()

    def send(self, data: bytes) -> int | None:
        """Sends bytes on a new connection and returns the status of the answer; None without one.

        The balancer may answer and close before it has read all.
        """
        connection = self.connect()
        with suppress(ConnectionError):
            connection.sendall(data)
        with suppress(ConnectionError):
            answer = connection.makefile("rb").readline(4096)
            return int(answer.split(b" ")[1]) if answer else None
        return None

    def page(self) -> str:
        """The balancer's metrics."""
        return requests.get(f"{self.url}/metrics", timeout=_LIMIT_S).text

    def stalls(self, longer_than_s: float) -> float:
        """How often the loop's thread computed for longer than this, which is a bucket's bound."""
        name, page = "sgl_ext_event_loop_stall_seconds", self.page()
        within = sample(page, f'{name}_bucket{{clock="cpu",le="{float(longer_than_s)}"}}')
        return sample(page, f'{name}_count{{clock="cpu"}}') - within

    def peak_kb(self) -> int:
        """The most memory that the process has had."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1])


def sample(page: str, name: str) -> float:
    """The value of a metric on a page, 0 if it is not there."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


@contextmanager
def target(log: Path, *flags: str) -> Iterator[Target]:
    """Starts the engine's script and the balancer."""
    engine = ThreadingHTTPServer(("127.0.0.1", 0), _Engine)
    Thread(target=engine.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{engine.server_port}"
        with running_balancer([url], log, *flags) as balancer:
            under_attack = Target(balancer.url, balancer.process.pid)
            under_attack.idle_kb = under_attack.peak_kb()
            yield under_attack
            under_attack.hang_up()
    finally:
        engine.shutdown()
        engine.server_close()
