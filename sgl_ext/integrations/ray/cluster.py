"""The Ray cluster: its room, and the placement groups and actors of a fleet.

An engine has a placement group, named like its actor, with one bundle: `tp` GPUs, or CPUs, of one
node. Both are detached: they outlive the process that made them. All calls but `ask` block.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util import list_named_actors
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sgl_ext.integrations.ray.engine_host import STOP_S, EngineHost
from sgl_ext.integrations.ray.plan import Board, Order, Room, name_of, number_of, too_small
from sgl_ext.integrations.ray.source import engines_key, gcs_address
from sgl_ext.node.hardware import gpus_of_engine

_PLACED_S = 10.0


class FleetError(Exception):
    """An operation on the fleet failed. The message is for the operator."""


class Cluster:
    """This process's connection to a cluster, in the name space of one fleet."""

    def __init__(self, address: str, fleet: str) -> None:
        """Raises FleetError or MembershipError if the cluster cannot be used from here."""
        self.address = gcs_address(address)
        try:
            ray.init(
                self.address,
                namespace=f"sgl_ext.{fleet}",
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
        except (RayError, RuntimeError, ConnectionError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise FleetError(f"ray_address={address!r}: {reason}") from None

    def close(self) -> None:
        """Leaves the cluster."""
        ray.shutdown()

    def numbers(self) -> list[int]:
        """The engines whose actors exist."""
        found = map(number_of, list_named_actors())
        return sorted(number for number in found if number is not None)

    def grouped(self) -> list[int]:
        """The engines whose placement groups exist."""
        names = {group["name"] for group in placement_group_table().values()}
        return sorted(
            number
            for number in map(number_of, names)
            if number is not None and _group(number) is not None
        )

    def create(self, orders: Sequence[Order]) -> dict[int, Any]:
        """Makes the actors, and those of their groups that do not exist.

        Returns a reference for each engine, which is resolved when its actor has started. Raises
        FleetError if they do not all fit; then none of them was made.
        """
        bundles = {order.number: _bundle(order) for order in orders}
        groups = {number: _group(number) for number in bundles}
        for number, group in groups.items():
            if group is not None and group.bundle_specs != [bundles[number]]:
                remove_placement_group(group)
                groups[number] = None
        missing = [number for number, group in groups.items() if group is None]
        if missing:
            settings = orders[0].settings
            kind = next(iter(bundles[missing[0]]))
            each = gpus_of_engine(settings).gpus
            if problem := too_small(len(missing), each, kind, _rooms(kind)):
                raise FleetError(problem)
        made = {
            number: placement_group(
                [bundles[number]],
                strategy="STRICT_PACK",
                name=name_of(number),
                lifetime="detached",
            )
            for number in missing
        }
        placed = {number: made.get(number) or groups[number] for number in groups}
        late = [number for number, group in placed.items() if not group.wait(_PLACED_S)]
        if late:
            for group in made.values():
                remove_placement_group(group)
            names = ", ".join(map(name_of, late))
            raise FleetError(f"Ray found no node for {names} within {_PLACED_S:g} s")
        return {order.number: _actor(order, placed[order.number]) for order in orders}

    async def ask(self, number: int, method: str, limit_s: float) -> None:
        """Calls a method of an engine's actor. Raises FleetError if that fails."""
        try:
            actor = await asyncio.to_thread(ray.get_actor, name_of(number))
            async with asyncio.timeout(limit_s):
                await getattr(actor, method).remote()
        except (RayError, ValueError, TimeoutError) as error:
            reason = str(error).splitlines()[0] if str(error) else f"no answer in {limit_s:g} s"
            raise FleetError(f"{name_of(number)}: {method}: {reason}") from None

    def failure_of(self, started: Any) -> str:
        """Why an actor did not start; "" if it did or still may. started: its reference of
        `create`."""
        done, _ = ray.wait([started], timeout=0, fetch_local=False)
        try:
            ray.get(done)
        except RayError as error:
            return str(error).strip()
        return ""

    def kill(self, number: int) -> None:
        """Ends an engine's actor, and its process with it."""
        with suppress(ValueError):
            ray.kill(ray.get_actor(name_of(number)), no_restart=True)

    def release(self, numbers: Iterable[int]) -> None:
        """Removes the placement groups of these engines."""
        for number in numbers:
            if (group := _group(number)) is not None:
                remove_placement_group(group)


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _rooms(kind: str) -> list[Room]:
    free = available_resources_per_node()
    return [
        Room(
            node["NodeManagerAddress"],
            free.get(node["NodeID"], {}).get(kind, 0),
            node["Resources"].get(kind, 0),
        )
        for node in _nodes()
    ]


def _bundle(order: Order) -> dict[str, float]:
    devices = float(gpus_of_engine(order.settings).gpus)
    return {"GPU" if order.platform is None else "CPU": devices}


def _group(number: int) -> Any:
    """An engine's placement group; None if there is none."""
    try:
        return get_placement_group(name_of(number))
    except ValueError:
        return None


def _actor(order: Order, group: Any) -> Any:
    bundle = _bundle(order)
    made = ray.remote(EngineHost).options(
        name=order.name,
        lifetime="detached",
        max_restarts=-1,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group),
        num_gpus=bundle.get("GPU", 0),
        num_cpus=bundle.get("CPU", 0),
    )
    return made.remote(msgspec.json.encode(order)).__ray_ready__.remote()


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
