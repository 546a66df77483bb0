"""What starts engines on a GPU: the flags and variables of tests on the CPU are left out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.gpu_engines import GpuEngines
from tests.waiting import until

PROGRAM = "import os, sys; print(sys.argv[1:], os.environ.get('CUDA_VISIBLE_DEVICES'))"


def test_an_engine_gets_the_gpu_and_no_flag_for_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made_server.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(GpuEngines, "_seen", lambda _: (1, 9))
    log = tmp_path / "log"
    flags = ["--port", "1", "--cuda-graph-backend-decode", "disabled", "--sleep-on-idle", "--x"]
    server = GpuEngines("3").start(flags, log, "made_server", {"CUDA_VISIBLE_DEVICES": ""})
    until(lambda: not server.running(), 30)
    server.stop()
    shown = ["--port", "1", "--x", "--load-format", "dummy", "--enable-deterministic-inference"]
    assert log.read_text() == f"{shown} 3\n"
    assert server.exit_status() == 0


def test_more_ranks_than_gpus_are_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuEngines, "_seen", lambda _: (1, 9))
    with pytest.raises(pytest.skip.Exception, match="needs more GPUs than 1"):
        GpuEngines(None).start(["--tp-size", "2"], tmp_path / "log")


def test_a_torch_that_sees_no_gpu_counts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert GpuEngines("").count == 0
