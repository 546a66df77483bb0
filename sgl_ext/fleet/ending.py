"""Ends engines: their processes, their actors, their entries and their placement groups."""

import asyncio
import logging
from collections.abc import Collection

from sgl_ext.fleet.cluster import Cluster, FleetError
from sgl_ext.fleet.engine_host import STOP_S
from sgl_ext.fleet.orders import Board, name_of
from sgl_ext.membership.ray import engines_key

log = logging.getLogger(__name__)

ANSWER_S = 30.0
"""How long an actor may take to answer, beside the work of the call itself."""


async def end_engines(
    cluster: Cluster,
    board: Board,
    fleet: str,
    hurry: asyncio.Event,
    numbers: Collection[int] | None = None,
) -> None:
    """Ends these engines, by default the whole fleet with what is wanted of it.

    hurry: once it is set, no engine is waited for.
    """
    ending = numbers
    if ending is None:
        ending = await asyncio.to_thread(cluster.numbers)
    limit_s = STOP_S + ANSWER_S
    tasks = [
        asyncio.create_task(remove_engine(cluster, board, fleet, number, "end", limit_s))
        for number in ending
    ]
    hurried = asyncio.create_task(hurry.wait())
    while not all(task.done() for task in tasks) and not hurried.done():
        await asyncio.wait([hurried, *tasks], return_when=asyncio.FIRST_COMPLETED)
        tasks = [task for task in tasks if not task.done()]
    for task in [hurried, *tasks]:
        task.cancel()
    if tasks:
        for number in ending:
            await _kill(cluster, board, fleet, number)
    groups = ending if numbers is not None else await asyncio.to_thread(cluster.grouped)
    await asyncio.to_thread(cluster.release, groups)
    if numbers is None:
        await board.clear()


async def remove_engine(
    cluster: Cluster, board: Board, fleet: str, number: int, method: str, limit_s: float
) -> None:
    """Calls `drain` or `end` of an engine's actor, and kills it. Its placement group stays."""
    try:
        await cluster.ask(number, method, limit_s)
    except FleetError as error:  # its node may be gone
        log.warning("%s", error)
    await _kill(cluster, board, fleet, number)


async def _kill(cluster: Cluster, board: Board, fleet: str, number: int) -> None:
    await asyncio.to_thread(cluster.kill, number)
    await board.gcs.delete(engines_key(fleet, name_of(number)))
