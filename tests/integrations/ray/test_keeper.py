"""What keeps a fleet, with a cluster and a GCS that are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

pytest.importorskip("ray")

from sgl_ext.integrations.ray import keeper
from sgl_ext.integrations.ray import keeper as keeper_module
from sgl_ext.integrations.ray.cluster import Cluster, FleetError
from sgl_ext.integrations.ray.keeper import Keeper
from sgl_ext.integrations.ray.plan import Board, Order, Status
from sgl_ext.integrations.ray.source import Entry, Gcs, engines_key
from sgl_ext.membership.member import Member
from sgl_ext.settings.schema import LaunchSettings

SETTINGS = LaunchSettings(model_path="m", ray_address="auto", instances=2)


class Table:
    """A GCS."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    async def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    async def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    async def delete(self, key: str) -> None:
        self.values.pop(key, None)

    async def below(self, prefix: str) -> dict[str, bytes]:
        found = self.values.items()
        return {key.removeprefix(prefix): raw for key, raw in found if key.startswith(prefix)}


class Actors:
    """A cluster with `room` for so many engines. Its actors do what they are asked to at once."""

    has_gpus = True

    def __init__(self, table: Table, room: int = 9) -> None:
        self.orders: dict[int, Order] = {}
        self.groups: set[int] = set()
        self.done: list[tuple[str, int]] = []
        self.failures: dict[int, str] = {}
        self._table = table
        self._room = room
        self._starts = 0

    def numbers(self) -> list[int]:
        return sorted(self.orders)

    def grouped(self) -> list[int]:
        return sorted(self.groups)

    def create(self, orders: Sequence[Order]) -> dict[int, Any]:
        if len(self.groups | {order.number for order in orders}) > self._room:
            raise FleetError("there is no room")
        for order in orders:
            self.done.append(("create", order.number))
            self.orders[order.number] = order
            self.groups.add(order.number)
            self.write(order.number)
        return {order.number: order.number for order in orders}

    def write(self, number: int, *, ready: bool = False, failure: str = "") -> None:
        """The entry of an actor whose engine was started again."""
        order = self.orders[number]
        self._starts += 1
        member = Member(id=f"{order.name}-{self._starts}", url=f"http://n:{self._starts}")
        entry = Entry(
            member=None if failure else member,
            node="n",
            generation=order.generation,
            settings=order.digest,
            ready=ready,
            failure=failure,
        )
        key = engines_key(order.settings.ray_fleet, order.name)
        self._table.values[key] = msgspec.json.encode(entry)

    def serve(self) -> None:
        """All engines become ready."""
        for number in self.orders:
            self.write(number, ready=True)

    def failure_of(self, started: int) -> str:
        if failure := self.failures.pop(started, ""):
            del self.orders[started]
        return failure

    async def ask(self, number: int, method: str, limit_s: float) -> None:
        self.done.append((method, number))

    def kill(self, number: int) -> None:
        self.orders.pop(number, None)

    def release(self, numbers: Iterable[int]) -> None:
        self.groups -= {*numbers}


class Scene:
    """A keeper with its cluster."""

    def __init__(self, room: int = 9, settings: LaunchSettings = SETTINGS) -> None:
        self.table = Table()
        self.actors = Actors(self.table, room)
        self.settings = settings
        self.board = Board(cast(Gcs, self.table), settings.ray_fleet)
        self.keeper = self.new_keeper()

    def new_keeper(self, **changes: Any) -> Keeper:
        settings = replace(self.settings, **changes)
        return Keeper(settings, cast(Cluster, self.actors), self.board)

    async def steps(self, count: int = 3) -> list[tuple[str, int]]:
        """Takes some steps, and returns what the actors were asked to do."""
        self.actors.done = []
        for _ in range(count):
            await self.keeper.step()
            await asyncio.sleep(0.01)  # the removal of an engine uses threads
        return self.actors.done

    async def begin(self) -> None:
        """Brings the fleet to what is wanted."""
        await self.keeper.adopt()
        await self.keeper.step()
        self.actors.serve()
        await self.keeper.start()

    async def want(self, instances: int, generation: int = 0) -> None:
        wanted = await self.board.wanted()
        assert wanted is not None
        await self.board.want(replace(wanted, instances=instances, generation=generation))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses: neither between steps nor for balancers to notice."""
    for name in ("STEP_S", "_SETTLES_S", "_RETRY_S"):
        monkeypatch.setattr(keeper_module, name, 0)


async def test_a_fleet_is_created_and_grows_and_shrinks() -> None:
    scene = Scene()
    await scene.begin()
    assert scene.actors.numbers() == [0, 1]
    assert await scene.steps() == []
    await scene.want(4)
    assert await scene.steps() == [("create", 2), ("create", 3)]
    scene.actors.serve()
    await scene.want(1)
    assert await scene.steps() == [("drain", 1), ("drain", 2), ("drain", 3)]
    assert scene.actors.numbers() == scene.actors.grouped() == [0]
    assert [key for key in scene.table.values if "engine-" in key] == ["sgl-ext/engines/engine-0"]


async def test_a_restart_replaces_one_after_another_and_keeps_the_groups() -> None:
    scene = Scene()
    await scene.begin()
    await scene.want(2, generation=1)
    assert await scene.steps() == [("drain", 0), ("create", 0)]
    assert scene.actors.grouped() == [0, 1]
    assert await scene.steps() == []  # until the new one serves
    scene.actors.write(0, ready=True)
    assert await scene.steps() == [("drain", 1), ("create", 1)]
    assert {order.generation for order in scene.actors.orders.values()} == {1}


async def test_engines_that_do_not_fit_end_a_start_and_leave_a_running_fleet_alone() -> None:
    with pytest.raises(FleetError, match="no room"):
        await Scene(room=1).begin()
    scene = Scene(room=2)
    await scene.begin()
    await scene.want(3)
    assert await scene.steps() == []
    await scene.keeper._report()
    status = await scene.board.status()
    assert status is not None
    assert status.no_room == "there is no room"
    assert status.settled is None
    await scene.want(2)
    await scene.steps()
    await scene.keeper._report()
    status = await scene.board.status()
    assert status is not None
    assert status.no_room == ""
    assert status.settled == await scene.board.wanted()


@pytest.mark.parametrize("by", ["engine", "actor"])
async def test_an_engine_that_ends_before_it_serves_ends_the_start(by: str) -> None:
    scene = Scene()
    await scene.keeper.adopt()
    await scene.keeper.step()
    if by == "engine":
        scene.actors.write(1, failure="engine-1 ended with exit code 1")
    else:
        scene.actors.failures[1] = "no module named sgl_ext"
    with pytest.raises(FleetError, match=r"engine-1( ended|: its actor did not start: no module)"):
        await scene.keeper.step()
    await scene.keeper.end(asyncio.Event(), only_own=True)
    assert scene.actors.numbers() == scene.actors.grouped() == []


async def test_an_actor_that_does_not_start_later_is_created_again() -> None:
    scene = Scene()
    await scene.begin()
    await scene.want(3)
    await scene.steps()
    scene.actors.failures[2] = "its node has no sgl_ext"
    await scene.keeper.step()
    assert scene.actors.numbers() == [0, 1]
    assert scene.keeper._problem == "engine-2: its actor did not start: its node has no sgl_ext"
    assert await scene.steps(1) == [("create", 2)]
    await scene.keeper.step()
    assert scene.keeper._problem == ""


async def test_what_fits_after_what_did_not_is_created_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper_module, "_RETRY_S", 600)
    scene = Scene(room=3)
    await scene.begin()
    await scene.want(9)
    assert await scene.steps() == []
    assert scene.keeper._refused == await scene.board.wanted()
    await scene.want(3)
    assert await scene.steps() == [("create", 2)]
    assert scene.keeper._refused is None


async def test_the_next_launch_adopts_what_runs_and_names_other_settings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene()
    await scene.begin()
    caplog.set_level("INFO")
    monkeypatch.setattr(keeper_module.os, "getppid", lambda: 1)  # another launcher
    scene.keeper = scene.new_keeper(instances=3, tp=2)
    await scene.keeper.adopt()
    assert "adopted engine-0, engine-1" in caplog.text
    assert "engine-0, engine-1 run with other settings" in caplog.text
    assert "sgl_ext.fleet restart" in caplog.text
    assert await scene.steps() == [("create", 2)]


async def test_a_keeper_that_is_started_again_wants_what_its_predecessor_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    await scene.begin()
    await scene.want(4)
    scene.keeper = scene.new_keeper()
    await scene.keeper.adopt()
    assert await scene.steps() == [("create", 2), ("create", 3)]
    monkeypatch.setattr(keeper_module.os, "getppid", lambda: 1)  # another launcher
    scene.keeper = scene.new_keeper()
    await scene.keeper.adopt()
    assert await scene.steps() == [("drain", 2), ("drain", 3)]


async def test_the_end_stops_all_and_leaves_nothing() -> None:
    scene = Scene()
    await scene.begin()
    scene.actors.done = []
    await scene.keeper.end(asyncio.Event(), only_own=False)
    assert sorted(scene.actors.done) == [("end", 0), ("end", 1)]
    assert scene.actors.numbers() == scene.actors.grouped() == []
    assert scene.table.values == {}


async def test_a_hurried_end_waits_for_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    await scene.begin()

    hangs, hurry = asyncio.Event(), asyncio.Event()

    async def hang(*_: object) -> None:
        hangs.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(scene.actors, "ask", hang)
    ending = asyncio.create_task(scene.keeper.end(hurry, only_own=False))
    await hangs.wait()
    assert not ending.done()
    hurry.set()
    await ending
    assert scene.actors.numbers() == scene.actors.grouped() == []
    assert scene.table.values == {}


async def test_a_fleet_has_one_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    looks = 0

    async def look(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks < 3:
            await scene.board.report(Status(where="a, process 1", renewal=looks))

    monkeypatch.setattr(keeper, "_pause", look)
    await scene.board.report(Status(where="a, process 1", renewal=0))
    with pytest.raises(FleetError, match="keeps this fleet already: a, process 1"):
        await keeper.require_no_keeper(scene.board, "sgl-ext")
    looks = 3  # it renews nothing any more
    await keeper.require_no_keeper(scene.board, "sgl-ext")
    assert await scene.board.status() is None
    await scene.keeper._report()
    await scene.board.report(Status(where="b, process 2", renewal=0))
    with pytest.raises(FleetError, match="taken over by b, process 2"):
        await scene.keeper.report_always()
    assert scene.keeper.is_replaced
