"""The arms of a judge: our node, stock SGLang with its requests in turn, and peers before it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from sgl_ext_cpu.node import Node

from bench.lib.engines import OURS, STOCK, Engines
from bench.lib.other_routers import nginx_version, running_peer

PEERS = ("sglang-router", "smg")
_BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "Hello", "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
}


@dataclass(frozen=True)
class Arm:
    """One address that a judge loads, and the engines that answer there."""

    url: str
    engines: tuple[Node, ...]

    def flush(self) -> None:
        """Empties the caches of all engines."""
        for engine in self.engines:
            engine.flush()

    def served_model(self) -> str:
        """The name of the model that it serves."""
        models = requests.get(f"{self.url}/v1/models", timeout=60).json()["data"]
        return str(models[0]["id"])

    def refusal(self, endpoint: str, model: str) -> str:
        """Why it does not serve this endpoint, "" if it does."""
        body = {"model": model} | _BODIES[endpoint]
        answer = requests.post(self.url + endpoint, json=body, timeout=60)
        return "" if answer.ok else f"{endpoint} is answered with status {answer.status_code}"

    def tokens(self) -> tuple[float, float]:
        """The prompt tokens that the engines have had, and those that they had to compute."""
        had = sum(engine.metric("sglang:prompt_tokens_total") for engine in self.engines)
        counter = "sglang:uncached_prompt_tokens_histogram_sum"
        return had, sum(engine.metric(counter) for engine in self.engines)


@contextmanager
def arms_of(engines: Engines, folder: Path, peers: Collection[str]) -> Iterator[dict[str, Arm]]:
    """Starts two engines for our arm, and two that stock SGLang's arm and the peers share.

    Stock SGLang has no balancer. Requests go in turn, by nginx, or without it by sglang-router.
    """
    started = {
        "ours": OURS._replace(flags=("--instances", "2")),
        "first": STOCK,
        "second": STOCK,
    }
    with engines.serving(started, folder=folder) as nodes, ExitStack() as stack:
        stock = (nodes["first"], nodes["second"])
        workers = [node.url for node in stock]
        has_nginx = nginx_version() is not None
        in_turn = ("nginx", ()) if has_nginx else ("sglang-router", ("--policy", "round_robin"))
        servers = {"stock": in_turn, **{name: (name, ()) for name in peers}}
        arms = {"ours": Arm(nodes["ours"].url, (nodes["ours"],))}
        for arm, (name, flags) in servers.items():
            server = stack.enter_context(running_peer(name, workers, flags=flags))
            arms[arm] = Arm(server.url, stock)
        yield arms


def capacity_per_s(arm: Arm, model: str, count: int = 24) -> float:
    """Requests of about 1,000 tokens that the arm answers in a second, four at a time."""

    def ask(number: int) -> None:
        text = " ".join(f"{number} calibration {word}" for word in range(200))
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 16,
        }
        requests.post(f"{arm.url}/v1/chat/completions", json=body, timeout=120).raise_for_status()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
        started = time.perf_counter()
        list(pool.map(ask, range(4, 4 + count)))
        return count / (time.perf_counter() - started)
