"""One run: fresh simulated engines, a router as a real process, and a trace sent through it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import requests
from sgl_ext_cpu.node import ROOT, free_port, is_healthy, running_balancer, running_process

from bench.lib.other_routers import running_peer
from bench.lib.script import require
from bench.sim.engine import EngineConfig
from bench.trace.agents import Agent, TraceConfig
from bench.trace.calls import Call, compile_calls, ideal_of
from bench.trace.load_generator import Outcome
from bench.trace.variants import make_trace
from sgl_ext.settings.schema import EngineSettings

SESSION_HEADER = "x-session-id"
_OF_ITS_OWN_REQUESTS = ("--policy", "power_of_two", "--power-of-two-load-metric", "least_requests")
_PEERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "round_robin": ("smg", ("--policy", "round_robin")),
    "least_loaded": ("smg", _OF_ITS_OWN_REQUESTS),
    "sglang_router": ("sglang-router", ()),
    "smg": ("smg", ()),
    "vllm_router": ("vllm-router", ()),
}
POLICIES = ("ours", *_PEERS)
NO_EVENTS = "ours_without_events"
"""Our router in front of stock engines, which only answer."""
FCFS = "ours_fcfs"
"""Our router in front of engines with the plugin that serve first what comes first."""
_AGING_S = EngineSettings().aging_s


@dataclass(frozen=True)
class Setup:
    """A trace, the engines it is sent to, and for how long new calls start."""

    trace: TraceConfig
    engine: EngineConfig
    workers: int
    limit_s: float


def measure(policy: str, setup: Setup, *, header: bool) -> dict[str, Any]:
    """One policy's figures on one trace, on which every call must succeed.

    `header`: whether each call names its session.
    """
    has_plugin = policy in ("ours", FCFS)
    if policy == "ours":
        setup = replace(setup, engine=replace(setup.engine, aging_s=_AGING_S))
    with engines(setup, plugin=has_plugin) as urls, router(policy, urls) as url:
        outcome = send([url], setup.trace, setup.limit_s, SESSION_HEADER if header else None)
        pages = [requests.get(f"{url}/sim/figures", timeout=30).json() for url in urls]
    loads = [page["prefill_s"] for page in pages]
    only = None if outcome.complete else frozenset(outcome.done)
    return {
        **figures(outcome, _ideal(setup.trace, only)),
        "load_max_over_mean": round(max(loads) / statistics.mean(loads), 3),
        "moves": moves_of([page["arrivals"] for page in pages]),
    }


def moves_of(arrivals: Sequence[Sequence[tuple[float, str]]]) -> int:
    """How many requests came to another worker than the one before of the same conversation.

    arrivals: of each worker, the time and the conversation of each request.
    """
    seen = [
        (at_s, worker, conversation)
        for worker, requests_there in enumerate(arrivals)
        for at_s, conversation in requests_there
    ]
    last: dict[str, int] = {}
    moves = 0
    for _, worker, conversation in sorted(seen):
        moves += last.setdefault(conversation, worker) != worker
        last[conversation] = worker
    return moves


def figures(outcome: Outcome, ideal: float | None) -> dict[str, Any]:
    """What a run came to; `ideal` is the best cached ratio of the calls that were made."""
    errors = outcome.errors
    require(not errors, "every call is answered", failed=len(errors), first=errors[:1])
    cached = outcome.cached_tokens / outcome.prompt_tokens
    written = outcome.prompt_tokens - outcome.cached_tokens + outcome.output_tokens
    cuts = statistics.quantiles(outcome.ttft_ms, n=100, method="inclusive")
    late = statistics.quantiles(outcome.late_ms, n=100, method="inclusive")
    return {
        "cached_ratio": round(cached, 4),
        "share_of_ideal": round(cached / ideal, 4) if ideal else None,
        "read_write": round(outcome.cached_tokens / written, 2),
        **{f"ttft_p{percent}_ms": round(cuts[percent - 1], 1) for percent in (50, 90, 95, 99)},
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
    command = [sys.executable, "-m", "bench.trace.load_generator", json.dumps(task)]
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
    command = [sys.executable, "-m", "bench.sim.server", *(["--plugin"] if plugin else [])]
    for url in urls:
        command += ["--port", url.rsplit(":", 1)[1]]
    for name, value in asdict(setup.engine).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with tempfile.TemporaryDirectory() as folder:
        ready = partial(is_healthy, urls[-1])
        with running_process(command, Path(folder) / "log", ready):
            yield urls


@contextmanager
def router(policy: str, urls: Sequence[str]) -> Iterator[str]:
    """The URL of a policy's router, which runs in front of the engines."""
    with tempfile.TemporaryDirectory() as folder:
        if policy in ("ours", FCFS, NO_EVENTS):
            running = running_balancer(urls, Path(folder) / "log")
        else:
            name, flags = _PEERS[policy]
            running = running_peer(name, urls, flags=flags)
        with running as server:
            yield server.url
