"""The way to the launcher of this node: HTTP over a Unix socket in its log directory.

Only the launcher can start an engine again. It also knows how far one that starts has come.

`Reloads` reads the settings again, for all processes of this balancer and its engines. Behind a
launcher the launcher reads its file, as it knows its flags. A balancer alone reads its own. Either
writes the new version to a file that all processes look at; each of them applies it.
"""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

import aiohttp
import orjson

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.engine_settings import EngineSettingsSender
from sgl_ext.settings.reloading import LiveSettings, NothingToRead, in_words
from sgl_ext.settings.schema import BalancerSettings, SettingsError
from sgl_ext.wire.launcher import CHILDREN, RELOAD, RESTART, EngineRow, engines_in

# It checks new flags with SGLang's parser before it answers, which takes seconds.
_TIMEOUT = aiohttp.ClientTimeout(total=60)
_LOOK_TIMEOUT = aiohttp.ClientTimeout(total=1)
_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError)


class LauncherUnreachable(Exception):
    """There is no launcher, or it does not answer. The message says which."""


class Answer(NamedTuple):
    """The status and the JSON document that the launcher answered."""

    status: int
    document: Any


class Launcher:
    """The launcher of this node.

    is_there: whether a launcher started this balancer.
    """

    def __init__(self, socket: str | None) -> None:
        """socket: the path of the launcher's socket; None: there is no launcher."""
        self.is_there = socket is not None
        self._session: aiohttp.ClientSession | None = None
        if socket is not None:
            connector = aiohttp.UnixConnector(socket, limit=4)
            self._session = aiohttp.ClientSession("http://launcher", connector=connector)

    async def children(self) -> list[EngineRow]:
        """The engines that the launcher keeps, or on Ray the process that keeps them. [] if there
        is no launcher, or if it does not answer within a second."""
        try:
            return engines_in((await self._ask("GET", CHILDREN)).document)
        except (LauncherUnreachable, ValueError):
            return []

    async def restart(self, body: bytes) -> Answer:
        """Begins a restart. Raises LauncherUnreachable."""
        return await self._ask("POST", RESTART, body)

    async def last_restart(self) -> Answer:
        """The last restart. Raises LauncherUnreachable."""
        return await self._ask("GET", RESTART)

    async def reload(self) -> Answer:
        """Reads the node's settings again. Raises LauncherUnreachable."""
        return await self._ask("POST", RELOAD, b"")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> Answer:
        if self._session is None:
            message = "No launcher started this balancer: restart engines where they were started."
            raise LauncherUnreachable(message)
        limit = _LOOK_TIMEOUT if body is None else _TIMEOUT
        try:
            async with self._session.request(method, path, data=body, timeout=limit) as answer:
                return Answer(answer.status, orjson.loads(await answer.read()))
        except _FAILURES as error:
            raise LauncherUnreachable(f"The launcher does not answer: {error!r}") from None


log = logging.getLogger(__name__)


def _ignored(kind: str, subject: str, text: str) -> None:
    """Where there are no events."""


class Reloads:
    """add_event: adds an event of this kind, about this subject, with this text.
    apply: makes the parts of this process use settings."""

    def __init__(
        self,
        live: LiveSettings[BalancerSettings],
        launcher: Launcher,
        sender: EngineSettingsSender,
        apply: Callable[[BalancerSettings], None],
        metrics: Metrics,
    ) -> None:
        self._live = live
        self._launcher = launcher
        self._sender = sender
        self._apply = apply
        self._applied = live.version.number
        self._reloads = metrics.settings_reloads
        self._failures = metrics.settings_reload_failures
        self.add_event: Callable[[str, str, str], object] = _ignored

    async def reload(self) -> dict[str, Any]:
        """Reads the settings again, applies what can change, and tells what does and what does not.

        Raises SettingsError if they are wrong, NothingToRead without a file; nothing changes then.
        """
        try:
            document = await self._read()
        except (SettingsError, LauncherUnreachable) as error:
            log.error("reload: %s; nothing was changed", error)
            if not self._launcher.is_there:  # which adds its own
                self.add_event("reload refused", "balancer", str(error))
            if not isinstance(error, NothingToRead):
                self._failures.inc()
            raise
        self.refresh()
        await self._sender.send()
        log.info("reload: %s", in_words(document))
        if not self._launcher.is_there:
            self.add_event("reloaded", "balancer", in_words(document))
        return {**document, "engines": self._sender.rows()}

    async def _read(self) -> dict[str, Any]:
        if not self._launcher.is_there:
            # It may read large files, to check them.
            after = await asyncio.to_thread(self._live.read)
            return self._live.change(after).as_json()
        answer = await self._launcher.reload()
        if answer.status == HTTPStatus.CONFLICT:
            raise NothingToRead(answer.document["error"])
        if answer.status != HTTPStatus.OK:
            raise SettingsError(answer.document["error"])
        document: dict[str, Any] = answer.document
        return document

    def refresh(self) -> None:
        """Applies what was changed, by this process or by another. Call it periodically."""
        self._live.refresh()
        if (number := self._live.version.number) > self._applied:
            self._applied = number
            self._apply(self._live.current)
            self._reloads.inc()
            log.info("new settings are in effect")
