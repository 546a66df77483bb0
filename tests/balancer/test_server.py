"""The balancer's background work: what fails in it stops nothing else."""

from __future__ import annotations

import asyncio

import pytest

from sgl_ext.balancer.routing.admission import AdmissionQueue
from sgl_ext.balancer.routing.worker_probes import WorkerProbes
from sgl_ext.balancer.server import Balancer
from tests.balancer.conftest import Connect, Serve
from tests.balancer.wire import Raw, until


def failures(balancer: Balancer, task: str) -> int:
    return balancer._metrics.background_failures.counts[(task,)]


async def test_a_step_of_the_sweep_that_fails_stops_neither_the_sweep_nor_other_steps(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(AdmissionQueue, "sweep", no_space)
    balancer = await serve(Raw())
    idle = await connect(balancer)
    await until(lambda: failures(balancer, "admission_queue") >= 2)
    (connection,) = balancer._connections
    (worker,) = balancer._services.workers.all
    balancer._services.workers.apply(worker.source, [])
    connection.deadline = 0
    assert await idle.rest() == b""
    await until(lambda: not balancer._services.workers.all)


async def test_a_probe_that_fails_is_made_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ValueError("unexpected")

    balancer = await serve(Raw())
    with monkeypatch.context() as patched:
        patched.setattr(WorkerProbes, "_head", fail)
        await until(lambda: failures(balancer, "probe") >= 2)
    (worker,) = balancer._services.workers.all
    worker.ready = False
    await until(lambda: worker.ready)


async def test_exceptions_of_callbacks_and_of_forgotten_tasks_are_counted(serve: Serve) -> None:
    balancer = await serve(Raw())
    asyncio.get_running_loop().call_soon(int, "no number")
    await until(lambda: failures(balancer, "event_loop") == 1)
