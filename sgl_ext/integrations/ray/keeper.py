"""The process that keeps a fleet on Ray: `python -m sgl_ext.integrations.ray.keeper`.

Once a second it looks at the engines, creates and drains some.

The launcher starts it, with its settings in the environment. A fleet has one such process at a
time. On SIGTERM it ends the engines, unless they shall stay; if it is killed, they go on, and the
next one adopts them. It is a process of its own because Ray ends every process that is part of a
cluster and cannot reach it for a minute: the balancer must outlive that.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Mapping
from typing import Any, NoReturn

from msgspec.structs import replace

from sgl_ext.integrations.ray.cluster import (
    ANSWER_S,
    Cluster,
    FleetError,
    end_engines,
    remove_engine,
)
from sgl_ext.integrations.ray.engine_host import STOP_S
from sgl_ext.integrations.ray.plan import (
    Board,
    Engine,
    Status,
    Wanted,
    is_settled,
    make_order,
    name_of,
    next_steps,
    number_of,
)
from sgl_ext.integrations.ray.source import Entry, Gcs, decoded, engines_key
from sgl_ext.logs import write_logs
from sgl_ext.membership.member import MembershipError
from sgl_ext.node.child import FLEET_SERVES
from sgl_ext.node.hardware import named_platform
from sgl_ext.process import end_with_parent
from sgl_ext.settings.schema import LaunchSettings, SettingsError
from sgl_ext.settings.secrets import EngineSecret
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


STEP_S = 1.0
"""The time between two looks at the fleet."""
_RETRY_S = 10.0
# A balancer finds a new engine ready within this time: until then the next one is not drained.
_SETTLES_S = 5.0


class Keeper:
    """Creates and drains the engines of one fleet.

    is_replaced: another keeper has taken over, which one that stood still for long can meet.
    """

    def __init__(self, settings: LaunchSettings, cluster: Cluster, board: Board) -> None:
        self._instances = settings.instances
        self._drain_s = settings.ray_drain_s
        self._fleet = settings.ray_fleet
        self._cluster = cluster
        self._board = board
        self._order = make_order(
            settings,
            named_platform(settings),
            "\n".join(EngineSecret(settings.balancer.engine_secret).accepted) or None,
        )
        self._where = f"{socket.gethostname()}, process {os.getpid()}"
        self._renewal = 0
        self.is_replaced = False
        self._problem = self._no_room = ""
        self._refused: Wanted | None = None
        self._failed: dict[int, str] = {}
        self._settled: Wanted | None = None
        self._has_settled = False
        self._retry_at_s = 0.0
        self._created: dict[int, Any] = {}
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._ready_since: dict[int, tuple[str, float]] = {}
        self._shown: dict[int, str] = {}
        self._count = ""

    async def adopt(self) -> None:
        """Takes the fleet over as it is. What is wanted of it are the engines of this launch, or
        of a later `scale` if this process was started again."""
        wanted = await self._board.wanted() or Wanted(instances=self._instances)
        launch = f"{socket.gethostname()}, process {os.getppid()}"
        # Then what is missing is no failed start.
        self._has_settled = wanted.launch == launch
        if not self._has_settled:
            wanted = replace(wanted, instances=self._instances, launch=launch)
        await self._board.want(wanted)
        running = await asyncio.to_thread(self._cluster.numbers)
        stray = set(await asyncio.to_thread(self._cluster.grouped)) - {*running}
        await asyncio.to_thread(self._cluster.release, stray - {*range(wanted.instances)})
        entries = await self._entries()
        other = [n for n in running if n in entries and entries[n].settings != self._order.digest]
        if running:
            log.info("adopted %s", ", ".join(map(name_of, running)))
        if other:
            log.warning(
                "%s run with other settings than this launch; replace them one after another: "
                "python -m sgl_ext.fleet restart",
                ", ".join(map(name_of, other)),
            )

    async def start(self) -> None:
        """Returns once the fleet is as wanted. Raises FleetError if it cannot be."""
        while self._settled is None:
            await self.step()
            await asyncio.sleep(STEP_S)
        self._has_settled = True

    async def step(self) -> None:
        """Looks at the fleet, and takes the next steps."""
        wanted = await self._board.wanted()
        if wanted is None:
            raise FleetError("what is wanted of the fleet is missing in Ray's GCS")
        numbers = await asyncio.to_thread(self._cluster.numbers)
        entries = await self._entries()
        self._show({number: entries.get(number) for number in numbers})
        self._problem = self._find_problem(entries)
        engines = [self._engine(number, entries.get(number)) for number in numbers]
        steps = next_steps(wanted.instances, wanted.generation, engines)
        for number in steps.drain:
            if number not in self._leaving:
                self._leaving[number] = asyncio.create_task(self._remove(number))
        if missing := [number for number in steps.create if number not in self._leaving]:
            await self._create(missing, wanted)
        else:
            self._no_room, self._refused = "", None
        self._show_count(sum(engine.ready for engine in engines), wanted.instances)
        settled = not self._leaving and is_settled(wanted.instances, wanted.generation, engines)
        self._settled = wanted if settled else None

    async def report_always(self) -> NoReturn:
        """Says every second that this keeper is there. Raises FleetError once another one says so,
        too."""
        while True:
            try:
                await self._report()
            except MembershipError as error:
                log.warning("%s", error)
            await asyncio.sleep(STEP_S)

    async def _report(self) -> None:
        current = await self._board.status()
        if current is not None and current.where != self._where:
            self.is_replaced = True
            raise FleetError(f"ray_fleet={self._fleet!r}: taken over by {current.where}")
        self._renewal += 1
        await self._board.report(
            Status(
                where=self._where,
                renewal=self._renewal,
                problem=self._problem,
                no_room=self._no_room,
                refused=self._refused,
                settled=self._settled,
            )
        )

    async def end(self, hurry: asyncio.Event, *, only_own: bool) -> None:
        """Ends all engines, or those that this keeper has created."""
        for task in self._leaving.values():
            task.cancel()
        own = [*self._created] if only_own else None
        await end_engines(self._cluster, self._board, self._fleet, hurry, own)

    async def _entries(self) -> dict[int, Entry]:
        named = decoded(await self._board.gcs.below(engines_key(self._fleet)))
        numbers = {number_of(name): entry for name, entry in named.items()}
        return {number: entry for number, entry in numbers.items() if number is not None}

    def _engine(self, number: int, entry: Entry | None) -> Engine:
        leaves = number in self._leaving
        if entry is None or entry.member is None:
            return Engine(number, entry.generation if entry else None, ready=False, draining=leaves)
        now_s, name = asyncio.get_running_loop().time(), entry.member.id
        if not entry.ready or self._ready_since.get(number, ("", 0.0))[0] != name:
            self._ready_since[number] = name, now_s
        serves = entry.ready and now_s - self._ready_since[number][1] >= _SETTLES_S
        leaves = leaves or entry.member.state == "draining"
        return Engine(number, entry.generation, serves, leaves)

    async def _create(self, numbers: list[int], wanted: Wanted) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s < self._retry_at_s and self._refused in (None, wanted):
            return
        orders = [replace(self._order, number=n, generation=wanted.generation) for n in numbers]
        try:
            self._created |= await asyncio.to_thread(self._cluster.create, orders)
            self._no_room, self._refused = "", None
            self._failed = {n: why for n, why in self._failed.items() if n not in numbers}
        except FleetError as error:
            if not self._has_settled:
                raise
            self._no_room, self._refused = str(error), wanted
            log.error("%s; trying again in %g s", error, _RETRY_S)
            self._retry_at_s = now_s + _RETRY_S

    def _find_problem(self, entries: Mapping[int, Entry]) -> str:
        """Why an engine did not start; "" if none failed. Raises FleetError until the fleet has
        been as wanted, for an engine that this keeper has created."""
        for number, actor in self._created.items():
            if failure := "" if actor is None else self._cluster.failure_of(actor):
                self._created[number] = None  # it is gone, and created again after a pause
                self._failed[number] = f"{name_of(number)}: its actor did not start: {failure}"
                self._retry_at_s = asyncio.get_running_loop().time() + _RETRY_S
        failures = {n: entry.failure for n, entry in entries.items() if entry.failure}
        failures |= self._failed
        own = [failures[number] for number in self._created if number in failures]
        if own and not self._has_settled:
            raise FleetError(own[0])
        return next(iter(failures.values()), "")

    async def _remove(self, number: int) -> None:
        """Drains an engine, and removes it."""
        try:
            limit_s = self._drain_s + STOP_S + ANSWER_S
            await remove_engine(self._cluster, self._board, self._fleet, number, "drain", limit_s)
            wanted = await self._board.wanted()
            if wanted is None or number >= wanted.instances:  # no other takes its place
                await asyncio.to_thread(self._cluster.release, [number])
        except Exception:
            log.exception("%s could not be removed; trying again", name_of(number))
        finally:
            self._created.pop(number, None)
            del self._leaving[number]

    def _show_count(self, serving: int, instances: int) -> None:
        if (count := f"{serving} of {instances} engines serve") != self._count:
            log.info(count)  # the launcher shows it
        self._count = count

    def _show(self, entries: Mapping[int, Entry | None]) -> None:
        """Logs what has changed."""
        shown = {n: entry.state if entry else "waits for a node" for n, entry in entries.items()}
        for number in sorted(shown.keys() | self._shown.keys()):
            if (state := shown.get(number, "gone")) != self._shown.get(number, ""):
                log.info("%s: %s", name_of(number), state)
        self._shown = shown


if __name__ == "__main__":
    end_with_parent()
    main()
