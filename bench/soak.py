"""Do a node's processes or tables grow without end?

A node with two engines and two balancer processes under bench/chaos's load, without faults:
agents with growing histories in all protocols, with marks, priorities, streams and disconnects.
Beside them go requests that never come twice, each with a session, a prompt, a pin and now and
then a stored context of its own (bench/agents/strangers.py). At each sample every process's
memory (`rss_kb`) and open files, and the size of every table that the node shows: all gauges of
ours on `/metrics`, the pins, the store, and the files in the temporary directory. Slopes are by
least squares, after a warm-up, per hour. A table over its stated bound ends the run with status
1, and so does a process that ended. Answers are compared with a stock engine's, as in bench/chaos.
`--shape` and `--trace` give the agents the texts and lengths of a trace.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import psutil

from bench.agents.mixed_load import MixedLoad
from bench.agents.strangers import Strangers
from bench.faults.growth import Growth
from bench.faults.processes import NodeProcesses
from bench.faults.stage import TRACE, Stage, set_up
from bench.faults.tables import bounds, over_bound, sizes
from bench.faults.target import PROCESSES, Target
from bench.lib.pin_load import Texts
from bench.lib.script import Size, parser_of, require, run
from bench.trace.options import add_trace_options, trace_of
from sgl_ext.settings.schema import BalancerSettings, EngineSettings

_WARM_UP_SHARE = 0.25
_WARM_UP_S = 600.0
_LIMIT_S = 120.0


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    hours: float = 1
    agents: int = 12
    turns: int = 5
    sample_s: float = 10


PLANS: dict[Size, Plan] = {
    "full": Plan(),
    "quick": Plan(hours=0.05, sample_s=5),
    "smallest": Plan(0.002, 6, 2, 1),
}


class Soak:
    """One run on a running node."""

    def __init__(self, target: Target, load: MixedLoad, plan: Plan) -> None:
        span_s = plan.hours * 3600
        self.memory, self.tables = (
            Growth(min(_WARM_UP_S, _WARM_UP_SHARE * span_s)) for _ in range(2)
        )
        self.outcomes: Counter[str] = Counter()
        self.wrong = 0
        self._target = target
        self._load = load
        self._ends_s = time.monotonic() + span_s
        self._started_s = time.monotonic()
        self._sample_s = plan.sample_s
        self._bounds = bounds(BalancerSettings(), EngineSettings(), PROCESSES)

    async def run(self, http: aiohttp.ClientSession) -> None:
        """Samples until the end. Raises InvariantBroken if a bound is exceeded."""
        while time.monotonic() < self._ends_s:
            await asyncio.sleep(self._sample_s)
            at_s = time.monotonic() - self._started_s
            self.memory.add(at_s, memory_of(self._target.processes))
            found = await sizes(self._target, http)
            self.tables.add(at_s, found)
            over = list(over_bound(found, self._bounds))
            require(not over, "a table keeps its stated bound", over=over)
            self._settle()

    def _settle(self) -> None:
        """Counts the requests that have ended, and forgets them."""
        ended = [sent for sent in self._load.sent if sent.outcome is not None]
        self.outcomes.update(str(sent.outcome) for sent in ended)
        self.wrong += sum(sent.is_wrong for sent in ended)
        self._load.sent = [sent for sent in self._load.sent if sent.outcome is None]


def memory_of(processes: NodeProcesses) -> dict[str, float]:
    """Memory and open files of each process. Raises InvariantBroken if one has ended."""
    found: dict[str, float] = {}
    for process, name in processes.all.items():
        try:
            found[f"{name}, rss_kb"] = process.memory_info().rss / 1024
            found[f"{name}, open_files"] = process.num_fds()
        except psutil.NoSuchProcess:
            require(False, "every process runs to the end", process=name)
    return found


async def measure(stage: Stage, plan: Plan) -> dict[str, Any]:
    """Loads a running node for so long, and returns the figures."""
    target = stage.target
    load = MixedLoad(target.url, stage.oracle, stage.agents, _LIMIT_S)
    strangers = Strangers(target.url, target.model.name, Texts())
    soak = Soak(target, load, plan)
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        loading = [asyncio.create_task(each.run()) for each in (load, strangers)]
        try:
            await soak.run(http)
        finally:
            load.end()
            strangers.end()
            await asyncio.gather(*loading)
    for name, growth in (("memory", soak.memory), ("tables", soak.tables)):
        for series, figures in growth.figures().items():
            print(json.dumps({name: series, **figures}))
    answered = soak.outcomes["whole"]
    require(answered > 0, "the load is answered")
    require(strangers.outcomes["whole"] > 0, "requests that never come twice are answered")
    return {
        "hours": plan.hours,
        "requests": sum(soak.outcomes.values()),
        "outcomes": soak.outcomes,
        "strangers": strangers.outcomes,
        "wrong_answers": soak.wrong,
        "memory": soak.memory.figures(),
        "tables": soak.tables.figures(),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--hours", type=float, help="how long the load goes on")
    add_trace_options(parser)
    options = parser.parse_args()
    plan, trace = PLANS[options.size], trace_of(parser, options, TRACE)
    if options.hours is not None:
        plan = replace(plan, hours=options.hours)
    with ExitStack() as stack:
        stage = set_up(stack, plan.agents, plan.turns, trace, has_small_disks=False)
        run("soak", lambda: asyncio.run(measure(stage, plan)))


if __name__ == "__main__":
    main()
