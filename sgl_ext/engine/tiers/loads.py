"""Measures in a scheduler what loads from the host take, and what computing prompts takes.

Measuring reads a clock, so each rank measures something else. All ranks decide by the figures that
the entry rank's orders carry (`sgl_ext.engine.scheduler.iteration`).
"""

from collections import deque
from collections.abc import Iterable

from scheduler.load_cost import LoadCost
from sgl_ext.engine.sglang_types import HiCacheAck, ScheduleBatch, Scheduler

# SGLang has three loads under way at most.
_MOST_UNDER_WAY = 8


class Loads:
    """The measurements of one scheduler. cost: what they come to."""

    def __init__(self) -> None:
        self.cost = LoadCost()
        self._took_s: deque[float] = deque(maxlen=_MOST_UNDER_WAY)
        self._computed = 0, 0

    def started(self, took_s: float) -> None:
        """A load was started, by a call that took so long. Where a device's events have no clock,
        such as the CPU's, the call has copied everything when it returns."""
        self._took_s.append(took_s)

    def finished(self, loads: Iterable[HiCacheAck]) -> None:
        """These loads, in the order in which they were started, are done."""
        for load in loads:
            took_s = self._took_s.popleft() if self._took_s else 0.0
            if load.timing_enabled:
                took_s = load.start_event.elapsed_time(load.finish_event) / 1000
            self.cost.loaded(load.num_tokens, took_s)

    def computed(self, scheduler: Scheduler, batch: ScheduleBatch) -> None:
        """The output of a batch was sent. SGLang has added up what its prompts took. Where a prefix
        was loaded for it, it may have waited for that."""
        total = scheduler.total_prefill_uncached_tokens, scheduler.total_prefill_busy_us
        before, self._computed = self._computed, total
        tokens, took_us = total[0] - before[0], total[1] - before[1]
        if tokens > 0 and not any(req.host_loaded_length for req in batch.reqs):
            self.cost.computed(tokens, took_us / 1e6)
