"""Whether a load balancer in front should send requests to this balancer.

    no engine is ready --> warming --> ready

An engine is ready once each process of the balancer has found it so.

A balancer is warm once each engine that is ready has sent what it holds, or after a time limit: an
engine that never does must not keep the balancer out. It stays warm from then on: an engine that
joins later has its own slow start. A process of a group is warm as soon as the group's index is,
so one that starts again need not wait.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sgl_ext.balancer.routing.prefixes import Prefixes
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.balancer.routing.workers import Workers, can_answer

log = logging.getLogger(__name__)


class Snapshots(Protocol):
    """What has come of the engines' snapshots."""

    def incomplete(self) -> Sequence[Worker]:
        """The ready workers whose snapshot is missing."""
        ...


@dataclass(eq=False)
class Readiness:
    """The answer for a readiness probe.

    limit_s: the longest time between the first ready worker and being warm.
    """

    workers: Workers
    snapshots: Snapshots
    prefixes: Prefixes
    limit_s: float
    clock: Callable[[], float] = time.monotonic
    is_warm: bool = field(default=False, init=False)
    _has_waited: bool = field(default=False, init=False)
    _since_s: float | None = field(default=None, init=False)

    def reason_against(self) -> str | None:
        """Why this balancer should get no requests; None if it should get some."""
        self.note()
        if not any(self.workers.is_ready_in_all(worker) for worker in self.workers.ready):
            return "no engine is ready"
        if not can_answer(self.workers.ready):
            return "no prefill or no decode engine is ready"
        if all(worker.is_stalled for worker in self.workers.ready):
            return "every engine stands still"
        if not self.is_warm:
            missing, ready = len(self.snapshots.incomplete()), len(self.workers.ready)
            return f"warming: {missing} of {ready} engines have not sent what they hold"
        return None

    def note(self) -> None:
        """Notes whether the balancer is warm now. Call it periodically."""
        self.is_warm = self.is_warm or self.prefixes.is_complete
        if self._has_waited or not self.workers.ready:
            return
        now_s = self.clock()
        if self._since_s is None:
            self._since_s = now_s
        missing = self.snapshots.incomplete()
        if missing and now_s - self._since_s < self.limit_s:
            return
        self._has_waited = True
        self.prefixes.completed()
        if missing and (self.prefixes.written is not None or not self.is_warm):
            names = ", ".join(worker.id for worker in missing)
            log.warning("ready after %g s without what these hold: %s", self.limit_s, names)
        self.is_warm = True
