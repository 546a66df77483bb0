"""The monitor sees what keeps the loop from its timer."""

from __future__ import annotations

import time

from sgl_ext.limits.stall import StallMonitor
from tests.balancer.wire import until


async def test_a_callback_that_computes_is_a_stall_on_both_clocks() -> None:
    seen: list[tuple[str, float]] = []
    monitor = StallMonitor(lambda clock, seconds: seen.append((clock, seconds)))
    monitor.start()
    end_s = time.thread_time() + 0.2
    while time.thread_time() < end_s:
        pass
    await until(lambda: seen)
    monitor.stop()
    (wall, wall_s), (cpu, cpu_s) = seen[:2]
    assert (wall, cpu) == ("wall", "cpu")
    assert wall_s >= cpu_s > 0.15
