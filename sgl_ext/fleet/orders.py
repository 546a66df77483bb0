"""What the processes of a fleet tell each other: the order that an actor is made with, and two
values in Ray's GCS, what is wanted of the fleet and who keeps it.
"""

import hashlib
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sgl_ext.membership.gcs import Gcs
from sgl_ext.settings.schema import BalancerSettings, LaunchSettings

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
