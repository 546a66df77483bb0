"""One run: fresh simulated engines, a router as a real process, and a trace sent through it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import requests

from bench._node import ROOT, free_port
from bench._peers import running_peer
from bench._sim import EngineConfig
from bench._trace import Agent, TraceConfig, make_trace
from bench._trace_load import Outcome
from bench._trace_loop import Call, compile_calls, ideal_of

SESSION_HEADER = "x-session-id"
_START_TIMEOUT_S = 30.0
_OF_ITS_OWN_REQUESTS = ("--policy", "power_of_two", "--power-of-two-load-metric", "least_requests")
# It would take five seconds to end.
_ENDS_SOON = ("--shutdown-grace-period-secs", "1")
_PEERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "round_robin": ("smg", ("--policy", "round_robin", *_ENDS_SOON)),
    "least_loaded": ("smg", (*_OF_ITS_OWN_REQUESTS, *_ENDS_SOON)),
    "sglang_router": ("sglang-router", ()),
    "smg": ("smg", _ENDS_SOON),
    "vllm_router": ("vllm-router", ()),
}
POLICIES = ("ours", *_PEERS)


@dataclass(frozen=True)
class Setup:
    """A trace, the engines it is sent to, and for how long new calls start."""

    trace: TraceConfig
    engine: EngineConfig
    workers: int
    limit_s: float


def measure(policy: str, setup: Setup, *, header: bool) -> dict[str, Any]:
    """One policy's figures on one trace. Raises RuntimeError if anything failed.

    `header`: whether each call names its session.
    """
    with engines(setup, plugin=policy == "ours") as urls, router(policy, urls) as url:
        outcome = send([url], setup.trace, setup.limit_s, SESSION_HEADER if header else None)
        pages = [requests.get(f"{url}/sim/figures", timeout=30).json() for url in urls]
    loads = [page["prefill_s"] for page in pages]
    only = None if outcome.complete else frozenset(outcome.done)
    return {
        **figures(outcome, _ideal(setup.trace, only)),
        "load_max_over_mean": round(max(loads) / statistics.mean(loads), 3),
    }


def figures(outcome: Outcome, ideal: float | None) -> dict[str, Any]:
    """What a run came to; `ideal` is the best cached ratio of the calls that were made."""
    if outcome.errors:
        raise RuntimeError(f"{len(outcome.errors)} calls failed, the first: {outcome.errors[0]}")
    cached = outcome.cached_tokens / outcome.prompt_tokens
    written = outcome.prompt_tokens - outcome.cached_tokens + outcome.output_tokens
    cuts = statistics.quantiles(outcome.ttft_ms, n=100, method="inclusive")
    late = statistics.quantiles(outcome.late_ms, n=100, method="inclusive")
    return {
        "cached_ratio": round(cached, 4),
        "share_of_ideal": round(cached / ideal, 4) if ideal else None,
        "read_write": round(outcome.cached_tokens / written, 2),
        **{f"ttft_p{percent}_ms": round(cuts[percent - 1], 1) for percent in (50, 90, 99)},
        "requests": len(outcome.done),
        "complete": outcome.complete,
        "seconds": round(outcome.seconds, 1),
        "late_p99_ms": round(late[98], 1),
    }


def ideal_ratio(trace: TraceConfig) -> float:
    """The cached ratio of one worker with an infinite cache, over the whole trace."""
    return _ideal(trace, None)


@lru_cache(maxsize=32)
def _ideal(trace: TraceConfig, only: frozenset[tuple[int, int]] | None) -> float:
    return ideal_of(*_compiled(trace), only).cached_ratio


@lru_cache(maxsize=2)
def _compiled(trace: TraceConfig) -> tuple[tuple[Agent, ...], list[list[Call]]]:
    agents = make_trace(trace)
    return agents, compile_calls(agents)


def send(
    urls: Sequence[str], trace: TraceConfig, limit_s: float, header: str | None, **members: Any
) -> Outcome:
    """Runs the load generator, a process, to its end; several URLs are taken in turn.

    `members` are added to each request's body.
    """
    task = {
        "urls": list(urls),
        "trace": asdict(trace),
        "limit_s": limit_s,
        "session_header": header,
        "members": members,
    }
    command = [sys.executable, "-m", "bench._trace_load", json.dumps(task)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the load generator failed:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    found["done"] = [(agent, turn) for agent, turn in found["done"]]
    return Outcome(**found)


@contextmanager
def engines(setup: Setup, *, plugin: bool) -> Iterator[list[str]]:
    """Fresh simulated engines in one process; their URLs."""
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(setup.workers)]
    command = [sys.executable, "-m", "bench._sim_http", *(["--plugin"] if plugin else [])]
    for url in urls:
        command += ["--port", url.rsplit(":", 1)[1]]
    for name, value in asdict(setup.engine).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with _process(command, urls[-1]):
        yield urls


@contextmanager
def router(policy: str, urls: Sequence[str], *flags: str) -> Iterator[str]:
    """A policy's router in front of the engines; its URL. `flags` are for ours."""
    if policy != "ours":
        name, own = _PEERS[policy]
        with running_peer(name, urls, flags=own) as peer:
            yield peer.url
        return
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "sgl_ext.balancer.serve", "--port", url.rsplit(":", 1)[1]]
    command += flags
    for worker in urls:
        command += ["--worker", worker]
    with _process(command, url):
        yield url


@contextmanager
def _process(command: list[str], url: str) -> Iterator[None]:
    """A process that serves at `url`; what it wrote is in the error if it does not."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not _serves(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"{' '.join(command)} did not start:\n{log.read()}")
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            process.wait(timeout=30)


def _serves(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.RequestException:
        return False
