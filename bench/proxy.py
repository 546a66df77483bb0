"""What does the balancer add to a request's time, compared with other proxies?

One worker answers at once. Proxies stand in front of it one at a time, each pinned to a core of
its own; the worker and the load generator share another core. A round visits every proxy, and
the worker itself (`direct`), in an order that rotates. Bodies are those of an agent: tools, a
long system prompt, a history, 16 sessions in turn. Reported for bodies of 2 KB and 200 KB:

    added_p50_ms         median time of a whole answer less that of `direct`, one connection
    added_ttft_p50_ms    the same for the first event of a streamed answer
    rps                  whole answers per second, many connections
    cpu_us_per_request   the proxy's CPU time (user and system) for each of them
    streamed_rps, streamed_cpu_us_per_request   the same for answers of ten events

A proxy that is not available is null. The load generator and the worker limit `rps` too: see
`direct`.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from sgl_ext_cpu.node import free_port, is_healthy, running_balancer, running_process

from bench.lib.load import run_load
from bench.lib.other_routers import nginx_on_path, running_peer
from bench.lib.script import Size, parser_of, require, run

SIZES = {"2kb": 2_000, "200kb": 200_000}
_SESSIONS = 16
_CONNECTIONS = 32
_PROXY_CORE = {0}
_OTHER_CORE = {1}
_PEERS = {"sglang_router": "sglang-router", "smg": "smg", "nginx": "nginx"}


@dataclass(frozen=True)
class Proxy:
    """One that is measured; `direct` has no process that counts."""

    name: str
    port: int
    pid: int | None


@dataclass
class Figures:
    """What the rounds saw of one proxy at one size."""

    total_s: list[float] = field(default_factory=list)
    first_event_s: list[float] = field(default_factory=list)
    rps: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    streamed_rps: list[float] = field(default_factory=list)
    streamed_cpu_us: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """How many rounds, small requests in each, and which proxies."""

    rounds: int
    requests: int
    proxies: tuple[str, ...] = ("ours", *_PEERS)


PLANS: dict[Size, Plan] = {
    "full": Plan(6, 2000),
    "quick": Plan(2, 1000),
    "smallest": Plan(1, 64, ("ours",)),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", nargs="*", help="these proxies")
    options = parser.parse_args()
    plan = PLANS[options.size]
    if options.rounds:
        plan = replace(plan, rounds=options.rounds)
    run("proxy", partial(compare, plan, options.only or plan.proxies))


def compare(plan: Plan, names: Sequence[str]) -> dict[str, Any]:
    """The figures of the worker and of these proxies in front of it."""
    os.sched_setaffinity(0, _OTHER_CORE)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        worker = stack.enter_context(_running_responder(folder))
        proxies = [Proxy("direct", _port(worker), None)]
        for name in names:
            proxy = _started(stack, name, worker, folder)
            if proxy is not None:
                proxies.append(proxy)
        figures = _measure(proxies, plan)
    return _report(figures, names)


def _started(stack: ExitStack, name: str, worker: str, folder: Path) -> Proxy | None:
    """The proxy in front of the worker, for as long as the stack; None if it is not available."""
    try:
        if name == "nginx" and not nginx_on_path():
            print("nginx is not on PATH: left out", file=sys.stderr)
            return None
        if name == "ours":
            running = running_balancer([worker], folder / "ours.log", cores=_PROXY_CORE)
        else:
            running = running_peer(_PEERS[name], [worker], cores=_PROXY_CORE)
        server = stack.enter_context(running)
    except RuntimeError as error:
        print(f"{name} left out: {error}", file=sys.stderr)
        return None
    return Proxy(name, _port(server.url), server.process.pid)


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


@contextmanager
def _running_responder(folder: Path) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "bench.lib.responder", str(port)]
    with running_process(command, folder / "responder.log", partial(is_healthy, url)):
        yield url


def _measure(proxies: list[Proxy], plan: Plan) -> dict[tuple[str, str], Figures]:
    figures: dict[tuple[str, str], Figures] = defaultdict(Figures)
    for size, target in SIZES.items():
        whole = [_request(session, target, stream=False) for session in range(_SESSIONS)]
        streamed = [_request(session, target, stream=True) for session in range(_SESSIONS)]
        many = plan.requests if target < 10_000 else plan.requests // 4
        for number in range(-1, plan.rounds):
            turn = (number + 1) % len(proxies)
            for proxy in proxies[turn:] + proxies[:turn]:
                seen = _visit(proxy, whole, streamed, many)
                if number >= 0:  # The first round warms up.
                    _add(figures[proxy.name, size], seen)
    return figures


def _visit(proxy: Proxy, whole: list[bytes], streamed: list[bytes], many: int) -> Figures:
    figures = Figures()
    alone = run_load(proxy.port, whole, many // 4, connections=1)
    figures.total_s = alone.total_s
    alone_streamed = run_load(proxy.port, streamed, many // 4, connections=1)
    figures.first_event_s = alone_streamed.first_byte_s
    figures.rps, figures.cpu_us = _saturate(proxy, whole, many)
    figures.streamed_rps, figures.streamed_cpu_us = _saturate(proxy, streamed, many // 2)
    failed = alone.failed + alone_streamed.failed
    require(not failed, "every request is answered", proxy=proxy.name, failed=failed)
    return figures


def _saturate(proxy: Proxy, prepared: list[bytes], count: int) -> tuple[list[float], list[float]]:
    before = _cpu_s(proxy.pid)
    load = run_load(proxy.port, prepared, count, connections=_CONNECTIONS)
    require(not load.failed, "every request is answered", proxy=proxy.name, failed=load.failed)
    return [count / load.span_s], [(_cpu_s(proxy.pid) - before) / count * 1e6]


def _cpu_s(pid: int | None) -> float:
    """CPU seconds of a process so far, all its threads, to the nanosecond."""
    if pid is None:
        return 0.0
    # Linux's clock of another process: its id, inverted, above three bits that name the clock.
    return time.clock_gettime((~pid << 3) | 2)


def _add(all_of: Figures, seen: Figures) -> None:
    for name, values in vars(seen).items():
        getattr(all_of, name).extend(values)


def _request(session: int, size: int, *, stream: bool) -> bytes:
    """A chat completion of an agent's session, of about `size` bytes."""
    body: dict[str, Any] = {
        "model": "bench",
        "messages": [{"role": "system", "content": f"You are agent {session}. Be brief."}],
        "tools": [_tool(number) for number in range(20 if size > 10_000 else 2)],
        "max_tokens": 64,
        "stream": stream,
    }
    turn = 0
    while len(orjson.dumps(body)) < size:
        turn += 1
        text = f"Turn {turn} of session {session}. " + "The file says this and that. " * 60
        role = "user" if turn % 2 else "assistant"
        body["messages"].append({"role": role, "content": text[: max(20, min(1800, size // 4))]})
    data = orjson.dumps(body)
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: */*\r\n"
        b"user-agent: bench/1\r\nauthorization: Bearer none\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    return head % len(data) + data


def _tool(number: int) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"path": {"type": "string", "description": "Where to look."}},
        "required": ["path"],
    }
    function = {"name": f"tool_{number}", "description": "Reads.", "parameters": parameters}
    return {"type": "function", "function": function}


def _report(figures: dict[tuple[str, str], Figures], names: Sequence[str]) -> dict[str, Any]:
    report: dict[str, Any] = {"added_p50_ms_200kb": None}
    for name in ("direct", *names):
        sizes: dict[str, Any] = {}
        for size in SIZES:
            if (name, size) in figures:
                sizes[size] = _summary(figures[name, size], figures["direct", size])
        report[name] = sizes or None
    if report.get("ours"):
        report["added_p50_ms_200kb"] = report["ours"]["200kb"]["added_p50_ms"]
    return report


def _summary(seen: Figures, direct: Figures) -> dict[str, float]:
    def added_ms(ours: list[float], theirs: list[float]) -> float:
        return round((statistics.median(ours) - statistics.median(theirs)) * 1e3, 3)

    return {
        "added_p50_ms": added_ms(seen.total_s, direct.total_s),
        "added_ttft_p50_ms": added_ms(seen.first_event_s, direct.first_event_s),
        "rps": round(statistics.median(seen.rps)),
        "cpu_us_per_request": round(statistics.median(seen.cpu_us), 1),
        "streamed_rps": round(statistics.median(seen.streamed_rps)),
        "streamed_cpu_us_per_request": round(statistics.median(seen.streamed_cpu_us), 1),
    }


if __name__ == "__main__":
    main()
