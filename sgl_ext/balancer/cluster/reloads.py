"""Reloads the settings of this balancer, with all its processes and its engines.

Behind a launcher the launcher reads its file, as it knows its flags. A balancer alone reads its
own. Either writes the new version to a file that all processes look at; each of them applies it.
"""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sgl_ext.balancer.cluster.launcher import Launcher, LauncherUnreachable
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.engine_settings import EngineSettingsSender
from sgl_ext.settings.reloading import LiveSettings, NothingToRead, in_words
from sgl_ext.settings.schema import BalancerSettings, SettingsError

log = logging.getLogger(__name__)


class Reloads:
    """apply: makes the parts of this process use settings."""

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

    async def reload(self) -> dict[str, Any]:
        """Reads the settings again, applies what can change, and tells what does and what does not.

        Raises SettingsError if they are wrong, NothingToRead without a file; nothing changes then.
        """
        try:
            document = await self._read()
        except (SettingsError, LauncherUnreachable) as error:
            log.error("reload: %s; nothing was changed", error)
            if not isinstance(error, NothingToRead):
                self._failures.inc()
            raise
        self.refresh()
        await self._sender.send()
        log.info("reload: %s", in_words(document))
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
