"""Restarts engines one after another, so that no request is lost.

    waiting --> draining --> stopping --> starting --> ready
                                             |
                                             +--> failed, and back to the settings before

Requests that find no other engine wait in the balancer's queue.

A node serves one model. If the new one has another name, the first half of the engines start with
it and are held back; then they take over at once, and the other half restarts after that.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any

from sgl_ext.node.engine import Engine
from sgl_ext.node.replacement import EngineFailed, EngineUnused, Replacement, Step
from sgl_ext.node.restart_order import Order, Plan, RestartRefused, plan_restart
from sgl_ext.settings.schema import LaunchSettings, SettingsError

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
        self.replacement.say(f"{self.last.id}: {_in_words(order, plan)}")
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
        self.replacement.listed.restarting = {engine.name for engine, _ in plan.rest}
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
