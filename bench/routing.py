"""How much of the possible cache reuse does each router get from the same workers, and which TTFT?

The trace of teams of agents (bench/trace/swarm.py) goes as a closed loop through each router, a
real process, to simulated engines (bench/sim/engine.py) that are started for each run. The
engines of `ours` have the plugin: they publish prefix events and take their queues in our order;
those of `ours_fcfs` serve first what comes first. The other routers have stock engines. Only
`vllm_router` gets the session header, which its policy needs.

    ours            python -m sgl_ext.balancer.serve
    round_robin     smg --policy round_robin
    least_loaded    smg --policy power_of_two, by its own requests in flight
    sglang_router   its default, cache_aware
    smg             its default, cache_aware
    vllm_router     sticky_least_loaded

Arms run in turns within each round, in another order each round. Before and after each arm the
control goes straight to an engine: the same request, one after another. If the controls of a run
lie further apart than a third, the machine was not the same for all arms, and the run is not valid.

`share_of_ideal` compares with one worker that has an infinite cache, over the calls that were
made: calls stop at a run's time limit, so a slow router makes fewer. `read_write` counts output
tokens as written. `load_max_over_mean` is of seconds of prefill. `moves` counts, at the workers,
requests that came to another worker than the one before of the same conversation. `--quick`
halves prompts and prefill speed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import requests
from sgl_ext_cpu.node import ROOT, free_port, is_healthy, running_balancer, running_process

from bench.lib.engines import rotated
from bench.lib.other_routers import running_peer
from bench.lib.script import Size, parser_of, precondition, require, run
from bench.lib.spread import spread
from bench.sim.engine import EngineConfig
from bench.trace.agents import Agent, TraceConfig
from bench.trace.calls import CHAT, MODEL, Call, compile_calls, ideal_of
from bench.trace.load_generator import Outcome
from bench.trace.swarm import make_swarm
from sgl_ext.settings.schema import EngineSettings

SESSION_HEADER = "x-session-id"
MOST_APART = 4 / 3
"""The slowest control of a valid run over the fastest one."""
FCFS = "ours_fcfs"
"""Our router in front of engines with the plugin that serve first what comes first."""
_OF_ITS_OWN_REQUESTS = ("--policy", "power_of_two", "--power-of-two-load-metric", "least_requests")
_PEERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "round_robin": ("smg", ("--policy", "round_robin")),
    "least_loaded": ("smg", _OF_ITS_OWN_REQUESTS),
    "sglang_router": ("sglang-router", ()),
    "smg": ("smg", ()),
    "vllm_router": ("vllm-router", ()),
}
POLICIES = ("ours", FCFS, *_PEERS)
_HEADER_GIVEN = "vllm_router"
_AGING_S = EngineSettings().aging_s
_CONTROLS = 40


@dataclass(frozen=True)
class Setup:
    """A trace, the engines it is sent to, and for how long new calls start."""

    trace: TraceConfig
    engine: EngineConfig
    workers: int
    limit_s: float
    rounds: int
    policies: tuple[str, ...] = POLICIES


def setup_of(size: Size) -> Setup:
    """Full: full-sized prompts, and ten sessions a worker that act at four times a person's pace.
    Quick: half-sized prompts, and twice that pace. Smallest: our router alone, for some seconds."""
    if size == "full":
        trace = TraceConfig(sessions=40, pace=4)
        return Setup(trace, _engine(1, 0.003, 500_000), workers=4, limit_s=110, rounds=5)
    if size == "quick":
        trace = TraceConfig(sessions=40, scale=0.5, pace=8, ramp_s=10)
        return Setup(trace, _engine(0.5, 0.001, 200_000), workers=4, limit_s=13, rounds=2)
    trace = TraceConfig(sessions=4, scale=0.1, pace=40, ramp_s=1)
    return Setup(trace, _engine(0.1, 0.0001, 20_000), 2, limit_s=3, rounds=1, policies=("ours",))


def _engine(scale: float, decode_s: float, capacity_tokens: int) -> EngineConfig:
    stock = EngineConfig()
    return replace(
        stock,
        capacity_tokens=capacity_tokens,
        prefill_tokens_per_s=stock.prefill_tokens_per_s * scale,
        chunk_tokens=int(stock.chunk_tokens * scale),
        decode_base_s=decode_s,
        decode_per_request_s=decode_s / 60,
    )


def main() -> None:
    options = parser_of(__doc__).parse_args()
    run("routing", partial(compare, options.size))


def compare(size: Size) -> dict[str, Any]:
    """The spread of each figure of each router, over the rounds."""
    setup = setup_of(size)
    seen: dict[str, list[dict[str, float]]] = {policy: [] for policy in setup.policies}
    controls_ms: list[float] = []
    for number in range(setup.rounds):
        for policy in order_of(setup.policies, number):
            figures, before_and_after = measure(policy, setup)
            seen[policy].append(figures)
            controls_ms += before_and_after
            print(f"round {number} {policy}: {figures} {before_and_after}", file=sys.stderr)
    if size != "smallest":
        check_controls(controls_ms)
    return {
        "workers": setup.workers,
        "sessions": setup.trace.sessions,
        "ideal_cached_ratio": round(_ideal(setup.trace, None), 4),
        "control_ms": spread(controls_ms),
        **{
            policy: {field: spread([each[field] for each in rounds], 4) for field in rounds[0]}
            for policy, rounds in seen.items()
        },
    }


def order_of(policies: Sequence[str], number: int) -> list[str]:
    """The arms in the order of a round. Each begins in its turn, and every second round goes the
    other way round, so that an arm does not always come after the same one."""
    order = rotated(policies, number)
    return order[::-1] if number % 2 else order


def check_controls(controls_ms: Sequence[float]) -> None:
    """Raises NotValid if the machine's speed changed while arms were compared."""
    fastest, slowest = min(controls_ms), max(controls_ms)
    precondition(
        slowest <= MOST_APART * fastest,
        "the machine is as fast for each arm",
        fastest_control_ms=round(fastest, 2),
        slowest_control_ms=round(slowest, 2),
    )


def measure(policy: str, setup: Setup) -> tuple[dict[str, float], list[float]]:
    """One policy's figures on the trace, on which every call must succeed, and the control before
    and after it."""
    if policy == "ours":
        setup = replace(setup, engine=replace(setup.engine, aging_s=_AGING_S))
    header = SESSION_HEADER if policy == _HEADER_GIVEN else None
    with engines(setup, plugin=policy in ("ours", FCFS)) as urls, router(policy, urls) as url:
        before_ms = control_ms(urls[0])
        outcome = send(url, setup.trace, setup.limit_s, header)
        after_ms = control_ms(urls[0])
        pages = [requests.get(f"{url}/sim/figures", timeout=30).json() for url in urls]
    loads = [page["prefill_s"] for page in pages]
    only = None if outcome.complete else frozenset(outcome.done)
    found = {
        **figures(outcome, _ideal(setup.trace, only)),
        "load_max_over_mean": round(max(loads) / statistics.mean(loads), 3),
        "moves": moves_of([page["arrivals"] for page in pages]),
    }
    return found, [before_ms, after_ms]


def control_ms(engine: str) -> float:
    """The median time of the same request, one after another, straight to an engine."""
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "control"}],
    }
    times = []
    with requests.Session() as session:
        for _ in range(_CONTROLS):
            began = time.perf_counter()
            session.post(engine + CHAT, json=body, timeout=30).raise_for_status()
            times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)


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


def figures(outcome: Outcome, ideal: float) -> dict[str, float]:
    """What a run came to; `ideal` is the best cached ratio of the calls that were made."""
    errors = outcome.errors
    require(not errors, "every call is answered", failed=len(errors), first=errors[:1])
    cached = outcome.cached_tokens / outcome.prompt_tokens
    written = outcome.prompt_tokens - outcome.cached_tokens + outcome.output_tokens
    cuts = statistics.quantiles(outcome.ttft_ms, n=100, method="inclusive")
    late = statistics.quantiles(outcome.late_ms, n=100, method="inclusive")
    return {
        "cached_ratio": round(cached, 4),
        "share_of_ideal": round(cached / ideal, 4),
        "read_write": round(outcome.cached_tokens / written, 2),
        **{f"ttft_p{percent}_ms": round(cuts[percent - 1], 1) for percent in (50, 90, 95, 99)},
        "requests": len(outcome.done),
        "seconds": round(outcome.seconds, 1),
        "late_p99_ms": round(late[98], 1),
    }


@lru_cache(maxsize=32)
def _ideal(trace: TraceConfig, only: frozenset[tuple[int, int]] | None) -> float:
    """The cached ratio of one worker with an infinite cache; None: over the whole trace."""
    return ideal_of(*_compiled(trace), only).cached_ratio


@lru_cache(maxsize=2)
def _compiled(trace: TraceConfig) -> tuple[tuple[Agent, ...], list[list[Call]]]:
    agents = make_swarm(trace)
    return agents, compile_calls(agents)


def send(url: str, trace: TraceConfig, limit_s: float, header: str | None) -> Outcome:
    """Runs the load generator, a process, to its end."""
    task = {"url": url, "trace": asdict(trace), "limit_s": limit_s, "session_header": header}
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
        if policy in ("ours", FCFS):
            running = running_balancer(urls, Path(folder) / "log")
        else:
            name, flags = _PEERS[policy]
            running = running_peer(name, urls, flags=flags)
        with running as server:
            yield server.url


if __name__ == "__main__":
    main()
