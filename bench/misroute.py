"""How often is a request routed to a worker for a prefix that the worker no longer holds?

Real engines with small caches, and conversations that share a system prompt and grow
(bench/lib/misroute/load.py), or those of a trace (`--shape`, `--trace`). Phases:

    pressure    more conversations than fit the caches, so the engines evict all the time
    flush_all   every engine is flushed, through the balancer
    flush_one   one engine is flushed directly; only its events tell the balancer
    kill        kill -9 of one engine's process group; the launcher starts it again
    returned    that engine is ready again

The request log's predictions are compared with what the engines reported, and with the engines'
events, which this process reads too (bench/lib/misroute/judge.py). `misrouted_share` leaves out
changes within a second of a request's arrival and changes while it waited in the engine's own
queue; `mispredicted_share` leaves out nothing. `lost_before_first_byte` counts requests that
failed before any of their answer was sent; `cut_after_first_byte` counts streams that a killed
engine cut. SGLang flushes only when it is idle: a flush that was refused is sent again while new
requests are held back.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from sgl_ext_cpu.node import Node, local_model, running_node

from bench.lib.misroute.events import Diary
from bench.lib.misroute.figures import Done, counted, figures
from bench.lib.misroute.judge import LAG_S, read_log
from bench.lib.misroute.load import Load
from bench.lib.script import Size, parser_of, precondition, require, run
from bench.trace.agents import Agent, TraceConfig
from bench.trace.options import add_trace_options, trace_of
from bench.trace.variants import make_trace

_ENGINE_FLAGS = ("--chunked-prefill-size", "2048")
# Of the small caches a long history fills about half.
_TRACE = TraceConfig(sessions=200, scale=0.003, pace=4)
_RETURN_S = 240.0
_LOOK_S = 0.05
_IDLE_S = 4
_HELD_BACK_S = 30


@dataclass(frozen=True)
class Plan:
    """How much of everything. Times in seconds."""

    instances: int = 3
    sessions: int = 40
    think_s: float = 2.5
    pressure_s: float = 180
    flushes: int = 10
    flush_every_s: float = 6
    kills: int = 3
    returned_s: float = 30
    pool_tokens: int = 16_384


PLANS: dict[Size, Plan] = {
    "full": Plan(),
    "quick": Plan(2, 28, 2.5, 40, 3, 5, 1, 15),
    "smallest": Plan(2, 10, 0.5, 4, 1, 1, 1, 2, 8_192),
}


class Trial:
    """One run on a running node."""

    def __init__(self, node: Node, plan: Plan, load: Load, http: aiohttp.ClientSession) -> None:
        self.done = Done()
        self.diary = Diary()
        self._node = node
        self._plan = plan
        self._load = load
        self._http = http

    async def run(self) -> None:
        """All phases under load, then until the last answer is there."""
        plan, load = self._plan, self._load
        listening = asyncio.create_task(self.diary.listen(self._node.engines))
        load.phase = "pressure"
        loading = asyncio.create_task(load.run())
        await asyncio.sleep(plan.pressure_s)
        load.phase = "flush_all"
        for _ in range(plan.flushes):
            await self._flush(self._node.url, self._node.engines)
            await asyncio.sleep(plan.flush_every_s)
        load.phase = "flush_one"
        for number in range(plan.flushes):
            engine = self._node.engines[number % plan.instances]
            await self._flush(engine, [engine])
            await asyncio.sleep(plan.flush_every_s)
        for number in range(plan.kills):
            load.phase = "kill"
            await self._kill(self._node.engines[number % plan.instances])
            load.phase = "returned"
            await self._until(engine, lambda worker: worker["in_flight"] >= 1)
            await asyncio.sleep(plan.returned_s)
        load.end()
        await loading
        for engine in self._node.engines:
            self.done.evicted_tokens += await self._evicted(engine)
        await asyncio.sleep(2)  # the log is flushed once a second
        listening.cancel()

    async def _flush(self, url: str, engines: Sequence[str]) -> None:
        for wait_s in (_IDLE_S, _HELD_BACK_S):
            if wait_s == _HELD_BACK_S:
                self._load.open.clear()
            async with self._http.post(f"{url}/flush_cache", params={"timeout": wait_s}) as answer:
                text, answered_s = await answer.text(), time.time()
            self._load.open.set()
            if answer.status == 200:
                break
        else:
            raise RuntimeError(f"{url} was not flushed: {text}")
        self.done.flushes += 1
        await asyncio.sleep(LAG_S)
        for engine in engines:
            heard_s = max(self.diary.cleared[engine], default=0.0)
            self.done.flush_lags_ms.append((heard_s - answered_s) * 1000)

    async def _kill(self, engine: str) -> None:
        """Kills an engine in the middle of its work, and returns once it takes requests again."""
        self.done.evicted_tokens += await self._evicted(engine)
        group = engine_group(self._node.process.pid, engine)
        await self._until(engine, lambda worker: worker["in_flight"] >= 2)
        os.killpg(group, signal.SIGKILL)
        killed_s = time.time()
        self.done.kills.append((killed_s, engine))
        await asyncio.sleep(3 * LAG_S)
        await self._until(engine, lambda worker: bool(worker["ready"]))
        self.done.down_s.append(round(time.time() - killed_s, 1))

    async def _until(self, engine: str, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Waits until the balancer's view of an engine meets a condition."""
        deadline = time.monotonic() + _RETURN_S
        while time.monotonic() < deadline:
            async with self._http.get(f"{self._node.url}/sgl_ext/workers") as answer:
                workers = (await answer.json())["workers"]
            if any(holds(worker) for worker in workers if worker["url"] == engine):
                return
            await asyncio.sleep(_LOOK_S)
        raise RuntimeError(f"{engine} did not reach that state in {_RETURN_S:g} s")

    async def _evicted(self, engine: str) -> float:
        async with self._http.get(f"{engine}/metrics") as answer:
            return sum(counted(await answer.text(), "sglang:evicted_tokens_total").values())


def engine_group(launcher: int, engine: str) -> int:
    """The process group of the launcher's engine at this URL."""
    port = engine.rpartition(":")[2]
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        if ("--port", port) in pairwise(words) and os.getpgid(int(child)) == int(child):
            return int(child)
    raise RuntimeError(f"{engine} is not a child of the launcher")


async def measure(
    node: Node, plan: Plan, log: Path, model: str, agents: Sequence[Agent]
) -> dict[str, Any]:
    """Runs all phases on a running node that logs its requests to `log`; `agents` of a trace."""
    load = Load(node.url, model, sessions=plan.sessions, think_s=plan.think_s, seed=1, trace=agents)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        trial = Trial(node, plan, load, http)
        await trial.run()
        async with http.get(f"{node.url}/metrics") as answer:
            page = await answer.text()
    lines = read_log(log, load.sent, node.engines)
    found = figures(trial.done, trial.diary, load.sent, lines, page)
    require(found["requests"] > 0, "requests are answered and judged")
    is_full = found["evicted_tokens"] > 0
    precondition(is_full, "what sessions share does not fit the engines' caches")
    require(found["event_lines"] > 0, "this process hears the engines' events")
    heard_ms = min(trial.done.flush_lags_ms)
    require(heard_ms > -60_000, "every flush is among the events that engines send")
    require(found["requests_after_return"] > 0, "an engine that returns is sent requests again")
    return found


def main() -> None:
    parser = parser_of(__doc__)
    add_trace_options(parser)
    options = parser.parse_args()
    plan, trace = PLANS[options.size], trace_of(parser, options, _TRACE)
    agents = make_trace(trace) if trace else ()
    model = local_model("tiny")
    with tempfile.TemporaryDirectory(prefix="sgl-ext-bench-") as folder:
        log = Path(folder) / "requests.jsonl"
        flags = ("--instances", str(plan.instances), "--request-log", str(log), *_ENGINE_FLAGS)
        pool = ("--max-total-tokens", str(plan.pool_tokens))
        with running_node(model, Path(folder), *flags, *pool) as node:
            run("misroute", lambda: asyncio.run(measure(node, plan, log, model.name, agents)))


if __name__ == "__main__":
    main()
