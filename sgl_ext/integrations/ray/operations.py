"""What an operator can do with a fleet, beside launching it."""

import asyncio

from msgspec.structs import replace

from sgl_ext.integrations.ray.cluster import Cluster, FleetError, end_engines
from sgl_ext.integrations.ray.plan import Board, Wanted
from sgl_ext.integrations.ray.source import Gcs, decoded, engines_key, gcs_address

_LOOK_S = 1.0
# A keeper says once a second that it is there.
_KEEPER_LOOKS = 5


class NoRoom(FleetError):
    """The cluster is too small for the engines that are wanted."""


class Operations:
    """The operations on one fleet, which print what they do. Each raises FleetError, or
    MembershipError if the cluster does not answer."""

    def __init__(self, gcs: Gcs, fleet: str) -> None:
        self._fleet = fleet
        self._gcs = gcs
        self._board = Board(gcs, fleet)

    @classmethod
    async def connect(cls, address: str, fleet: str) -> "Operations":
        """address: auto or HOST:PORT."""
        return cls(await Gcs.connect(gcs_address(address)), fleet)

    async def show(self) -> None:
        """Prints the engines and what is wanted."""
        wanted, status = await self._board.wanted(), await self._board.status()
        entries = decoded(await self._gcs.below(engines_key(self._fleet)))
        if wanted is None and not entries:
            raise FleetError(f"there is no fleet {self._fleet!r} at {self._gcs.address}")
        keeper = await self._keeper() or "no launcher"
        print(f"{self._fleet} at {self._gcs.address}, kept by {keeper}")
        if wanted is not None:
            print(f"wanted: {wanted.instances} engines of generation {wanted.generation}")
        for name, entry in entries.items():
            print(f"{name}: {entry.state}, generation {entry.generation}")
        for problem in () if status is None else (status.problem, status.no_room):
            if problem:
                print(f"problem: {problem}")

    async def scale(self, instances: int) -> None:
        """Adds engines, or drains and removes the last ones. Returns when that is done.

        Raises NoRoom if they do not fit; then the earlier number is wanted again.
        """
        wanted = await self._wanted()
        try:
            await self._reach(replace(wanted, instances=instances))
        except NoRoom:
            await self._board.want(wanted)
            raise

    async def restart(self) -> None:
        """Replaces the engines one after another. Returns when that is done."""
        wanted = await self._wanted()
        await self._reach(replace(wanted, generation=wanted.generation + 1))

    async def stop(self) -> None:
        """Ends a fleet that no launcher keeps."""
        if (keeper := await self._keeper()) is not None:
            reason = f"{keeper} keeps it: stop that launcher, with SIGTERM or Ctrl-C"
            raise FleetError(f"ray_fleet={self._fleet!r}: {reason}")
        cluster = await asyncio.to_thread(Cluster, self._gcs.address, self._fleet)
        numbers = await asyncio.to_thread(cluster.numbers)
        await end_engines(cluster, self._board, self._fleet, asyncio.Event())
        cluster.close()
        print(f"ended {len(numbers)} engines")

    async def _wanted(self) -> Wanted:
        """What is wanted now of a fleet that has a keeper."""
        wanted = await self._board.wanted()
        if wanted is None or await self._keeper() is None:
            raise FleetError(f"ray_fleet={self._fleet!r}: no launcher keeps it; launch it first")
        return wanted

    async def _keeper(self) -> str | None:
        """The launcher that keeps the fleet; None if none reports itself."""
        first = await self._board.status()
        for _ in range(_KEEPER_LOOKS if first is not None else 0):
            await asyncio.sleep(_LOOK_S)
            latest = await self._board.status()
            if latest is not None and latest != first:
                return latest.where
        return None

    async def _reach(self, wanted: Wanted) -> None:
        """Orders what is wanted, and prints what happens until it is so."""
        await self._board.want(wanted)
        shown: dict[str, str] = {}
        while True:
            status = await self._board.status()
            if status is None:
                raise FleetError(f"ray_fleet={self._fleet!r}: its launcher has stopped")
            entries = decoded(await self._gcs.below(engines_key(self._fleet)))
            now = {name: entry.state for name, entry in entries.items()}
            if status.problem:
                now["problem"] = status.problem
            for name in sorted(now.keys() | shown.keys()):
                if (state := now.get(name, "gone")) != shown.get(name):
                    print(f"{name}: {state}", flush=True)
            shown = now
            if status.refused == wanted:
                raise NoRoom(status.no_room)
            if status.settled == wanted:
                print(f"{wanted.instances} engines serve")
                return
            if await self._board.wanted() != wanted:
                raise FleetError(f"ray_fleet={self._fleet!r}: something else was wanted meanwhile")
            await asyncio.sleep(_LOOK_S)
