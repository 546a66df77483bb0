"""Replaces one engine by one with other settings, while the others serve.

An engine that drains is listed as `restarting`: every balancer process sends it no new request,
and ends its subscription to the engine's events after the last answer. So an engine without
subscribers has no requests.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from sgl_ext.node.children import EngineList
from sgl_ext.node.engine import Engine
from sgl_ext.node.stages import stage_of
from sgl_ext.node.start.failure import reason_of
from sgl_ext.settings.schema import LaunchSettings

LOOK_S = 1.0
# A balancer that reconnects has no subscription for half a second.
QUIET_LOOKS = 3
# An engine that says nothing for so long hangs: it is not waited for.
SILENT_S = 30.0
# How long balancers may take to use an engine that is ready, or another one to become ready.
USED_S = 60.0
_STOP_S = 20.0


class Calls(Protocol):
    """`engine_calls.EngineCalls`."""

    async def is_ready(self, url: str) -> bool: ...
    async def balancers(self, url: str) -> int | None: ...
    async def in_flight(self, id: str) -> int | None: ...
    async def close(self) -> None: ...


class Keepers(Protocol):
    """What starts engines again that end: `keepers.Keepers`."""

    def pause(self, engine: Engine) -> None: ...
    def resume(self, engine: Engine) -> None: ...


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
    calls: Calls
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def renew(
        self, engine: Engine, settings: LaunchSettings, step: Step, *, is_held: bool = False
    ) -> None:
        """Replaces an engine by one with these settings, which gets no requests yet if it is held.

        Raises EngineFailed.
        """
        await self._require_other(engine)
        self.keepers.pause(engine)
        self.listed.restarting.add(engine.name)
        if engine.exit_code is None:
            await self._drain(engine, step)
            self.note(step, "stopping", step.reason)
            await engine.stop(_STOP_S)
        await self._start(engine, settings, step)
        if is_held:
            self.keepers.resume(engine)
            self.note(step, "ready", "it waits for others, as the model changes at once")
            return
        self.release(engine)
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
        self.listed.restarting.discard(engine.name)
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

    async def _require_other(self, engine: Engine) -> None:
        """Raises EngineUnused if an engine serves, and none of the others would in its place."""
        others = [e for e in self.engines if e is not engine]
        others = [e for e in others if e.name not in self.listed.restarting]
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
