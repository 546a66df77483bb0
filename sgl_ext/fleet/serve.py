"""The process that keeps a fleet on Ray: `python -m sgl_ext.fleet.serve`.

The launcher starts it, with its settings in the environment. A fleet has one such process at a
time. On SIGTERM it ends the engines, unless they shall stay; if it is killed, they go on, and the
next one adopts them. It is a process of its own because Ray ends every process that is part of a
cluster and cannot reach it for a minute: the balancer must outlive that.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable

from sgl_ext.fleet.cluster import Cluster, FleetError
from sgl_ext.fleet.keeper import STEP_S, Keeper
from sgl_ext.fleet.orders import Board
from sgl_ext.logs import write_logs
from sgl_ext.membership.gcs import Gcs
from sgl_ext.membership.member import MembershipError
from sgl_ext.node.child import FLEET_SERVES
from sgl_ext.node.lifeline import end_with_parent
from sgl_ext.settings.schema import LaunchSettings, SettingsError
from sgl_ext.supervision import supervise

log = logging.getLogger(__name__)

_KEEPER_GONE_S = 5
_pause = asyncio.sleep


async def require_no_keeper(board: Board, fleet: str) -> None:
    """Raises FleetError if the fleet has a keeper that renews its status."""
    first = await board.status()
    for _ in range(_KEEPER_GONE_S if first else 0):
        await _pause(1)
        latest = await board.status()
        if latest is None:
            return
        if latest != first:
            reason = f"a launcher keeps this fleet already: {latest.where}"
            raise FleetError(f"ray_fleet={fleet!r}: {reason}")
    await board.forget_status()


async def keep(settings: LaunchSettings) -> None:
    """Keeps a fleet until SIGTERM. Raises FleetError or MembershipError."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def heed_sigterm() -> None:
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGTERM, lambda: (hurry if stop.is_set() else stop).set()
        )

    heed_sigterm()
    fleet, address = settings.ray_fleet, settings.ray_address
    assert address is not None, "a keeper is started for a cluster alone"
    cluster = await asyncio.to_thread(Cluster, address, fleet)
    heed_sigterm()  # Ray has put a handler of its own in place, which prints a stack
    board = Board(await Gcs.connect(cluster.address), fleet)
    await require_no_keeper(board, fleet)
    keeper = await asyncio.to_thread(Keeper, settings, cluster, board)
    reporting = asyncio.create_task(keeper.report_always())
    try:
        await keeper.adopt()
        await _first_of(keeper.start(), stop.wait(), reporting)
        if not stop.is_set():
            log.info(FLEET_SERVES)
            steps = supervise("fleet", lambda task: None, keeper.step, STEP_S)
            await _first_of(steps, stop.wait(), reporting)
        if settings.ray_keep_engines:
            log.info("the engines stay: the next launch adopts them")
        else:
            await keeper.end(hurry, only_own=False)
            log.info("all engines have ended")
    except FleetError:
        if not keeper.is_replaced:
            await keeper.end(hurry, only_own=True)
        raise
    finally:
        reporting.cancel()
        if not keeper.is_replaced:
            await board.forget_status()
        cluster.close()


async def _first_of(*works: Awaitable[object]) -> None:
    """Waits until one of these ends, and cancels the coroutines among the others. Raises its
    error."""
    tasks = {asyncio.ensure_future(work): asyncio.iscoroutine(work) for work in works}
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, is_own in tasks.items():
        if is_own:
            task.cancel()
    for task in done:
        task.result()


def main() -> None:
    """Keeps the fleet of the settings in the environment. Raises SystemExit with the reason of a
    failure."""
    try:
        settings = LaunchSettings.from_environment()
        write_logs("fleet", settings.balancer.log_format, settings.balancer.log_level)
        asyncio.run(keep(settings))
    except (FleetError, MembershipError, SettingsError) as error:
        raise SystemExit(f"sgl-ext: {error}") from None


if __name__ == "__main__":
    end_with_parent()
    main()
