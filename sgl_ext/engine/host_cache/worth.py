"""Whether a cache saves more time than it takes, by what both are while the engine serves.

    on --a window in which requests took longer with it--> off --RETRY_S--> on

What a cache replaces is not done, so its time is estimated: from the times when it was done because
the cache had no result, or to check one. Work is measured in units, for example characters.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Lock

from sgl_ext.engine.core.counters import counter

WINDOW_S = 60.0
LEAST_USES = 50
RETRY_S = 600.0
# A loss this small in a request turns no cache off.
TOLERATED_S = 0.0002
_logger = logging.getLogger(__name__)


class Worth:
    """The account of one cache. It is thread-safe.

    name: the cache's, in metrics and the log. now: a clock.
    took_s, replaced_s: since the start, what the cache took, and what the work that it replaced
        would have taken.
    """

    def __init__(self, name: str, now: Callable[[], float] = time.perf_counter) -> None:
        self.name = name
        self.now = now
        self.took_s = self.replaced_s = 0.0
        self._units = self._units_s = 0.0
        self._off_until_s: float | None = None
        self._lock = Lock()
        self._begin()

    @property
    def is_off(self) -> bool:
        """Whether it turned off and was not tried again."""
        return self._off_until_s is not None

    def is_on(self) -> bool:
        """Whether to use the cache now."""
        if self._off_until_s is None:
            return True
        if self.now() < self._off_until_s:
            return False
        with self._lock:
            self._off_until_s = None
            self._begin()
        return True

    def learn(self, units: float, seconds: float) -> None:
        """Notes what so much work took without the cache."""
        with self._lock:
            self._units += units
            self._units_s += seconds

    def note(self, took_s: float, units: float) -> bool:
        """Notes what the cache took in a request, and how much work it replaced. Returns whether it
        turned off. Work that was done because the cache had no result is either in both or in
        neither: it is done without a cache, too."""
        with self._lock:
            replaced_s = units * self._units_s / self._units if self._units else 0.0
            self.took_s += took_s
            self.replaced_s += replaced_s
            self._lost_s += took_s - replaced_s
            self._uses += 1
            if self._uses < LEAST_USES or self.now() - self._begun_s < WINDOW_S:
                return False
            turns_off = self._off_until_s is None and self._lost_s > TOLERATED_S * self._uses
            if turns_off:
                self._off_until_s = self.now() + RETRY_S
            self._begin()
            return turns_off

    def _begin(self) -> None:
        """Begins a window. What was learned counts half of what will be."""
        self._begun_s, self._lost_s, self._uses = self.now(), 0.0, 0
        self._units /= 2
        self._units_s /= 2


def turned_off(worth: Worth) -> None:
    """Counts and logs that a cache turned off."""
    counter("host_caches_turned_off").labels(worth.name).inc()
    _logger.warning(
        "sgl-ext: the cache of %s is off for %.0f min: requests take longer with it",
        worth.name,
        RETRY_S / 60,
    )
