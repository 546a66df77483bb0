"""How long an event loop stands still: the time that callbacks keep a timer waiting.

Two clocks tell a slow callback from a busy machine: `wall` is how late the timer comes, `cpu` is
how much of that the loop's own thread computed.
"""

import asyncio
import time
from collections.abc import Callable

CLOCKS = ("wall", "cpu")
INTERVAL_S = 0.02
# Less is the timer's own resolution.
_LEAST_S = 0.005


class StallMonitor:
    """Calls `observe(clock, seconds)` for every stall, with each clock.

    Use `start` in the loop's thread.
    """

    def __init__(self, observe: Callable[[str, float], None]) -> None:
        self._observe = observe
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._again()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _again(self) -> None:
        self._due_s = self._loop.time() + INTERVAL_S
        self._cpu_s = time.thread_time()
        self._timer = self._loop.call_later(INTERVAL_S, self._tick)

    def _tick(self) -> None:
        # uvloop's own clock is that of the loop's current round, and does not see the stall.
        late_s = time.monotonic() - self._due_s
        if late_s > _LEAST_S:
            self._observe("wall", late_s)
            self._observe("cpu", min(late_s, time.thread_time() - self._cpu_s))
        self._again()
