"""What does the endpoint picker add to a request's time behind Envoy?

One Envoy stands in front of two workers that answer at once. It has a listener for each arm:

    direct   Envoy chooses the worker itself
    picked   Envoy asks the picker, which sees the answers, too (response_body_mode:
             FULL_DUPLEX_STREAMED, as the Gateway API asks)
    hidden   Envoy asks the picker, and sends answers on by itself (response_body_mode: NONE)

The picker has a core of its own; Envoy, the workers and the load generator share another. A round
visits every arm, in an order that rotates. Bodies are those of an agent, 16 sessions in turn. For
bodies of 2 KB, 220 KB and 1 MB, each figure with the spread of its rounds:

    p50_ms, p99_ms            whole answers, one connection; p99 is of all rounds together
    added_p50_ms              less `direct` of the same round; added_p99_ms of all rounds
    rps                       whole answers per second, many connections
    picker_cpu_us, envoy_cpu_us   CPU time (user and system) for each of them
    streamed_rps              the same for answers of ten events

What llm-d's picker does, by its own issues: about 480 requests per second at its best, and more
than a second at prompts of 220 KB.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import requests
from sgl_ext_cpu.envoy import Config, configured, install_envoy, listener_of, running_envoy
from sgl_ext_cpu.node import free_port, is_healthy, running_process

from bench.lib.agent_request import agent_request
from bench.lib.load import run_load
from bench.lib.responding import cpu_s, running_responder
from bench.lib.script import Size, parser_of, require, run
from bench.lib.spread import spread

ARMS = ("direct", "picked", "hidden")
SIZES = {"2kb": 2_000, "220kb": 220_000, "1mb": 1 << 20}
_SESSIONS = 16
_CONNECTIONS = 32
_PICKER_CORE = {0}
_OTHER_CORE = {1}


@dataclass(frozen=True)
class Plan:
    """How many rounds, and requests of each size in a visit."""

    rounds: int
    requests: dict[str, int]


PLANS: dict[Size, Plan] = {
    "full": Plan(6, {"2kb": 1200, "220kb": 300, "1mb": 120}),
    "quick": Plan(3, {"2kb": 600, "220kb": 120, "1mb": 60}),
    "smallest": Plan(1, {"2kb": 32, "220kb": 16, "1mb": 8}),
}


@dataclass
class Seen:
    """What the rounds saw of one arm at one size: one list of times and one value a round."""

    alone_s: list[list[float]] = field(default_factory=list)
    rps: list[float] = field(default_factory=list)
    streamed_rps: list[float] = field(default_factory=list)
    picker_cpu_us: list[float] = field(default_factory=list)
    envoy_cpu_us: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Gateway:
    """The running Envoy and picker. ports: Envoy's, by arm."""

    ports: dict[str, int]
    envoy: int
    picker: int
    picker_url: str


def main() -> None:
    options = parser_of(__doc__).parse_args()
    run("epp", partial(compare, PLANS[options.size]))


def compare(plan: Plan) -> dict[str, Any]:
    """The figures of all arms."""
    install_envoy()
    os.sched_setaffinity(0, _OTHER_CORE)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        gateway = stack.enter_context(_running(folder))
        seen: dict[tuple[str, str], Seen] = defaultdict(Seen)
        for number in range(-1, plan.rounds):  # the first one warms up
            turn = (number + 1) % len(ARMS)
            for size, count in plan.requests.items():
                for arm in ARMS[turn:] + ARMS[:turn]:
                    one = seen[arm, size] if number >= 0 else Seen()
                    _visit(gateway, arm, size, count, one)
        homes = _metric(gateway.picker_url, 'sgl_ext_placements_total{reason="home"}')
        moved = _metric(gateway.picker_url, 'sgl_ext_placements_total{reason="moved"}')
        require(homes > 0, "sessions are known to the picker")
        figures = {size: _figures(seen, size) for size in SIZES}
    picked = {size: figures[size]["picked"] for size in SIZES}
    return {
        **{f"added_p50_ms_{size}": picked[size]["added_p50_ms"]["median"] for size in SIZES},
        **{f"rps_{size}": picked[size]["rps"]["median"] for size in SIZES},
        "placed_at_home": homes,
        "moved": moved,
        **figures,
    }


@contextmanager
def _running(folder: Path) -> Iterator[Gateway]:
    with ExitStack() as stack:
        workers = [stack.enter_context(running_responder(folder, _OTHER_CORE)) for _ in range(2)]
        port, picker_port = free_port(), free_port()
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "sgl_ext.epp", "--port", str(port)]
        command += ["--picker-port", str(picker_port)]
        for worker in workers:
            command += ["--worker", worker]
        picker = stack.enter_context(
            running_process(
                command, folder / "picker.log", partial(is_healthy, url), cores=_PICKER_CORE
            )
        )
        config, ports = _listeners(picker_port, [int(w.rpartition(":")[2]) for w in workers])
        envoy = stack.enter_context(running_envoy(config, cores=_OTHER_CORE))
        yield Gateway(ports, envoy.process.pid, picker.pid, url)


def _listeners(picker_port: int, engine_ports: list[int]) -> tuple[Config, dict[str, int]]:
    """Envoy's configuration with a listener for each arm, and their ports."""
    config = configured(picker_port, engine_ports)
    listeners, ports = [], {}
    for arm in ARMS:
        listener = deepcopy(listener_of(config))
        listener["name"] = arm
        ports[arm] = listener["address"]["socket_address"]["port_value"] = free_port()
        (only,) = (each for chain in listener["filter_chains"] for each in chain["filters"])
        filters = only["typed_config"]["http_filters"]
        if arm == "direct":
            del filters[0]
        elif arm == "hidden":
            filters[0]["typed_config"]["processing_mode"]["response_body_mode"] = "NONE"
        listeners.append(listener)
    config["static_resources"]["listeners"] = listeners
    return config, ports


def _visit(gateway: Gateway, arm: str, size: str, count: int, seen: Seen) -> None:
    whole, streamed = _requests(size, stream=False), _requests(size, stream=True)
    port = gateway.ports[arm]
    alone = run_load(port, whole, count // 2, connections=1)
    before = cpu_s(gateway.picker), cpu_s(gateway.envoy)
    many = run_load(port, whole, count, connections=_CONNECTIONS)
    after = cpu_s(gateway.picker), cpu_s(gateway.envoy)
    events = run_load(port, streamed, count, connections=_CONNECTIONS)
    failed = alone.failed + many.failed + events.failed
    require(not failed, "every request is answered", arm=arm, size=size, failed=failed)
    seen.alone_s.append(alone.total_s)
    seen.rps.append(count / many.span_s)
    seen.streamed_rps.append(count / events.span_s)
    seen.picker_cpu_us.append((after[0] - before[0]) / count * 1e6)
    seen.envoy_cpu_us.append((after[1] - before[1]) / count * 1e6)


@cache
def _requests(size: str, *, stream: bool) -> list[bytes]:
    return [agent_request(n, SIZES[size], stream=stream) for n in range(_SESSIONS)]


def _figures(seen: dict[tuple[str, str], Seen], size: str) -> dict[str, Any]:
    return {arm: _summary(seen[arm, size], seen["direct", size], arm) for arm in ARMS}


def _summary(seen: Seen, direct: Seen, arm: str) -> dict[str, Any]:
    medians, least = ([1e3 * statistics.median(s) for s in of.alone_s] for of in (seen, direct))
    p99, p99_direct = _p99_ms(seen), _p99_ms(direct)
    found: dict[str, Any] = {
        "p50_ms": spread(medians, 2),
        "p99_ms": round(p99, 2),
        "rps": spread(seen.rps, 0),
        "streamed_rps": spread(seen.streamed_rps, 0),
        "envoy_cpu_us": spread(seen.envoy_cpu_us, 0),
    }
    if arm != "direct":
        added = [one - other for one, other in zip(medians, least, strict=True)]
        found["added_p50_ms"] = spread(added, 2)
        found["added_p99_ms"] = round(p99 - p99_direct, 2)
        found["picker_cpu_us"] = spread(seen.picker_cpu_us, 0)
    return found


def _p99_ms(seen: Seen) -> float:
    values = [value for each in seen.alone_s for value in each]
    return 1e3 * statistics.quantiles(values, n=100, method="inclusive")[98]


def _metric(url: str, series: str) -> float:
    page = requests.get(f"{url}/metrics", timeout=30).text
    lines = (line for line in page.splitlines() if line.startswith(series))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


if __name__ == "__main__":
    main()
