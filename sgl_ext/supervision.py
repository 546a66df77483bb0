"""Background work that goes on after an exception, which is logged and counted.

`supervise` repeats a step until it is cancelled. A `Guard` is for work that is called by something
else, and `count_unhandled` for what has neither. Of failures in a row only the first is logged, so
that a fault that lasts does not fill the log; `sgl_ext_background_failures_total{task=}` counts
all.

A `StallMonitor` measures how long an event loop stands still: the time that callbacks keep a timer
waiting. Two clocks tell a slow callback from a busy machine: `wall` is how late the timer comes,
`cpu` is how much of that the loop's own thread computed.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, NoReturn

log = logging.getLogger(__name__)

HELP = "Exceptions of background tasks, which went on after them."
Failed = Callable[[str], object]


class Guard:
    """A context manager that logs and counts an exception of its block, and suppresses it.

    A cancellation of the task that runs the block passes.
    """

    def __init__(self, task: str, failed: Failed) -> None:
        """task: the name of the work, a constant. failed: called with the name, to count."""
        self._task = task
        self._failed = failed
        self._is_failing = False

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if error is None:
            if self._is_failing:
                log.warning("%s works again", self._task)
            self._is_failing = False
            return False
        if isinstance(error, asyncio.CancelledError):
            # What the block awaited may have been cancelled by another.
            running = asyncio.current_task()
            if running is None or running.cancelling():
                return False
        elif not isinstance(error, Exception):
            return False
        self._failed(self._task)
        if not self._is_failing:
            log.error("%s failed and goes on", self._task, exc_info=error)
        self._is_failing = True
        return True


def count_unhandled(loop: asyncio.AbstractEventLoop, failed: Failed) -> None:
    """Counts the exceptions that a loop only logs: of callbacks, and of tasks never awaited."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "exception" in context:
            failed("event_loop")
        loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


async def supervise(
    task: str, failed: Failed, step: Callable[[], Awaitable[object] | None], interval_s: float
) -> NoReturn:
    """Calls `step`, a function or a coroutine function, at once and then `interval_s` after it has
    returned or failed, until cancelled. For the other arguments see `Guard`."""
    guard = Guard(task, failed)
    while True:
        with guard:
            if (running := step()) is not None:
                await running
        await asyncio.sleep(interval_s)


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
