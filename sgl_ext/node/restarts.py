"""Restarts engines one after another, so that no request is lost.

    waiting --> draining --> stopping --> starting --> ready
                                             |
                                             +--> failed, and back to the settings before

Requests that find no other engine wait in the balancer's queue.

If the new model of a node of one has another name, the first half of the engines start with it and
are held back; then they take over at once, and the other half restarts after that. Of a node of
several models, the engines of one restart while the others serve, and the names stay.

A `Replacement` replaces one engine by one with other settings, while the others serve. An engine
that drains is listed as `restarting`: every balancer process sends it no new request, and ends its
subscription to the engine's events after the last answer. So an engine without subscribers has no
requests.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from sgl_ext.balancer.reporting.event_log import EventLog
from sgl_ext.node.child import stage_of
from sgl_ext.node.children import Engine, EngineList, served_model
from sgl_ext.node.failure import reason_of
from sgl_ext.node.hardware import gpus_of_engine
from sgl_ext.node.keepers import EngineCalls, Keepers
from sgl_ext.settings.schema import LaunchSettings, SettingsError
from sgl_ext.settings.secrets import is_reachable
from sgl_ext.settings.sources import check_launch


class RestartRefused(Exception):
    """Nothing was restarted. The message is for the caller."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a caller wants.

    engine: the name, id or URL of one engine; None: all, one after another.
    model: the name of a model, whose engines restart; None: of all.
    model_path: None: the one that each engine has.
    engine_args: SGLang's flags after those of the launcher's own start, where the later of two
        wins; () are the launcher's alone. None: those that each engine has.
    """

    engine: str | None = None
    model: str | None = None
    model_path: str | None = None
    engine_args: tuple[str, ...] | None = None


class Plan(NamedTuple):
    """Engines in the order of their restart, each with its new settings.

    first: those that restart before the node serves another model; all, if the model stays.
    rest: those that restart after that.
    """

    first: list[tuple[Engine, LaunchSettings]]
    rest: list[tuple[Engine, LaunchSettings]]

    @property
    def all(self) -> list[tuple[Engine, LaunchSettings]]:
        return [*self.first, *self.rest]


def read_order(body: bytes) -> Order:
    """Raises RestartRefused 400 for a body that is no order."""
    try:
        return msgspec.json.decode(body or b"{}", type=Order)
    except msgspec.MsgspecError as error:
        raise RestartRefused(HTTPStatus.BAD_REQUEST, f"{error}") from None


def plan_restart(
    order: Order, engines: Sequence[Engine], ids: Mapping[str, str], launched: LaunchSettings
) -> Plan:
    """The plan for an order.

    ids: the engines' ids by their names. launched: the settings of the launcher's own start.
    Raises RestartRefused for an unknown engine, for settings that the launcher's start would
    refuse, for another model on one engine of several, and for changes that anyone could order.
    """
    _require_key(order, launched)
    chosen = _chosen(order, engines, ids)
    if order.model_path is not None and len({engine.launched for engine in chosen}) > 1:
        known = ", ".join(dict.fromkeys(served_model(engine.settings) for engine in engines))
        message = f"model_path={order.model_path!r}: name the model that gets it: {known}"
        raise RestartRefused(HTTPStatus.BAD_REQUEST, message)
    steps = [(engine, _changed(engine, order)) for engine in chosen]
    for engine, settings in {settings: (engine, settings) for engine, settings in steps}.values():
        try:
            check_launch(settings)
            _require_same_gpus(engine, settings)
        except SettingsError as error:
            raise RestartRefused(HTTPStatus.BAD_REQUEST, f"{error}") from None
    served = {served_model(engine.settings) for engine in engines}
    if {served_model(settings) for _, settings in steps} <= served:
        return Plan(steps, [])
    if launched.models:
        new = next(name for _, one in steps if (name := served_model(one)) not in served)
        message = f"engine_args: {new!r}: of several models each keeps its name"
        raise RestartRefused(HTTPStatus.BAD_REQUEST, message)
    if len(chosen) < len(engines):
        new, old = served_model(steps[0][1]), ", ".join(sorted(served))
        reason = f"a node serves one model: restart all engines, or serve {new} as {old}"
        message = f"engine={order.engine!r}: it would serve {new}, and the others {old}; {reason}"
        raise RestartRefused(HTTPStatus.BAD_REQUEST, message)
    half = max(1, len(steps) // 2)
    return Plan(steps[:half], steps[half:])


def _require_same_gpus(engine: Engine, settings: LaunchSettings) -> None:
    """Raises SettingsError if the engine would take other GPUs than it was given at its start."""
    needed, has = gpus_of_engine(settings), gpus_of_engine(engine.settings).gpus
    if needed.gpus != has:
        keeps = f"{engine.name} keeps those of the node's start, {has}: start the node again"
        raise SettingsError(f"engine_args: {needed.shown} needs {needed.gpus} GPUs, and {keeps}")


def _require_key(order: Order, launched: LaunchSettings) -> None:
    """Some flags and models run code: not everyone who reaches a port may choose them."""
    balancer = launched.balancer
    is_guarded = balancer.api_key is not None or balancer.keys is not None
    changes = order.model_path is not None or order.engine_args is not None
    if changes and not is_guarded and is_reachable(balancer.host):
        where = f"other machines can reach this node (host={balancer.host!r})"
        message = f"model_path, engine_args: {where}, so it needs --api-key or --keys for that"
        raise RestartRefused(HTTPStatus.FORBIDDEN, message)


def _chosen(order: Order, engines: Sequence[Engine], ids: Mapping[str, str]) -> Sequence[Engine]:
    name = order.engine
    if order.model is not None:
        served = {engine: served_model(engine.settings) for engine in engines}
        engines = [engine for engine in engines if served[engine] == order.model]
        if not engines:
            known = ", ".join(dict.fromkeys(served.values()))
            message = f"model={order.model!r}: must be one of {known}"
            raise RestartRefused(HTTPStatus.NOT_FOUND, message)
    if name is None:
        return engines
    found = [each for each in engines if name in (each.name, ids[each.name], each.url)]
    if not found:
        known = ", ".join(each.name for each in engines)
        raise RestartRefused(HTTPStatus.NOT_FOUND, f"engine={name!r}: must be one of {known}")
    return found


def _changed(engine: Engine, order: Order) -> LaunchSettings:
    settings, launched = engine.settings, engine.launched
    if order.model_path is not None:
        settings = replace(settings, model_path=order.model_path)
    if order.engine_args is not None:
        engine_args = (*launched.engine_args, *order.engine_args)
        settings = replace(settings, engine_args=engine_args)
    return settings


LOOK_S = 1.0
# A balancer that reconnects has no subscription for half a second.
QUIET_LOOKS = 3
# An engine that says nothing for so long hangs: it is not waited for.
SILENT_S = 30.0
# How long balancers may take to use an engine that is ready, or another one to become ready.
USED_S = 60.0
_STOP_S = 20.0


def store_limit_s(settings: LaunchSettings) -> float:
    """How long an engine that ends may store what it holds in the tier that engines share."""
    return settings.balancer.drain_s if settings.tier_bytes else 0.0


class EngineFailed(Exception):
    """An engine did not start, or could not be replaced. The message says why."""


class EngineUnused(EngineFailed):
    """The engine itself is not at fault, and stays as it is."""


@dataclass
class Step:
    """One engine of a restart. state: as in the picture in `restarts`."""

    name: str
    state: str = "waiting"
    reason: str = ""


@dataclass(eq=False)
class Replacement:
    """Replaces engines, one at a time.

    settings: those of the launcher's own start, for their limits.
    say: tells the operator.
    """

    settings: LaunchSettings
    engines: Sequence[Engine]
    listed: EngineList
    keepers: Keepers
    calls: EngineCalls
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    events: EventLog = field(default_factory=EventLog)

    async def renew(
        self, engine: Engine, settings: LaunchSettings, step: Step, *, is_held: bool = False
    ) -> None:
        """Replaces an engine by one with these settings, which gets no requests yet if it is held.

        Raises EngineFailed.
        """
        drained = await self.calls.drained()
        is_drained = self.listed.id_of(engine) in drained
        if not is_drained:
            await self._require_other(engine, drained)
        self.keepers.pause(engine)
        self.listed.restarting[engine.name] = served_model(settings)
        if engine.exit_code is None:
            await self._drain(engine, step)
            self.note(step, "stopping", step.reason)
            await engine.stop(_STOP_S + store_limit_s(self.settings))
        await self._start(engine, settings, step)
        if is_held:
            self.keepers.resume(engine)
            self.note(step, "ready", "it waits for others, as the model changes at once")
            return
        self.release(engine)
        if is_drained:
            self.note(step, "ready", "it stays drained, as it was")
            return
        await self.until_used(engine)
        self.note(step, "ready", "")

    async def _drain(self, engine: Engine, step: Step) -> None:
        """Returns once no balancer has a request there, or after the limit, which it says."""
        limit_s = self.settings.restart_drain_s
        heard_s, quiet = self.clock(), 0
        deadline = heard_s + limit_s
        self.note(step, "draining", "")
        while quiet < QUIET_LOOKS and engine.exit_code is None:
            await self.pause(LOOK_S)
            balancers = await self.calls.balancers(engine.url)
            quiet = quiet + 1 if balancers == 0 else 0
            heard_s = heard_s if balancers is None else self.clock()
            count = await self.calls.in_flight(self.listed.id_of(engine))
            step.reason = f"{count} requests run" if count else ""
            if self.clock() - heard_s >= SILENT_S:
                self.say(f"{engine.name}: it does not answer, and is not waited for")
                return
            if quiet < QUIET_LOOKS and self.clock() > deadline:
                step.reason = f"{count or 'some'} requests still ran after {limit_s:g} s"
                self.say(f"{engine.name}: {step.reason}; they end now (restart-drain-s)")
                return

    async def _start(self, engine: Engine, settings: LaunchSettings, step: Step) -> None:
        """Returns once the engine takes requests. Raises EngineFailed."""
        engine.configure(settings)
        self.note(step, "starting", step.reason)
        await engine.start()
        limit_s = self.settings.start_timeout_s
        deadline = self.clock() + limit_s
        while not await self.calls.is_ready(engine.url):
            if engine.exit_code is not None:
                code, reason = engine.exit_code, reason_of(engine)
                raise EngineFailed(f"it ended with exit code {code}:\n{reason}")
            step.reason = stage_of(engine)[0]
            if self.clock() > deadline:
                raise EngineFailed(f"it was not ready after {limit_s:g} s; its log: {engine.log}")
            await self.pause(LOOK_S)

    async def put_back(self, engine: Engine, before: LaunchSettings) -> str:
        """Starts an engine with its settings of before; whether it serves with them, in words."""
        self.keepers.pause(engine)
        await engine.stop(_STOP_S)
        try:
            await self._start(engine, before, Step(engine.name))
            result = "It serves again with the settings that it had."
        except EngineFailed as failed:
            result = f"With the settings that it had it does not start either: {failed}"
        self.release(engine)
        self.say(f"{engine.name}: {result}")
        return result

    def release(self, engine: Engine) -> None:
        """Lets the balancer use an engine, and lets it be started again if it ends."""
        self.listed.restarting.pop(engine.name, None)
        self.keepers.resume(engine)

    async def until_used(self, engine: Engine) -> None:
        """Returns once every process of the balancer uses the engine. Raises EngineUnused."""
        wanted = self.settings.balancer.processes

        async def is_used() -> bool:
            return (await self.calls.balancers(engine.url) or 0) >= wanted

        if not await self._eventually(is_used):
            raise EngineUnused(f"it is ready, but the balancer did not use it within {USED_S:g} s")

    def note(self, step: Step, state: str, reason: str) -> None:
        """Records a step's state, and says a new one."""
        if state != step.state:
            self.say(f"{step.name}: {state}{f': {reason}' if reason else ''}")
        step.state, step.reason = state, reason

    async def _require_other(self, engine: Engine, drained: Collection[str]) -> None:
        """Raises EngineUnused if an engine serves, and none of the others would in its place. Those
        that an operator drained would not."""
        others = [e for e in self.engines if e is not engine and e.launched == engine.launched]
        others = [e for e in others if e.name not in self.listed.restarting]
        if others and all(self.listed.id_of(e) in drained for e in others):
            reason = "it was not restarted, as the others are drained. Take one back: undrain"
            raise EngineUnused(reason)
        others = [e for e in others if self.listed.id_of(e) not in drained]
        if engine.name in self.listed.restarting or not others:
            return
        if not await self.calls.is_ready(engine.url):
            return
        if not await self._eventually(partial(self._any_ready, others)):
            raise EngineUnused("it was not restarted, as no other engine is ready")

    async def _any_ready(self, engines: Sequence[Engine]) -> bool:
        return any([await self.calls.is_ready(engine.url) for engine in engines])

    async def _eventually(self, holds: Callable[[], Awaitable[bool]]) -> bool:
        deadline = self.clock() + USED_S
        while not (held := await holds()) and self.clock() < deadline:
            await self.pause(LOOK_S)
        return held


log = logging.getLogger(__name__)


@dataclass
class Restart:
    """A restart, as its caller sees it. state: "running", "done" or "failed"."""

    id: str
    engines: list[Step]
    state: str = "running"
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(eq=False)
class Restarts:
    """The restarts of a node's engines, one at a time.

    check: raises SettingsError for settings with which no engine would start.
    last: the restart that runs or ran last.
    """

    replacement: Replacement
    check: Callable[[LaunchSettings], Awaitable[None]]
    last: Restart | None = field(default=None, init=False)
    _count: int = field(default=0, init=False)
    _is_checking: bool = field(default=False, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    async def begin(self, order: Order) -> Restart:
        """Checks an order and begins it. Raises RestartRefused."""
        if self._is_checking or (self.last is not None and self.last.state == "running"):
            message = "a restart runs already: GET /sgl_ext/restart shows it"
            raise RestartRefused(HTTPStatus.CONFLICT, message)
        engines, listed = self.replacement.engines, self.replacement.listed
        ids = {engine.name: listed.id_of(engine) for engine in engines}
        plan = plan_restart(order, engines, ids, self.replacement.settings)
        self._is_checking = True
        try:
            for settings in {settings for _, settings in plan.all}:
                await self.check(settings)
        except SettingsError as error:
            raise RestartRefused(HTTPStatus.BAD_REQUEST, f"{error}") from None
        finally:
            self._is_checking = False
        self._count += 1
        steps = [Step(engine.name) for engine, _ in plan.all]
        self.last = Restart(f"restart-{self._count}", steps)
        words = _in_words(order, plan)
        self.replacement.say(f"{self.last.id}: {words}")
        self.replacement.events.add("restart", self.last.id, words)
        self._task = asyncio.create_task(self._run(self.last, plan))
        return self.last

    def drains(self, name: str) -> bool:
        """Whether an engine finishes its requests, to be restarted."""
        steps = () if self.last is None else self.last.engines
        return any(s.name == name and s.state in ("draining", "stopping") for s in steps)

    async def end(self) -> None:
        """Ends a restart that runs, whatever state its engines are in."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.replacement.calls.close()

    async def _run(self, restart: Restart, plan: Plan) -> None:
        steps = {step.name: step for step in restart.engines}
        try:
            await self._roll(plan, steps)
            failed = [step for step in restart.engines if step.state == "failed"]
            restart.error = "; ".join(f"{step.name}: {step.reason}" for step in failed) or None
        except EngineFailed as failed:
            restart.error = str(failed)
        except asyncio.CancelledError:
            restart.state, restart.error = "failed", "the node stops"
            raise
        except Exception as error:
            log.exception("%s", restart.id)
            restart.error = f"{type(error).__name__}: {error}"
        for engine, _ in plan.all:
            self.replacement.release(engine)
        restart.state = "failed" if restart.error else "done"
        kind = "restart failed" if restart.error else "restart"
        self.replacement.events.add(kind, restart.id, restart.error or "done")
        self.replacement.say(f"{restart.id}: {restart.error or 'done'}")

    async def _roll(self, plan: Plan, steps: dict[str, Step]) -> None:
        before = {engine: engine.settings for engine, _ in plan.all}
        is_held, changed = bool(plan.rest), list[Engine]()
        for engine, settings in plan.first:
            step = steps[engine.name]
            try:
                await self.replacement.renew(engine, settings, step, is_held=is_held)
            except EngineFailed as failed:
                await self._give_up(engine, step, failed, before[engine])
                for other in changed if is_held else ():
                    await self.replacement.put_back(other, before[other])
                    self.replacement.note(steps[other.name], "waiting", "")
                raise EngineFailed(f"{engine.name}: {step.reason}") from None
            changed.append(engine)
        if is_held:
            await self._change_over(changed, plan, steps)

    async def _change_over(
        self, changed: Sequence[Engine], plan: Plan, steps: dict[str, Step]
    ) -> None:
        """Lets the changed engines serve in place of the rest, and changes the rest. One of these
        that fails cannot go back: the others serve the new model."""
        self.replacement.say(
            "the engines with the new model serve from now on, and the others drain"
        )
        restarting = {engine.name: served_model(settings) for engine, settings in plan.rest}
        self.replacement.listed.restarting = restarting
        for engine in changed:
            step = steps[engine.name]
            try:
                await self.replacement.until_used(engine)
                self.replacement.note(step, "ready", "")
            except EngineUnused as failed:
                self.replacement.note(step, "failed", f"{failed}")
        for engine, settings in plan.rest:
            step = steps[engine.name]
            try:
                await self.replacement.renew(engine, settings, step)
            except EngineFailed as failed:
                reason = f"{failed}\nIt is started again with the new settings."
                self.replacement.note(step, "failed", reason)
                self.replacement.release(engine)

    async def _give_up(
        self, engine: Engine, step: Step, failed: EngineFailed, before: LaunchSettings
    ) -> None:
        """Puts an engine that failed back, and says why it failed and what it does now."""
        self.replacement.note(step, "failed", f"{failed}")
        is_as_before = engine.exit_code is None and engine.settings == before
        if not isinstance(failed, EngineUnused) and not is_as_before:
            step.reason += f"\n{await self.replacement.put_back(engine, before)}"


def _in_words(order: Order, plan: Plan) -> str:
    words = f"{', '.join(engine.name for engine, _ in plan.all)} restart"
    changes = []
    if order.model_path is not None:
        changes.append(f"the model {order.model_path}")
    if order.engine_args is not None:
        flags = " ".join(order.engine_args)
        changes.append(f"the launcher's flags and {flags}" if flags else "the launcher's flags")
    if not changes:
        return words
    return f"{words} with {' and '.join(changes)}, until the launcher ends"
