"""Faults of processes: killed, or stopped and continued."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
from sgl_ext_cpu.engine_processes import EngineProcesses

from bench.agents.mixed_load import Sent
from bench.faults.effect import Effect, Scene, ended, under_load, until
from bench.faults.processes import client_ports
from bench.lib.script import require

# The balancer's promise: no event for a minute, and no token in half a minute more.
_HANG_S = 95.0
_AT_WORK_S = 60.0
# So many requests at once that their retries are no small share of all requests.
_BURST, _BURST_S = 150, 60.0
_SPREAD_S = 0.5
_SOME, _MANY = 2, 8


@asynccontextmanager
async def engine_killed(scene: Scene) -> AsyncIterator[Effect]:
    """kill -9 of an engine's first process, which serves HTTP."""
    async with _killed_of_engine(scene, 0, "http") as effect:
        yield effect


@asynccontextmanager
async def scheduler_killed(scene: Scene) -> AsyncIterator[Effect]:
    """kill -9 of an engine's scheduler."""
    async with _killed_of_engine(scene, 1, "scheduler") as effect:
        yield effect


@asynccontextmanager
async def detokenizer_killed(scene: Scene) -> AsyncIterator[Effect]:
    """kill -9 of an engine's detokenizer."""
    async with _killed_of_engine(scene, 0, "detokenizer") as effect:
        yield effect


@asynccontextmanager
async def _killed_of_engine(scene: Scene, number: int, part: str) -> AsyncIterator[Effect]:
    engine = scene.target.processes.engines[number]
    victim: psutil.Process = getattr(engine, part)
    burst = asyncio.create_task(scene.load.burst(_BURST, _BURST, _BURST_S))
    await asyncio.sleep(_SPREAD_S)
    had = await _at_work(scene, engine, _MANY)
    victim.kill()
    effect = Effect(time.monotonic(), deaths=_processes(engine))
    effect.notes["engine_had"] = had
    await ended([victim])
    effect.ended_s = effect.struck_s
    await burst
    yield effect


@asynccontextmanager
async def balancer_process_killed(scene: Scene) -> AsyncIterator[Effect]:
    """kill -9 of one of the balancer's processes. Its own connections die with it."""
    processes = scene.target.processes
    port = int(scene.target.url.rpartition(":")[2])
    victim, *others = processes.balancers

    def has_requests() -> bool:
        theirs = client_ports(victim, port)
        return any(sent.reply.port in theirs and sent.relays for sent in scene.load.running)

    await until(has_requests, "load is in flight at the fault")
    kept = {client for other in others for client in client_ports(other, port)}
    victim.kill()
    struck_s = time.monotonic()
    await ended([victim])
    gone_s = time.monotonic()  # until then it may have been given connections

    def dies_with(sent: Sent) -> bool:
        return sent.reply.sent_s <= gone_s and sent.reply.port not in kept

    yield Effect(struck_s, struck_s, [victim], dies_with)


@asynccontextmanager
async def scheduler_stopped(scene: Scene) -> AsyncIterator[Effect]:
    """SIGSTOP of a scheduler, and SIGCONT later. The engine goes on taking requests, until the
    balancer finds that it hangs."""
    engine = scene.target.processes.engines[1]
    await _at_work(scene, engine, _SOME)
    engine.scheduler.suspend()
    effect = Effect(time.monotonic(), hung_after_s=_HANG_S)
    try:
        await asyncio.sleep(scene.stop_s)
        state = engine.scheduler.status() if engine.scheduler.is_running() else "ended"
        if state not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            effect.deaths = _processes(engine)  # the node may replace what hangs
            effect.notes["stopped_scheduler"] = state
        yield effect
    finally:
        if engine.scheduler.is_running():
            engine.scheduler.resume()
        effect.ended_s = time.monotonic()


async def _at_work(scene: Scene, engine: EngineProcesses, least: int) -> int:
    """Returns while the engine has so many requests; how many."""
    await under_load(scene)
    deadline = time.monotonic() + _AT_WORK_S
    while (found := await _in_flight(scene, engine)) < least:
        require(time.monotonic() < deadline, "an engine has requests at its fault")
    require(engine.http.is_running(), "an engine runs until its fault")
    return found


async def _in_flight(scene: Scene, engine: EngineProcesses) -> int:
    workers = await scene.target.workers(scene.http)
    return max((w["in_flight"] for w in workers if w["url"] == engine.url), default=0)


def _processes(engine: EngineProcesses) -> list[psutil.Process]:
    return [engine.http, engine.scheduler, engine.detokenizer]
