"""Restarts of a node's engines: their order, what they wait for, and what a failure leaves."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from sgl_ext.node.child import StartLog
from sgl_ext.node.children import EngineList
from sgl_ext.node.restarts import (
    QUIET_LOOKS,
    SILENT_S,
    Order,
    Replacement,
    Restart,
    RestartRefused,
    Restarts,
    Step,
    plan_restart,
    read_order,
)
from sgl_ext.settings.schema import BalancerSettings, LaunchSettings, Model, SettingsError
from tests.waiting import HANG_S

OLD, NEW = "org/old", "org/new"
SETTINGS = LaunchSettings(
    model_path=OLD,
    engine_args=("--max-running-requests", "8"),
    restart_drain_s=20.0,
    start_timeout_s=30.0,
    balancer=BalancerSettings(processes=2),
)


class FakeEngine:
    """An engine that starts in two looks, unless its model or a flag of it is bad."""

    def __init__(self, node: FakeNode, number: int) -> None:
        self.node = node
        self.name = f"engine-{number}"
        self.url = f"http://127.0.0.1:{number}"
        self.log = Path(f"{self.name}.log")
        self.start_log = StartLog(self.log)
        self.settings = self.launched = SETTINGS
        self.starts = 1
        self.exit_code: int | None = None
        self.is_memory_short = False
        self.looks = 0
        self.requests = 0
        self.balancers: int | None = 2

    @property
    def run_id(self) -> str:
        return self.name if self.starts == 1 else f"{self.name}.{self.starts}"

    @property
    def serves(self) -> bool:
        is_named = self.name not in self.node.listed.restarting
        return is_named and self.exit_code is None and self.looks == 0

    def configure(self, settings: LaunchSettings) -> None:
        self.settings = settings

    def lines_of_start(self) -> list[str]:
        return [f"a line of {self.settings.model_path}", "the reason"]

    async def stop(self, limit_s: float) -> None:
        self.node.happened(f"{self.name} stops with {self.requests} requests")
        self.exit_code = 0

    async def start(self) -> None:
        assert self.exit_code is not None, "one process a port"
        self.node.happened(f"{self.name} starts {' '.join(_shown(self.settings))}")
        self.starts += 1
        self.exit_code, self.looks = None, 2
        if {self.settings.model_path, *self.settings.engine_args} & self.node.bad:
            self.exit_code, self.looks = 1, 0


def _shown(settings: LaunchSettings) -> Iterator[str]:
    yield settings.model_path
    yield from settings.engine_args[2:]


class FakeNode:
    """Engines, their balancer, and a clock that only pauses move.

    bad: a model path or flag with which no engine starts.
    log: what happened, in order.
    """

    def __init__(self, count: int = 2) -> None:
        self.now_s = 0.0
        self.bad: set[str] = set()
        self.log: list[str] = []
        self.said: list[str] = []
        self.paused: set[str] = set()
        self.fewest_serving = count
        self.models: set[frozenset[str]] = set()
        self.refused = ""
        self.drained_ids: set[str] = set()
        self.engines = [FakeEngine(self, number) for number in range(count)]
        self.listed = EngineList(Path(), self.engines, "box:30000")  # type: ignore[arg-type]
        replacement = Replacement(
            SETTINGS,
            self.engines,  # type: ignore[arg-type]
            self.listed,
            self,  # type: ignore[arg-type]
            self,
            self.said.append,
            lambda: self.now_s,
            self.pass_time,
        )
        self.restarts = Restarts(replacement, self.check)

    def happened(self, what: str) -> None:
        self.log.append(what)

    def engine(self, url: str) -> FakeEngine:
        return next(engine for engine in self.engines if engine.url == url)

    async def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for engine in self.engines:
            engine.looks = max(engine.looks - 1, 0)
        serving = [engine for engine in self.engines if engine.serves]
        self.fewest_serving = min(self.fewest_serving, len(serving))
        self.models.add(frozenset(engine.settings.model_path for engine in serving))

    # What engines and the balancer say.

    async def is_ready(self, url: str) -> bool:
        engine = self.engine(url)
        return engine.exit_code is None and engine.looks == 0

    async def balancers(self, url: str) -> int | None:
        engine = self.engine(url)
        if engine.balancers is None or engine.serves:
            return engine.balancers
        return 1 if engine.requests else 0

    async def drained(self) -> set[str]:
        return self.drained_ids

    async def in_flight(self, id: str) -> int | None:
        engine = next(e for e in self.engines if self.listed.id_of(e) == id)  # type: ignore[arg-type]
        return engine.requests

    async def close(self) -> None: ...

    # The keepers.

    def pause(self, engine: FakeEngine) -> None:
        self.paused.add(engine.name)

    def resume(self, engine: FakeEngine) -> None:
        self.paused.discard(engine.name)

    async def check(self, settings: LaunchSettings) -> None:
        if self.refused in settings.engine_args:
            raise SettingsError(f"unrecognized arguments: {self.refused}")

    async def restart(self, **order: Any) -> Restart:
        """The restart of an order, once it has ended."""
        begun = await self.restarts.begin(Order(**order))
        assert self.restarts._task is not None
        async with asyncio.timeout(HANG_S):
            await self.restarts._task
        assert not self.paused
        assert not self.listed.restarting
        return begun


async def test_engines_restart_one_after_another_while_the_others_serve() -> None:
    node = FakeNode(3)
    ended = await node.restart()
    assert ended.as_json() == {
        "id": "restart-1",
        "state": "done",
        "error": None,
        "engines": [
            {"name": f"engine-{number}", "state": "ready", "reason": ""} for number in range(3)
        ],
    }
    assert node.log == [
        *("engine-0 stops with 0 requests", f"engine-0 starts {OLD}"),
        *("engine-1 stops with 0 requests", f"engine-1 starts {OLD}"),
        *("engine-2 stops with 0 requests", f"engine-2 starts {OLD}"),
    ]
    assert node.fewest_serving == 2
    states = [line for line in node.said if line.startswith("engine-0")]
    assert states == [f"engine-0: {s}" for s in ("draining", "stopping", "starting", "ready")]


async def test_the_last_engine_that_is_not_drained_is_not_restarted() -> None:
    node = FakeNode()
    node.drained_ids = {"engine-0@box:30000", "engine-0.2@box:30000"}
    node.engines[0].balancers = 0
    ended = await node.restart()
    assert [step.state for step in ended.engines] == ["ready", "failed"]
    assert "stays drained" in ended.engines[0].reason
    assert "the others are drained" in ended.engines[1].reason
    assert node.log[0].startswith("engine-0 stops")
    assert not any(line.startswith("engine-1") for line in node.log)
    assert node.engines[1].serves


async def test_one_engine_alone_restarts_by_its_name_id_or_address() -> None:
    node = FakeNode()
    for name in ("engine-1", "engine-1.2@box:30000", "http://127.0.0.1:1"):
        ended = await node.restart(engine=name)
        assert [step.name for step in ended.engines] == ["engine-1"]
    assert [engine.starts for engine in node.engines] == [1, 4]
    with pytest.raises(RestartRefused, match="engine='engine-7': must be one of engine-0, engi"):
        await node.restart(engine="engine-7")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--pp-size", "2"), "tp=1 x pp=2 needs 2 GPUs, and engine-. keeps those .*, 1: start"),
        (("--tp-size", "2"), "the launcher's own setting is tp"),
    ],
)
async def test_a_restart_gives_an_engine_no_other_gpus(flags: tuple[str, ...], reason: str) -> None:
    node = FakeNode()
    with pytest.raises(RestartRefused, match=reason):
        await node.restart(engine_args=flags)
    assert node.log == []


async def test_an_engine_stops_only_once_no_balancer_has_a_request_there() -> None:
    node = FakeNode()
    first = node.engines[0]
    first.requests = 3

    async def pass_time(seconds: float) -> None:
        await node.pass_time(seconds)
        step = node.restarts.last and node.restarts.last.engines[0]
        if node.now_s == 5.0:
            assert step == Step("engine-0", "draining", "3 requests run")
            assert node.restarts.drains("engine-0")
        if node.now_s == 10.0:
            first.requests = 0

    node.restarts.replacement.pause = pass_time
    ended = await node.restart(engine="engine-0")
    assert ended.state == "done"
    assert node.log[0] == "engine-0 stops with 0 requests"
    assert node.now_s >= 10.0 + QUIET_LOOKS


async def test_a_request_that_does_not_end_is_waited_for_until_the_limit() -> None:
    node = FakeNode()
    node.engines[0].requests = 2
    ended = await node.restart(engine="engine-0")
    assert ended.state == "done"
    assert node.log[0] == "engine-0 stops with 2 requests"
    assert 20.0 <= node.now_s < 40.0
    said = "engine-0: 2 requests still ran after 20 s; they end now (restart-drain-s)"
    assert said in node.said


async def test_an_engine_that_does_not_answer_is_not_waited_for() -> None:
    node = FakeNode()
    node.restarts.replacement.settings = replace(SETTINGS, restart_drain_s=600.0)
    node.engines[0].balancers = None

    async def stop(limit_s: float) -> None:
        node.engines[0].balancers, node.engines[0].exit_code = 2, 0
        assert node.now_s == SILENT_S

    node.engines[0].stop = stop  # type: ignore[method-assign]
    assert (await node.restart(engine="engine-0")).state == "done"


async def test_new_flags_follow_those_of_the_launchers_start() -> None:
    node = FakeNode()
    await node.restart(engine_args=("--first", "1"))
    await node.restart(engine="engine-0", engine_args=("--second",))
    await node.restart()
    flags = [engine.settings.engine_args for engine in node.engines]
    assert flags == [(*SETTINGS.engine_args, "--second"), (*SETTINGS.engine_args, "--first", "1")]
    await node.restart(engine_args=())
    assert all(engine.settings == SETTINGS for engine in node.engines)
    begun = [line.partition(": ")[2] for line in node.said if "restart with" in line]
    assert begun == [
        f"{which} restart with the launcher's flags{flags}, until the launcher ends"
        for which, flags in (
            ("engine-0, engine-1", " and --first 1"),
            ("engine-0", " and --second"),
            ("engine-0, engine-1", ""),
        )
    ]


async def test_an_engine_that_does_not_come_back_gets_its_flags_of_before() -> None:
    node = FakeNode(3)
    node.bad = {"--bad"}
    ended = await node.restart(engine_args=("--bad",))
    assert (ended.state, [step.state for step in ended.engines]) == (
        "failed",
        ["failed", "waiting", "waiting"],
    )
    assert ended.error is not None
    assert ended.error.startswith("engine-0: it ended with exit code 1:\n  a line of")
    assert "the reason" in ended.error
    assert ended.error.endswith("\nIt serves again with the settings that it had.")
    assert [engine.settings for engine in node.engines] == [SETTINGS] * 3
    assert [engine.serves for engine in node.engines] == [True] * 3
    assert node.fewest_serving == 2


async def test_engines_that_restarted_before_one_failed_keep_the_new_flags() -> None:
    node = FakeNode(3)

    async def check(settings: LaunchSettings) -> None:
        node.engines[1].start = start  # type: ignore[method-assign]

    async def start() -> None:
        await FakeEngine.start(node.engines[1])
        if "--new" in node.engines[1].settings.engine_args:
            node.engines[1].looks = 1_000_000  # it hangs

    node.restarts.check = check
    ended = await node.restart(engine_args=("--new",))
    assert [step.state for step in ended.engines] == ["ready", "failed", "waiting"]
    assert "it was not ready after 30 s" in str(ended.error)
    new = [engine.settings.engine_args[2:] for engine in node.engines]
    assert new == [("--new",), (), ()]


async def test_an_engine_that_starts_with_neither_is_left_to_its_keeper() -> None:
    node = FakeNode()
    node.bad = {OLD}
    ended = await node.restart()
    assert ended.state == "failed"
    assert "With the settings that it had it does not start either" in str(ended.error)
    assert node.log.count(f"engine-0 starts {OLD}") == 2
    assert node.engines[1].serves


async def test_engines_stay_if_no_other_would_serve_and_restart_if_none_serves_anyway() -> None:
    node = FakeNode()
    node.engines[1].exit_code = 1
    ended = await node.restart()
    assert ended.error == "engine-0: it was not restarted, as no other engine is ready"
    assert node.log == []
    node.engines[0].exit_code = 1
    ended = await node.restart(engine_args=("--better",))
    assert ended.state == "done"
    assert [engine.serves for engine in node.engines] == [True, True]


async def test_another_model_takes_over_at_once_and_never_beside_the_old_one() -> None:
    node = FakeNode(4)
    ended = await node.restart(model_path=NEW)
    assert (ended.state, {step.state for step in ended.engines}) == ("done", {"ready"})
    assert node.models == {frozenset({OLD}), frozenset({NEW})}
    assert node.fewest_serving == 2
    assert [engine.settings.model_path for engine in node.engines] == [NEW] * 4


async def test_a_model_that_does_not_start_leaves_every_engine_with_the_old_one() -> None:
    node = FakeNode(4)

    async def start() -> None:
        await FakeEngine.start(node.engines[1])
        node.engines[1].exit_code = None if node.engines[1].settings == SETTINGS else 1

    node.engines[1].start = start  # type: ignore[method-assign]
    ended = await node.restart(model_path=NEW)
    assert [step.state for step in ended.engines] == ["waiting", "failed", "waiting", "waiting"]
    assert node.models == {frozenset({OLD})}
    assert [engine.settings for engine in node.engines] == [SETTINGS] * 4
    assert all(engine.serves for engine in node.engines)


async def test_once_the_new_model_serves_an_engine_that_fails_does_not_go_back() -> None:
    node = FakeNode(3)

    async def start() -> None:
        await FakeEngine.start(node.engines[1])
        node.engines[1].exit_code = 1

    node.engines[1].start = start  # type: ignore[method-assign]
    ended = await node.restart(model_path=NEW)
    assert [step.state for step in ended.engines] == ["ready", "failed", "ready"]
    assert str(ended.error).endswith("It is started again with the new settings.")
    assert node.engines[1].settings.model_path == NEW
    assert frozenset({OLD, NEW}) not in node.models


async def test_another_model_is_refused_for_one_engine_of_several() -> None:
    node = FakeNode()
    with pytest.raises(RestartRefused, match="it would serve org/new, and the others org/old; a"):
        await node.restart(engine="engine-1", model_path=NEW)
    served_as_old = {"model_path": NEW, "engine_args": ("--served-model-name", OLD)}
    assert (await node.restart(engine="engine-1", **served_as_old)).state == "done"
    alone = FakeNode(1)
    assert (await alone.restart(engine="engine-0", model_path=NEW)).state == "done"


async def test_what_the_start_refuses_is_refused_before_an_engine_is_touched() -> None:
    node = FakeNode()
    node.refused = "--no-such-flag"
    for flags, message in (
        (("--no-such-flag",), "unrecognized arguments: --no-such-flag"),
        (("--port", "1"), "the launcher sets these itself"),
    ):
        with pytest.raises(RestartRefused, match=message) as refused:
            await node.restart(engine_args=flags)
        assert refused.value.status == 400
    assert (node.log, node.restarts.last) == ([], None)


async def test_without_a_key_nobody_elsewhere_chooses_what_a_node_runs() -> None:
    node = FakeNode()
    for host, api_key, is_refused in (
        ("0.0.0.0", None, True),
        ("0.0.0.0", "env:KEY", False),
        ("127.0.0.1", None, False),
    ):
        balancer = replace(SETTINGS.balancer, host=host, api_key=api_key)
        launched = replace(SETTINGS, balancer=balancer)
        for order in (Order(model_path=OLD), Order(engine_args=())):
            with pytest.raises(RestartRefused) if is_refused else nullcontext() as refused:
                plan_restart(order, node.engines, {}, launched)  # type: ignore[arg-type]
            assert refused is None or refused.value.status == 403
        assert plan_restart(Order(), node.engines, {}, launched)  # type: ignore[arg-type]


async def test_one_restart_runs_at_a_time_and_ends_with_the_node() -> None:
    node = FakeNode()
    node.restarts.replacement.pause = lambda seconds: asyncio.Event().wait()  # type: ignore
    begun = await node.restarts.begin(Order())
    await asyncio.sleep(0)
    with pytest.raises(RestartRefused, match="a restart runs already") as refused:
        await node.restarts.begin(Order())
    assert refused.value.status == 409
    await node.restarts.end()
    assert (begun.state, begun.error) == ("failed", "the node stops")
    assert node.paused == {"engine-0"}, "nothing starts an engine of a node that stops"


def test_an_order_is_read_strictly() -> None:
    assert read_order(b"") == Order()
    assert read_order(b'{"engine": null, "engine_args": ["--a"]}') == Order(engine_args=("--a",))
    for body in (b"[", b"[]", b'{"engin": "a"}', b'{"engine_args": "--a"}', b'{"model_path": 1}'):
        with pytest.raises(RestartRefused) as refused:
            read_order(body)
        assert refused.value.status == 400


def test_an_engine_that_restarts_stays_on_the_list(tmp_path: Path) -> None:
    engines = [FakeEngine(FakeNode(), number) for number in range(2)]
    path = tmp_path / "engines.json"
    listed = EngineList(path, engines, "box:30000")  # type: ignore[arg-type]

    def states() -> dict[str, str]:
        listed.update()
        rows = msgspec.json.decode(path.read_bytes())["workers"]
        return {row["id"].partition("@")[0]: row["state"] for row in rows}

    assert states() == {"engine-0": "ready", "engine-1": "ready"}
    listed.restarting["engine-0"] = ""
    assert states() == {"engine-0": "restarting", "engine-1": "ready"}
    engines[0].exit_code = 0
    assert states() == {"engine-0": "restarting", "engine-1": "ready"}
    engines[0].exit_code, engines[0].starts = None, 2
    assert states() == {"engine-0.2": "restarting", "engine-1": "ready"}
    listed.restarting.clear()
    assert states() == {"engine-0.2": "ready", "engine-1": "ready"}


LARGE = replace(SETTINGS, model_path="/m/large", served_name="large")
SMALL = replace(SETTINGS, model_path="/m/small", served_name="small")


def two_models(*of: LaunchSettings) -> FakeNode:
    """A node with an engine for each of these settings."""
    node = FakeNode(len(of))
    for engine, settings in zip(node.engines, of, strict=True):
        engine.settings = engine.launched = settings
    return node


async def test_the_engines_of_one_model_restart_while_the_others_go_on() -> None:
    node = two_models(LARGE, SMALL, LARGE)
    assert (await node.restart(model="large")).state == "done"
    assert [engine.starts for engine in node.engines] == [2, 1, 2]
    assert (await node.restart(model="small", model_path="/m/new")).state == "done"
    assert [engine.starts for engine in node.engines] == [2, 2, 2]
    assert node.engines[1].settings == replace(SMALL, model_path="/m/new")


async def test_an_engine_waits_for_another_of_its_model_before_it_restarts() -> None:
    node = two_models(LARGE, SMALL, LARGE)
    node.engines[2].looks = 10**6  # it never gets ready
    ended = await node.restart(engine="engine-0")
    assert (ended.state, node.engines[0].starts) == ("failed", 1)
    assert "no other engine is ready" in (ended.error or "")


def test_what_is_no_restart_of_one_model_is_refused() -> None:
    node = two_models(LARGE, SMALL)
    launched = replace(SETTINGS, models=(Model(name="large"), Model(name="small")))
    ids = {engine.name: engine.name for engine in node.engines}
    for order, words in (
        (Order(model="other"), "model='other': must be one of large, small"),
        (Order(model_path="/m"), "name the model that gets it: large, small"),
        (Order(model="small", engine_args=("--served-model-name", "x")), "each keeps its name"),
    ):
        with pytest.raises(RestartRefused, match=re.escape(words)):
            plan_restart(order, node.engines, ids, launched)  # type: ignore[arg-type]
