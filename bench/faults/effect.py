"""What a fault does by itself, that the node is not to blame for, and waits that faults share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import aiohttp
import psutil

from bench.agents.mixed_load import MixedLoad, Sent
from bench.faults.target import Target
from bench.lib.script import require

_LOOK_S = 0.02
_LIMIT_S = 60.0


@dataclass
class Effect:
    """The consequences of a fault that has struck.

    struck_s, ended_s: when it began and ended; None: it is not over.
    deaths: processes that ended with it. dies_with: whether a request could not outlive the
    process that had its connection. ends_node: the node is started again afterwards.
    hung_after_s: from which wait on a request counts as lost, though it was answered later.
    """

    struck_s: float
    ended_s: float | None = None
    deaths: Collection[psutil.Process] = ()
    dies_with: Callable[[Sent], bool] = lambda sent: False
    ends_node: bool = False
    hung_after_s: float = 30.0
    notes: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Scene:
    """Where a fault takes place. hold_s: how long one lasts that has an end; stop_s: how long a
    process stands still. http: a client for what the node says of itself."""

    target: Target
    load: MixedLoad
    http: aiohttp.ClientSession
    hold_s: float
    stop_s: float


async def under_load(scene: Scene, *, at_least: int = 4) -> None:
    """Returns while so many requests are under way and one of them is being answered."""

    def is_loaded() -> bool:
        running = scene.load.running
        return len(running) >= at_least and any(sent.relays for sent in running)

    await until(is_loaded, "load is in flight at the fault")


async def until(holds: Callable[[], bool], invariant: str, limit_s: float = _LIMIT_S) -> None:
    """Returns once it holds. Raises InvariantBroken if that takes longer than the limit."""
    deadline = time.monotonic() + limit_s
    while not holds():
        require(time.monotonic() < deadline, invariant)
        await asyncio.sleep(_LOOK_S)


async def ended(processes: Collection[psutil.Process]) -> None:
    """Returns once these have ended. Raises InvariantBroken if one does not."""
    await until(lambda: not any(map(_runs, processes)), "a killed process has ended")


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
