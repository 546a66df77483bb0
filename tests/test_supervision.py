"""Background work goes on after exceptions, and says so."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

import pytest

from sgl_ext.supervision import Guard, StallMonitor, supervise
from tests.balancer.wire import until


async def run(step: object, counted: list[str]) -> asyncio.Task[None]:
    return asyncio.create_task(supervise("sweep", counted.append, step, 0))  # type: ignore[arg-type]


async def test_a_step_that_fails_is_counted_logged_once_and_called_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outcomes = [OSError("no space"), OSError("no space"), None, ValueError("new")]
    counted: list[str] = []
    done = asyncio.Event()

    def step() -> None:
        if not outcomes:
            done.set()
        elif (outcome := outcomes.pop(0)) is not None:
            raise outcome

    with caplog.at_level(logging.WARNING):
        task = await run(step, counted)
        await done.wait()
    task.cancel()
    assert counted == ["sweep"] * 3
    logged = [record.getMessage() for record in caplog.records]
    assert logged == ["sweep failed and goes on", "sweep works again"] * 2
    assert [record.exc_info is not None for record in caplog.records] == [True, False] * 2


async def test_a_cancelled_task_ends_and_counts_nothing() -> None:
    counted: list[str] = []
    begun = asyncio.Event()

    async def step() -> None:
        begun.set()
        await asyncio.Event().wait()

    task = await run(step, counted)
    await begun.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert counted == []


async def test_a_cancellation_of_what_a_step_awaits_is_a_failure_of_the_step() -> None:
    counted: list[str] = []
    again = asyncio.Event()

    async def step() -> None:
        if counted:
            again.set()
            return
        awaited = asyncio.get_running_loop().create_future()
        awaited.cancel()
        await awaited

    task = await run(step, counted)
    await again.wait()
    task.cancel()
    assert counted == ["sweep"]


def test_a_guard_lets_what_is_no_exception_pass() -> None:
    counted: list[str] = []
    with pytest.raises(SystemExit), Guard("sweep", counted.append):
        raise SystemExit
    assert counted == []


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
