"""A server that a launcher starts is forked from the nursery, and ends as if it were its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from sgl_ext_cpu.node import FORKING, free_port, is_healthy

from tests.cpu.conftest import FLAGS
from tests.waiting import until

if TYPE_CHECKING:
    from sgl_ext_cpu.nursery import Nursery


def started(nursery: Nursery, model: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    return subprocess.Popen(
        [*command, *FLAGS, *flags],
        env={**os.environ, **FORKING, **nursery.environment, "SGLANG_PLUGINS": "none"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_server_that_cannot_start_ends_with_its_own_status_and_message(
    nursery: Nursery, tiny_model: Path
) -> None:
    server = started(nursery, tiny_model, "--no-such-flag", "7")
    output, _ = server.communicate()
    assert server.returncode == 2
    assert "unrecognized arguments: --no-such-flag 7" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_server(
    nursery: Nursery, tiny_model: Path, number: signal.Signals
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = started(nursery, tiny_model, "--port", str(port))
    until(lambda: is_healthy(url))
    server.send_signal(number)
    server.communicate()  # its output ends when no process of the server is left
    assert not is_healthy(url)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_server_ends_though_a_signal_went_to_all_processes_of_its_test(
    nursery: Nursery, tmp_path: Path, number: signal.Signals
) -> None:
    code = "import os, threading; print(os.getppid(), flush=True); threading.Event().wait()"
    (tmp_path / "waits.py").write_text(code)
    log = tmp_path / "log"
    server = nursery.start([], log, "waits", {"PYTHONPATH": str(tmp_path)})
    until(lambda: log.exists() and "\n" in log.read_text())
    os.kill(int(log.read_text()), number)
    server.stop()
    assert not psutil.pid_exists(server.pid)


def test_a_server_that_is_stopped_at_once_has_ended(nursery: Nursery, tmp_path: Path) -> None:
    """It may have no process group of its own yet."""
    for _ in range(5):
        server = nursery.start(["--help"], tmp_path / "log")
        server.stop()
        assert not server.running()
