"""The signs of work that a silent engine shows."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from scheduler.silence import WORKING_FAULTS
from sgl_ext.engine.http import routes
from sgl_ext.engine.http.routes import count_faults, faults_by_process

LOOP = "print('up', flush=True)\nwhile True: pass"
COMPILER = "print('up', flush=True)\nwhile True: bytearray(50_000_000)"


async def test_faults_are_counted_of_processes_that_come_and_go() -> None:
    totals = iter([{1: 100, 2: 50}, {1: 130, 3: 7}])
    assert await count_faults(lambda: next(totals), 0.0) == 37


@pytest.fixture(params=[LOOP, COMPILER], ids=["loop", "compiler"])
def child(request: pytest.FixtureRequest) -> Iterator[tuple[int, bool]]:
    """A process below this one: its id, and whether it works."""
    with subprocess.Popen([sys.executable, "-c", request.param], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid, request.param == COMPILER
        process.kill()


def test_a_compiler_touches_memory_and_a_loop_does_not(child: tuple[int, bool]) -> None:
    pid, works = child
    before = faults_by_process()[pid]
    deadline_s = time.monotonic() + (30 if works else 1)
    while time.monotonic() < deadline_s and faults_by_process()[pid] - before < WORKING_FAULTS:
        time.sleep(0.05)
    assert (faults_by_process()[pid] - before >= WORKING_FAULTS) is works


def test_an_engine_says_how_old_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "SAMPLE_S", 0.0)
    monkeypatch.setattr(routes, "faults_by_process", dict)
    client = TestClient(Starlette(routes=[routes.work_route()]))
    signs = client.get("/sgl_ext/work").json()
    assert signs["page_faults"] == 0
    assert 0 <= signs["age_s"] < 60
