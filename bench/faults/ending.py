"""Faults that end the node: its launcher killed, or told to stop. It is started again."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.agents.mixed_load import Sent
from bench.faults.effect import Effect, Scene, ended, under_load, until

_ENDS_S = 90.0
_GOES_ON_S = 1.0


@asynccontextmanager
async def launcher_killed(scene: Scene) -> AsyncIterator[Effect]:
    """kill -9 of the launcher. Every process ends with it, and so do all answers."""
    await under_load(scene)
    launcher = scene.target.processes.launcher
    launcher.kill()
    scene.load.open.clear()
    effect = Effect(time.monotonic(), dies_with=lambda sent: True, ends_node=True)
    scene.target.node.process.wait()
    await ended([launcher])
    await asyncio.sleep(1)
    yield effect


@asynccontextmanager
async def sigterm(scene: Scene) -> AsyncIterator[Effect]:
    """SIGTERM to the launcher: running requests end, new ones are refused until they have."""
    async with _told_to_stop(scene, signal.SIGTERM) as effect:
        yield effect


@asynccontextmanager
async def sighup(scene: Scene) -> AsyncIterator[Effect]:
    """SIGHUP to the launcher, as from a terminal that closes: it may go on, or stop as at
    SIGTERM."""
    async with _told_to_stop(scene, signal.SIGHUP) as effect:
        yield effect


@asynccontextmanager
async def _told_to_stop(scene: Scene, number: signal.Signals) -> AsyncIterator[Effect]:
    await under_load(scene)
    process = scene.target.node.process
    at_work = list(scene.load.running)
    process.send_signal(number)
    struck_s = time.monotonic()

    def is_drained() -> bool:
        return not any(sent.outcome is None for sent in at_work)

    def is_after_drain(sent: Sent) -> bool:
        """It came to a node that refuses it, or that has ended."""
        ended_s = max(each.reply.ended_s for each in at_work)
        is_new = sent.reply.sent_s > struck_s
        return is_new and (sent.outcome == "refused" or sent.reply.sent_s > ended_s)

    await until(is_drained, "requests under way at a signal end in some way", _ENDS_S)
    await asyncio.sleep(_GOES_ON_S)
    if number is signal.SIGTERM or not await scene.target.serves(scene.http):
        scene.load.open.clear()
        await until(lambda: process.poll() is not None, "a node that stops ends", _ENDS_S)
    has_ended = process.poll() is not None
    notes: dict[str, object] = {"ended": has_ended, "exit_status": process.poll()}
    yield Effect(
        struck_s,
        dies_with=is_after_drain if has_ended else _never,
        ends_node=has_ended,
        notes=notes,
    )


def _never(sent: Sent) -> bool:
    return False
