"""What an operator sees of a fleet, with a GCS that is made up."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest

pytest.importorskip("ray")

from sgl_ext.integrations.ray import operations
from sgl_ext.integrations.ray.cluster import FleetError
from sgl_ext.integrations.ray.operations import NoRoom, Operations
from sgl_ext.integrations.ray.plan import Board, Status, Wanted
from sgl_ext.integrations.ray.source import Entry, Gcs, engines_key
from sgl_ext.membership.member import Member
from tests.integrations.ray.test_keeper import Table


class Keeper:
    """Says that it is there, each time that an operation waits; `answer` is what it makes of what
    is wanted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table = Table()
        self.table.address = "10.0.0.1:6379"  # type: ignore[attr-defined]
        self.board = Board(cast(Gcs, self.table), "agents")
        self.operations = Operations(cast(Gcs, self.table), "agents")
        self.answer: Status | None = Status(where="head, process 7", renewal=0)
        monkeypatch.setattr(operations.asyncio, "sleep", self.work)

    async def work(self, _: float) -> None:
        if self.answer is not None:
            self.answer = msgspec.structs.replace(self.answer, renewal=self.answer.renewal + 1)
            await self.board.report(self.answer)

    async def begin(self) -> None:
        await self.board.want(Wanted(instances=2, launch="l"))
        await self.work(0)


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Keeper:
    return Keeper(monkeypatch)


async def test_engines_and_who_keeps_them_are_shown(
    keeper: Keeper, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FleetError, match="there is no fleet 'agents'"):
        await keeper.operations.show()
    await keeper.begin()
    member = Member(id="engine-0-a", url="http://10.0.0.2:20000")
    entry = Entry(member=member, node="10.0.0.2", generation=3, settings="", ready=True)
    await keeper.table.put(engines_key("agents", "engine-0"), msgspec.json.encode(entry))
    await keeper.operations.show()
    assert capsys.readouterr().out.splitlines() == [
        "agents at 10.0.0.1:6379, kept by head, process 7",
        "wanted: 2 engines of generation 0",
        "engine-0: ready at http://10.0.0.2:20000, generation 3",
    ]
    keeper.answer = None  # it was killed
    await keeper.operations.show()
    assert "kept by no launcher" in capsys.readouterr().out


async def test_an_order_returns_once_it_is_fulfilled(keeper: Keeper) -> None:
    await keeper.begin()
    wanted = Wanted(instances=5, launch="l")
    keeper.answer = Status(where="head, process 7", renewal=9, settled=wanted)
    await keeper.operations.scale(5)
    assert await keeper.board.wanted() == wanted
    wanted = Wanted(instances=5, generation=1, launch="l")
    keeper.answer = Status(where="head, process 7", renewal=99, settled=wanted)
    await keeper.operations.restart()
    assert await keeper.board.wanted() == wanted


async def test_what_does_not_fit_is_no_longer_wanted(keeper: Keeper) -> None:
    await keeper.begin()
    refused = Wanted(instances=9, launch="l")
    keeper.answer = Status(where="head", renewal=9, no_room="room for 2", refused=refused)
    with pytest.raises(NoRoom, match="room for 2"):
        await keeper.operations.scale(9)
    assert await keeper.board.wanted() == Wanted(instances=2, launch="l")


async def test_only_a_fleet_that_is_kept_takes_orders_and_only_another_one_is_ended(
    keeper: Keeper,
) -> None:
    await keeper.begin()
    with pytest.raises(FleetError, match="head, process 7 keeps it: stop that launcher"):
        await keeper.operations.stop()
    keeper.answer = None
    with pytest.raises(FleetError, match="no launcher keeps it; launch it first"):
        await keeper.operations.scale(3)
