"""What does the balancer add to a request's time, compared with other proxies?

One worker answers at once. Proxies stand in front of it one at a time, each pinned to a core of
its own; the worker and the load generator share another core. A round visits every proxy, and
the worker itself (`direct`), in an order that rotates. Bodies are those of an agent: tools, a
long system prompt, a history, 16 sessions in turn; a body of 300 bytes has no tools. Reported for
bodies of 300 B, 2 KB and 200 KB, each as the median, least and most of the rounds:

    added_p50_ms         median time of a whole answer less that of `direct`, one connection
    added_ttft_p50_ms    the same for the first event of a streamed answer
    rps                  whole answers per second, many connections
    cpu_us_per_request   the proxy's CPU time (user and system) for each of them
    streamed_rps, streamed_cpu_us_per_request   the same for answers of ten events

At the top are our CPU times, and whether we are first among the routers in every column: nginx
reads no body, so it shows what moving the bytes costs. A proxy that is not available is null. The
load generator and the worker limit `rps` too: see `direct`.

    --profile    prints where a request's CPU time goes in our process, instead
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from sgl_ext_cpu.node import running_balancer

from bench.lib.agent_request import agent_request
from bench.lib.load import run_load
from bench.lib.other_routers import install_nginx, running_peer
from bench.lib.proxy_profile import profile
from bench.lib.responding import cpu_s, running_responder
from bench.lib.script import Size, parser_of, require, run
from bench.lib.spread import Spread, spread

SIZES = {"300b": 300, "2kb": 2_000, "200kb": 200_000}
_SESSIONS = 16
_CONNECTIONS = 32
_PROXY_CORE = {0}
_OTHER_CORE = {1}
_ROUTERS = {"sglang_router": "sglang-router", "smg": "smg", "vllm_router": "vllm-router"}
_PEERS = {**_ROUTERS, "nginx": "nginx"}
# The columns that routers are ranked by, and whether the least of one is best.
_COLUMNS = {"cpu_us_per_request": True, "streamed_cpu_us_per_request": True}
_COLUMNS |= {"added_ttft_p50_ms": True, "rps": False, "streamed_rps": False}


@dataclass(frozen=True)
class Proxy:
    """One that is measured; `direct` has no process that counts."""

    name: str
    port: int
    pid: int | None


@dataclass
class Figures:
    """What the rounds saw of one proxy at one size, one value a round."""

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
    parser.add_argument("--profile", action="store_true", help="only where our CPU time goes")
    options = parser.parse_args()
    if options.profile:
        run("proxy", partial(show_profile, PLANS[options.size]))
        return
    plan = PLANS[options.size]
    if options.rounds:
        plan = replace(plan, rounds=options.rounds)
    run("proxy", partial(compare, plan, options.only or plan.proxies))


def compare(plan: Plan, names: Sequence[str]) -> dict[str, Any]:
    """The figures of the worker and of these proxies in front of it."""
    os.sched_setaffinity(0, _OTHER_CORE)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        worker = stack.enter_context(running_responder(folder))
        proxies = [Proxy("direct", _port(worker), None)]
        for name in names:
            proxy = _started(stack, name, worker, folder)
            if proxy is not None:
                proxies.append(proxy)
        figures = _measure(proxies, plan)
    return _report(figures, names)


def show_profile(plan: Plan) -> dict[str, Any]:
    """CPU microseconds of a request, by what they are for, as a table and as figures."""
    total = compare(replace(plan, rounds=max(plan.rounds // 2, 1)), ["ours"])["ours"]
    profiles = {}
    for size, target in SIZES.items():
        requests = [agent_request(session, target, stream=False) for session in range(_SESSIONS)]
        steps = profile(requests, 10 * plan.requests if target < 10_000 else plan.requests)
        whole = total[size]["cpu_us_per_request"]["median"]
        steps["sockets and event loop"] = whole - sum(steps.values())
        profiles[size] = {**steps, "all": whole}
    print(f"| microseconds of CPU time | {' | '.join(profiles)} |\n|{'---|' * (len(profiles) + 1)}")
    for step in profiles["300b"]:
        cells = [f"{profiles[size][step]:.0f}" for size in profiles]
        print(f"| {step} | {' | '.join(cells)} |")
    return {size: {k: round(v, 1) for k, v in each.items()} for size, each in profiles.items()}


def _started(stack: ExitStack, name: str, worker: str, folder: Path) -> Proxy | None:
    """The proxy in front of the worker, for as long as the stack; None if it is not available."""
    try:
        if name == "nginx":
            install_nginx()
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


def _measure(proxies: list[Proxy], plan: Plan) -> dict[tuple[str, str], Figures]:
    figures: dict[tuple[str, str], Figures] = defaultdict(Figures)
    for size, target in SIZES.items():
        whole = [agent_request(session, target, stream=False) for session in range(_SESSIONS)]
        streamed = [agent_request(session, target, stream=True) for session in range(_SESSIONS)]
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
    figures.total_s = [statistics.median(alone.total_s)]
    alone_streamed = run_load(proxy.port, streamed, many // 4, connections=1)
    figures.first_event_s = [statistics.median(alone_streamed.first_byte_s)]
    figures.rps, figures.cpu_us = _saturate(proxy, whole, many)
    figures.streamed_rps, figures.streamed_cpu_us = _saturate(proxy, streamed, many // 2)
    failed = alone.failed + alone_streamed.failed
    require(not failed, "every request is answered", proxy=proxy.name, failed=failed)
    return figures


def _saturate(proxy: Proxy, prepared: list[bytes], count: int) -> tuple[list[float], list[float]]:
    before = cpu_s(proxy.pid)
    load = run_load(proxy.port, prepared, count, connections=_CONNECTIONS)
    require(not load.failed, "every request is answered", proxy=proxy.name, failed=load.failed)
    return [count / load.span_s], [(cpu_s(proxy.pid) - before) / count * 1e6]


def _add(all_of: Figures, seen: Figures) -> None:
    for name, values in vars(seen).items():
        getattr(all_of, name).extend(values)


def _report(figures: dict[tuple[str, str], Figures], names: Sequence[str]) -> dict[str, Any]:
    proxies: dict[str, Any] = {}
    for name in ("direct", *names):
        sizes: dict[str, Any] = {}
        for size in SIZES:
            if (name, size) in figures:
                sizes[size] = _summary(figures[name, size], figures["direct", size])
        proxies[name] = sizes or None
    ours = proxies.get("ours")
    behind = _behind(proxies) if ours else {}
    return {
        "ours_cpu_us_300b": ours and ours["300b"]["cpu_us_per_request"]["median"],
        "ours_cpu_us_200kb": ours and ours["200kb"]["cpu_us_per_request"]["median"],
        "first_in_every_column": ours and not behind,
        "behind": behind,
        "added_p50_ms_200kb": ours and ours["200kb"]["added_p50_ms"]["median"],
        **proxies,
    }


def _behind(proxies: dict[str, Any]) -> dict[str, list[str]]:
    """For each column in which a router's median is better than ours, these routers."""
    behind: dict[str, list[str]] = defaultdict(list)
    for router in _ROUTERS:
        for size, theirs in (proxies.get(router) or {}).items():
            for column, is_least in _COLUMNS.items():
                of_ours = proxies["ours"][size][column]["median"]
                of_theirs = theirs[column]["median"]
                if of_theirs < of_ours if is_least else of_theirs > of_ours:
                    behind[f"{column} {size}"].append(router)
    return dict(behind)


def _summary(seen: Figures, direct: Figures) -> dict[str, Spread]:
    def added_ms(ours: list[float], theirs: list[float]) -> Spread:
        return spread([(one - other) * 1e3 for one, other in zip(ours, theirs, strict=True)])

    return {
        "added_p50_ms": added_ms(seen.total_s, direct.total_s),
        "added_ttft_p50_ms": added_ms(seen.first_event_s, direct.first_event_s),
        "rps": spread(seen.rps, 0),
        "cpu_us_per_request": spread(seen.cpu_us, 1),
        "streamed_rps": spread(seen.streamed_rps, 0),
        "streamed_cpu_us_per_request": spread(seen.streamed_cpu_us, 1),
    }


if __name__ == "__main__":
    main()
