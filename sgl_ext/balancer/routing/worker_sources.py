"""Follows the sources of workers: each list that one yields replaces its part of the table."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.workers import Workers
from sgl_ext.membership.member import Member, Membership, MembershipError
from sgl_ext.supervision import supervise

log = logging.getLogger(__name__)

RETRY_S = 1.0


class _Followed:
    """A source, how many workers its last list has, and why it has no newer one."""

    def __init__(self, source: Membership) -> None:
        self.source = source
        self.count: int | None = None
        self.fault = ""
        self.tried = asyncio.Event()


class WorkerSources(Collector):
    """A task for each source. A source that fails keeps its last list, and is tried again."""

    def __init__(
        self,
        sources: Sequence[Membership],
        workers: Workers,
        metrics: Metrics,
        retry_s: float = RETRY_S,
    ) -> None:
        self._workers = workers
        self._metrics = metrics
        self._retry_s = retry_s
        self._all = [_Followed(source) for source in sources]
        self._tasks: list[asyncio.Task[None]] = []
        metrics.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        help_text = "Whether a source of workers cannot be read now, so that its last list stays."
        family = GaugeMetricFamily("sgl_ext_membership_stale", help_text, labels=["source"])
        for each in self._all:
            family.add_metric([each.source.name], bool(each.fault) or each.count is None)
        yield family

    def rows(self) -> list[dict[str, Any]]:
        """Each source: its name, how many workers it lists, None before its first list, and why it
        cannot be read, "" if it can."""
        return [
            {"name": each.source.name, "workers": each.count, "fault": each.fault}
            for each in self._all
        ]

    def start(self) -> None:
        """Follows the sources from now on."""
        failed = self._metrics.background_failed
        self._tasks = [
            asyncio.create_task(
                supervise("membership", failed, partial(self._follow, each), self._retry_s)
            )
            for each in self._all
        ]

    async def wait_until_tried(self, timeout_s: float) -> None:
        """Waits until each source has given its first list or failed, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for each in self._all:
                    await each.tried.wait()

    async def close(self) -> None:
        """Follows the sources no longer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, each: _Followed) -> None:
        """Applies the lists of a source until it fails or ends."""
        try:
            async for members in each.source.lists():
                self._apply(each, members)
        except MembershipError as error:
            self._failed(each, str(error))
        except Exception as error:
            self._failed(each, f"{type(error).__name__}: {error}")
            raise
        finally:
            each.tried.set()

    def _apply(self, each: _Followed, members: tuple[Member, ...]) -> None:
        name = each.source.name
        if each.fault:
            log.warning("%s: can be read again", name)
        if not members and each.count != 0:
            log.warning("%s: lists no workers", name)
        each.fault, each.count = "", len(members)
        self._workers.apply(name, members)
        each.tried.set()

    def _failed(self, each: _Followed, fault: str) -> None:
        self._metrics.membership_faults.counts[(each.source.name,)] += 1
        if fault != each.fault:
            stays = "there is no list yet" if each.count is None else "its last list stays"
            log.warning("%s: %s; %s", each.source.name, fault, stays)
        each.fault = fault
