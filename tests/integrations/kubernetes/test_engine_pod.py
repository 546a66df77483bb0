"""An engine's pod that terminates under load: real engines, a real balancer, a stand-in cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import requests
from aiohttp.test_utils import TestServer
from sgl_ext_cpu.node import running_balancer
from sgl_ext_cpu.nursery import Nursery

from tests.engine.scheduler.test_event_publisher import Engine, running_engine
from tests.integrations.kubernetes.kubernetes_api import (
    KubernetesApi,
    Object,
    endpoint,
    endpoint_slice,
    write_kubeconfig,
)
from tests.waiting import HANG_S, until

CLIENTS = 6


@contextmanager
def running_api(kubeconfig: Path) -> Iterator[Callable[..., None]]:
    """A cluster in a thread of its own. Yields a function that calls its methods."""
    loop, api = asyncio.new_event_loop(), KubernetesApi()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(HANG_S)

    async def call(method: str, *args: Any) -> None:
        getattr(api, method)(*args)

    server = TestServer(api.app(), loop=loop, shutdown_timeout=0)
    try:
        run(server.start_server())
        write_kubeconfig(kubeconfig, str(server.make_url("")).rstrip("/"))
        yield lambda method, *args: run(call(method, *args))
        run(call("end_watches"))
    finally:
        run(server.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def slice_of(name: str, engine: Engine, **conditions: bool) -> Object:
    port = int(engine.url.rpartition(":")[2])
    ports = [{"name": "http", "port": port, "protocol": "TCP"}]
    made = endpoint(name, "127.0.0.1", **conditions)
    return endpoint_slice(made, name=f"engines-{name}", ports=ports)


class Load:
    """Clients that ask the balancer all the time, every second one for a stream.

    answered: how many whole answers there were. lost: what each other answer was.
    """

    def __init__(self, url: str) -> None:
        self.answered = 0
        self.lost: list[str] = []
        self._url = url
        self._numbers = count()
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.is_set():
            number = next(self._numbers)
            try:
                text = self._ask(number, number % 2 == 0)
            except requests.RequestException as error:
                text = repr(error)
            if "end_turn" in text or "max_tokens" in text:
                self.answered += 1
            else:
                self.lost.append(text[-300:])

    def _ask(self, number: int, stream: bool) -> str:
        prompt = f"{number} " * 200
        body = {"model": "tiny", "max_tokens": 60, "stream": stream}
        body["messages"] = [{"role": "user", "content": prompt}]  # type: ignore[assignment]
        answer = requests.post(f"{self._url}/v1/messages", json=body, timeout=300)
        is_whole = not stream or "event: message_stop" in answer.text
        return answer.text if is_whole else f"cut: {answer.text}"

    def end(self) -> None:
        self._is_over.set()


@pytest.mark.slow
def test_no_request_is_lost_when_an_engine_s_pod_terminates_under_load(
    nursery: Nursery, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))

    def workers() -> dict[str, Any]:
        rows = requests.get(f"{balancer.url}/sgl_ext/workers", timeout=HANG_S).json()["workers"]
        return {row["id"].partition("@")[0]: row for row in rows}

    with ExitStack() as stack:
        call = stack.enter_context(running_api(tmp_path / "config"))
        engines = {}
        for name in "ab":
            started = running_engine(
                nursery, tiny_model, tmp_path / name, "--max-total-tokens", "50000"
            )
            engines[name] = stack.enter_context(started)
            # SGLang heeds SIGTERM from the first request on, which usually is its warm-up.
            engines[name].ask("Hello")
            call("put", slice_of(name, engines[name]))
        balancer = stack.enter_context(
            running_balancer(
                [], tmp_path / "balancer.log", "--workers-from", "kubernetes:serving/engines"
            )
        )
        until(lambda: sum(row["ready"] for row in workers().values()) == 2)
        load = Load(balancer.url)
        pool = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        stack.callback(load.end)
        for _ in range(CLIENTS):
            pool.submit(load.run)

        until(lambda: workers()["a"]["in_flight"] > 1)
        leaving = engines["a"]
        # Kubernetes does both at the same time.
        os.kill(leaving.server.pid, signal.SIGTERM)
        call("put", slice_of("a", leaving, ready=False, terminating=True))
        until(lambda: not leaving.server.running())
        call("delete", "engines-a")
        assert leaving.server.exit_status() == 0
        until(lambda: set(workers()) == {"b"})
        so_far = load.answered
        until(lambda: load.answered > so_far + CLIENTS)
        assert (load.lost, workers()["b"]["ready"]) == ([], True)
