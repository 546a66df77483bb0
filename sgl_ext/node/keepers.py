"""The tasks that start a node's processes again when they end; each can pause. Engines that hang
are ended for that."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import aiohttp

from scheduler.silence import RESTART_S
from sgl_ext.balancer.reporting.event_log import EventLog
from sgl_ext.node.child import Child
from sgl_ext.node.children import EngineList
from sgl_ext.node.failure import cause_of, reason_of
from sgl_ext.settings.secrets import EngineSecret
from sgl_ext.supervision import supervise
from sgl_ext.wire.events import SUBSCRIBERS_PATH, read_subscribers
from sgl_ext.wire.headers import SECRET_HEADER

# The certificate of the node's own balancer names what clients call it, not this machine's address.
OWN_TLS = False
_TIMEOUT = aiohttp.ClientTimeout(total=5)
_FAILURES = (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError)
_RETRY_S = 1.0
_BACKOFF_S = (1.0, 60.0)
HUNG_LOOK_S = 5.0


class Keepers:
    """A task for each child, from `resume` to `pause`. Both may be called again."""

    def __init__(self, say: Callable[[str], None], events: EventLog | None = None) -> None:
        """say: tells the operator. events: those of the node."""
        self._say = say
        self._events = events or EventLog()
        self._tasks: dict[Child, asyncio.Task[None]] = {}

    def resume(self, child: Child) -> None:
        """Keeps a child from now on."""
        if child not in self._tasks:
            # The launcher has no metrics; its log has the reason of a failure.
            name, keep = (
                f"the restart of {child.name}",
                partial(keep_running, child, self._say, self._events),
            )
            self._tasks[child] = asyncio.create_task(
                supervise(name, lambda task: None, keep, _RETRY_S)
            )

    def pause(self, child: Child) -> None:
        """Leaves a child to the caller."""
        if (task := self._tasks.pop(child, None)) is not None:
            task.cancel()

    def end(self) -> None:
        """Keeps no child any longer."""
        for child in tuple(self._tasks):
            self.pause(child)


async def keep_running(
    child: Child, say: Callable[[str], None], events: EventLog | None = None
) -> None:
    """Restarts a child whenever it ends, after a delay that grows if it ends soon again."""
    shortest, longest = _BACKOFF_S
    backoff = shortest
    while True:
        started = time.monotonic()
        code = await child.wait()
        backoff = shortest if time.monotonic() - started > longest else backoff
        cause = cause_of(child)
        child.crashed(cause, time.time())
        if events is not None:
            events.add("crashed", child.name, f"{cause}; it restarts in {backoff:g} s")
        what = f"{child.name} ended with exit code {code} and restarts in {backoff:g} s"
        say(f"{what}:\n{reason_of(child)}")
        await asyncio.sleep(backoff)
        backoff = min(backoff * 2, longest)
        await child.start()
        if events is not None:
            events.add("restarted", child.name, f"after {cause}")


class EngineCalls:
    """What the launcher reads of engines that it restarts, and of those that hang.

    Each call returns within seconds, and raises nothing.
    """

    def __init__(self, balancer_url: str, engine_secret: str | None) -> None:
        """engine_secret: the setting."""
        self._balancer_url = balancer_url
        self._engine_secret = engine_secret
        self._session: aiohttp.ClientSession | None = None

    async def is_ready(self, url: str) -> bool:
        """Whether the engine at this URL takes requests."""
        with suppress(*_FAILURES):
            async with self._get(f"{url}/ready") as answer:
                return answer.status == HTTPStatus.OK
        return False

    async def balancers(self, url: str) -> int | None:
        """How many processes of balancers send requests to the engine, or wait for answers of it.

        A balancer follows an engine's prefix events until the last answer of one that drains. None
        if the engine does not answer; 0 if it listens no longer.
        """
        try:
            async with self._get(url + SUBSCRIBERS_PATH) as answer:
                return read_subscribers(await answer.read())
        except aiohttp.ClientConnectorError:
            return 0
        except _FAILURES:
            return None

    async def drained(self) -> set[str]:
        """The ids of the engines that an operator drained; none if the balancer does not say."""
        with suppress(*_FAILURES):
            return {str(r["id"]) for r in await self._rows() if r["is_drained"]}
        return set()

    async def in_flight(self, id: str) -> int | None:
        """How many requests the node's balancer has at the engine; None if it does not say."""
        with suppress(*_FAILURES):
            rows = await self._rows()
            return sum(int(row["in_flight"]) for row in rows if row["id"] == id)
        return None

    async def hung_s(self) -> dict[str, float]:
        """How long engines hang, by their ids, as a process of the node's balancer sees it; none if
        it does not say."""
        with suppress(*_FAILURES):
            rows = await self._rows()
            return {str(row["id"]): float(row["hung_s"]) for row in rows if row["hung_s"]}
        return {}

    async def _rows(self) -> list[dict[str, Any]]:
        """The engines as the node's balancer lists them. Raises one of `_FAILURES`."""
        async with self._get(f"{self._balancer_url}/health") as answer:
            return list((await answer.json())["workers"])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _get(self, url: str) -> "aiohttp.client._RequestContextManager":
        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=OWN_TLS)
            self._session = aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector)
        secret = EngineSecret(self._engine_secret).sent  # its file may have changed
        return self._session.get(url, headers={SECRET_HEADER: secret})


@dataclass(frozen=True, eq=False)
class HungEngines:
    """Ends the node's engines that hang. Their processes run, so nothing would start them again:
    SGLang itself ends a scheduler only after its `--watchdog-timeout`.

    end: ends an engine at once. say: tells the operator.
    """

    engines: Sequence[Child]
    listed: EngineList
    calls: EngineCalls
    say: Callable[[str], None]
    end: Callable[[Child], Awaitable[None]]

    async def look(self) -> None:
        """Ends the engines that have hung for RESTART_S, as the balancer sees them, but for those
        that restart on order. Call it every HUNG_LOOK_S."""
        hung_s = await self.calls.hung_s()
        for engine in self.engines:
            is_hung = hung_s.get(self.listed.id_of(engine), 0.0) >= RESTART_S
            is_kept = engine.exit_code is None and engine.name not in self.listed.restarting
            if is_hung and is_kept:
                self.say(f"{engine.name} has hung for {RESTART_S:g} s and is ended")
                await self.end(engine)


async def end_at_once(engine: Child) -> None:
    """Kills an engine's processes: a scheduler that hangs would not end by itself."""
    await engine.stop(0.0)
