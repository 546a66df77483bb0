"""How long the balancer's event loop stands still while a body passes.

A balancer runs in this process, before an engine that is a script and a client, each in its own
thread. A pause is the CPU time of the loop's thread between two of its timers, which come each
millisecond, so neither the other threads nor a busy machine count.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import uvloop
from sgl_ext_cpu.node import free_port

from bench.lib.script import require
from sgl_ext.balancer.server import Balancer
from sgl_ext.settings.schema import BalancerSettings

MOST_MS = 250.0
"""No request may stop the loop for longer: docs/reference/limits.md."""
_TIMER_S = 0.001
_TIMEOUT_S = 60.0


class _Engine(BaseHTTPRequestHandler):
    """Answers every request at once."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self._answer()

    def _answer(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Timer:
    """The longest pause of the loop that it starts in, since it was last asked."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._begin_s = time.thread_time()
        asyncio.get_running_loop().call_later(_TIMER_S, self._tick)

    def take_ms(self) -> float:
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s * 1e3

    def _tick(self) -> None:
        now_s = time.thread_time()
        self._longest_s = max(self._longest_s, now_s - self._begin_s)
        self._begin_s = now_s
        asyncio.get_running_loop().call_later(_TIMER_S, self._tick)


def pauses_ms(path: str, body: bytes, rounds: int) -> list[float]:
    """The longest pause while each of `rounds` requests with this body is answered. One before
    them starts the process that reads large bodies. Raises InvariantBroken beyond MOST_MS."""
    with _engine() as url:
        return uvloop.run(_pauses_ms(url, path, body, rounds))


async def _pauses_ms(url: str, path: str, body: bytes, rounds: int) -> list[float]:
    port = free_port()
    balancer = Balancer(BalancerSettings(port=port, workers=(url,)), interval_s=3600.0)
    await balancer.start()
    timer, found = _Timer(), list[float]()
    try:
        await asyncio.to_thread(_post, port, path, body)
        gc.collect()
        for _ in range(rounds):
            await asyncio.sleep(2 * _TIMER_S)
            timer.take_ms()
            status = await asyncio.to_thread(_post, port, path, body)
            require(status == 200, "each body is answered", status=status)
            await asyncio.sleep(2 * _TIMER_S)
            found.append(pause_ms := timer.take_ms())
            require(pause_ms <= MOST_MS, "the event loop goes on", pause_ms=pause_ms)
    finally:
        balancer.hurry()
        await balancer.stop()
    return found


def _post(port: int, path: str, body: bytes) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


@contextmanager
def _engine() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
