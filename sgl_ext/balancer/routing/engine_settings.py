"""Sends engines what was changed since the start: pin budget, tenants, priorities and the like.

Each engine states the number of its version with each probe. One that has a lower number than this
balancer gets the version: after a reload, when it answers again, and when it has started again.
Several balancers of one engine do so alike, and the highest number wins.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from sgl_ext.balancer.metrics.instruments import Counter
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.balancer.routing.workers import Workers
from sgl_ext.settings.reloading import engine_values
from sgl_ext.wire.orders import SETTINGS_PATH, Version, read_applied

log = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=10)
_MOST_TEXT = 300


@dataclass(eq=False)
class EngineSettingsSender:
    """version: the one of this balancer. failures: counts engines that did not take theirs."""

    workers: Workers
    session: aiohttp.ClientSession
    version: Callable[[], Version]
    failures: Counter

    async def send(self) -> None:
        """Sends the version to each ready engine that does not have it. Call it periodically."""
        version = self.version()
        if values := engine_values(version):
            due = [w for w in self.workers.all if w.ready and _lacks(w, version)]
            sent = Version(version.number, values)
            await asyncio.gather(*(self._send(worker, sent) for worker in due))

    def rows(self) -> list[dict[str, Any]]:
        """For each engine whether it has the version, and why not."""
        version = self.version()
        is_for_them = bool(engine_values(version))
        rows = []
        for worker in self.workers.all:
            lacks = is_for_them and (worker.settings_number is None or _lacks(worker, version))
            lacks = lacks or (is_for_them and bool(worker.settings_fault))
            why = worker.settings_fault or "it gets them when it is ready"
            if worker.ready and worker.settings_number is None:
                why = "it has no sgl-ext, or another version of it"
            rows.append({"id": worker.id, "applied": not lacks, "why": why if lacks else ""})
        return rows

    async def _send(self, worker: Worker, version: Version) -> None:
        try:
            async with self.session.post(
                worker.url + SETTINGS_PATH,
                data=msgspec.json.encode(version),
                headers={"content-type": "application/json"},
                timeout=_TIMEOUT,
            ) as answer:
                fault = await self._taken(worker, version, answer)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            fault = f"no answer: {type(error).__name__}"
        if fault:
            self.failures.inc()
        if fault and fault != worker.settings_fault:
            log.error("%s does not take all reloaded settings: %s", worker.id, fault)
        worker.settings_fault = fault

    async def _taken(self, worker: Worker, version: Version, answer: aiohttp.ClientResponse) -> str:
        """What the engine did not take, and why; "" if it took all."""
        if answer.status != HTTPStatus.OK:
            return f"{answer.status}: {(await answer.text())[:_MOST_TEXT]}"
        worker.settings_number = version.number
        log.info("%s has the reloaded settings", worker.id)
        return read_applied(await answer.read()).why


def _lacks(worker: Worker, version: Version) -> bool:
    return worker.settings_number is not None and worker.settings_number < version.number
