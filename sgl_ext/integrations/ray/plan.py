"""What is wanted of a fleet, what the processes of a fleet tell each other, and the next steps.

`next_steps` brings a fleet nearer to what is wanted of it: which engines to create and to drain.

    missing ──create──> starting ──> ready ──drain──> draining ──> missing

Engines have the numbers 0 to instances - 1; those above leave. An engine of an earlier generation
is replaced in its place: it drains, and is created again. Engines that serve are replaced one at a
time, and only while all others serve, so a new generation that does not start stops the restart.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from sgl_ext.integrations.ray.source import Gcs
from sgl_ext.settings.schema import BalancerSettings, LaunchSettings


class Engine(NamedTuple):
    """An engine whose actor exists.

    generation: the one that it was made for; None before its actor has said so.
    ready: it has served for some time. draining: it was ordered to.
    """

    number: int
    generation: int | None
    ready: bool
    draining: bool = False


class Steps(NamedTuple):
    """The numbers of the engines to create, and of those that shall leave or be replaced."""

    create: tuple[int, ...]
    drain: tuple[int, ...]


def next_steps(instances: int, generation: int, engines: Sequence[Engine]) -> Steps:
    """The steps to take now; both empty if the fleet is as wanted, or has to wait."""
    numbers = {engine.number for engine in engines}
    create = tuple(number for number in range(instances) if number not in numbers)
    leaving = {e.number for e in engines if e.number >= instances or e.draining}
    staying = [e for e in engines if e.number not in leaving]
    outdated = [e for e in staying if e.generation not in (None, generation)]
    serving = [e for e in staying if e.ready]
    # What does not serve is replaced at once.
    leaving |= {e.number for e in outdated if not e.ready}
    if outdated and len(serving) == instances:
        leaving.add(min(e.number for e in outdated))
    return Steps(create, tuple(sorted(leaving)))


def is_settled(instances: int, generation: int, engines: Sequence[Engine]) -> bool:
    """Whether the fleet is as wanted, and all of it serves."""
    current = [e for e in engines if e.generation == generation and e.ready and not e.draining]
    return sorted(e.number for e in engines) == [*range(instances)] and len(current) == instances


class Room(NamedTuple):
    """What a node of the cluster has of the resource that engines take: GPUs or CPUs."""

    node: str
    free: float
    total: float


def too_small(engines: int, devices: int, resource: str, rooms: Sequence[Room]) -> str:
    """Why so many more engines, with `devices` on one node for each, do not fit into a cluster; ""
    if they do."""
    fitting = sum(int(room.free // devices) for room in rooms)
    if fitting >= engines:
        return ""
    each = f"{devices} {resource}{'s' if devices > 1 else ''} on one node"
    found = ", ".join(
        f"{room.node} has {room.free:g} of {room.total:g} free" for room in rooms if room.total
    )
    if not found:
        found = f"no node of the cluster has a {resource}"
        found += "; platform='cpu' runs engines on CPUs" if resource == "GPU" else ""
    need = f"{engines} more engines need {each} each, {engines * devices} {resource}s in all"
    return f"{need}, and there is room for {fitting}: {found}"


SECRET = "SGLEXT_ENGINE_SECRET"
"""The variable in which an actor hands its engine the engine secret."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's actor is made with.

    generation: of the fleet, which each rolling restart raises by one. platform: SGLANG_PLATFORM,
    None for GPUs. secret: the lines of the engine secret. They travel here and not in a Ray runtime
    environment, which Ray shows in its dashboard and on a command line.
    """

    number: int
    generation: int
    platform: str | None
    secret: str | None
    settings: LaunchSettings

    @property
    def name(self) -> str:
        return name_of(self.number)

    @property
    def digest(self) -> str:
        """The same for two orders of engines that do the same."""
        same = msgspec.json.encode(replace(self, number=0, generation=0))
        return hashlib.blake2b(same, digest_size=8).hexdigest()


def name_of(number: int) -> str:
    """The name of an engine's actor, and of its placement group."""
    return f"engine-{number}"


def number_of(name: str) -> int | None:
    """The number of the engine with this name; None if it is no engine."""
    kind, _, number = name.rpartition("-")
    return int(number) if kind == "engine" and number.isdigit() else None


def make_order(settings: LaunchSettings, platform: str | None, secret: str | None) -> Order:
    """The order that all engines of a fleet have in common. Paths become absolute, as an actor has
    another working directory."""
    engine = settings.engine
    engine = replace(
        engine,
        engine_secret=None if secret is None else f"env:{SECRET}",
        warmup_requests=_absolute(engine.warmup_requests),
        shared_prefixes=_absolute(engine.shared_prefixes),
    )
    model = settings.model_path
    if Path(model).is_dir():
        model = str(Path(model).resolve())
    own = LaunchSettings(
        model_path=model,
        tp=settings.tp,
        log_limit_bytes=settings.log_limit_bytes,
        engine_args=settings.engine_args,
        engine=engine,
        balancer=BalancerSettings(),
        ray_fleet=settings.ray_fleet,
        ray_drain_s=settings.ray_drain_s,
    )
    return Order(number=0, generation=0, platform=platform, secret=secret, settings=own)


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator wants of a fleet.

    launch: the launcher whose settings began it.
    """

    instances: int
    generation: int = 0
    launch: str = ""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that keeps a fleet says of itself, every second.

    where: its machine and process. problem: why an engine does not start; "" if all did or may.
    no_room: why the engines of `refused` cannot be placed; "" if what is wanted can.
    settled: the `Wanted` that the fleet fulfils; None while it does not.
    """

    where: str
    renewal: int
    problem: str = ""
    no_room: str = ""
    refused: Wanted | None = None
    settled: Wanted | None = None


class Board:
    """The values of one fleet. Raises MembershipError if the GCS does not answer."""

    def __init__(self, gcs: Gcs, fleet: str) -> None:
        self.gcs = gcs
        self._wanted, self._status = f"{fleet}/wanted", f"{fleet}/status"

    async def wanted(self) -> Wanted | None:
        raw = await self.gcs.get(self._wanted)
        return None if raw is None else msgspec.json.decode(raw, type=Wanted)

    async def want(self, wanted: Wanted) -> None:
        await self.gcs.put(self._wanted, msgspec.json.encode(wanted))

    async def status(self) -> Status | None:
        raw = await self.gcs.get(self._status)
        return None if raw is None else msgspec.json.decode(raw, type=Status)

    async def report(self, status: Status) -> None:
        await self.gcs.put(self._status, msgspec.json.encode(status))

    async def forget_status(self) -> None:
        await self.gcs.delete(self._status)

    async def clear(self) -> None:
        """Removes both values."""
        await self.forget_status()
        await self.gcs.delete(self._wanted)
