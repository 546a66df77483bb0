"""`logs` and `stop`: a node of this machine by its run folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_ext.cli.run_folder import Tail, node_process
from sgl_ext.node.log_dir import new_log, rotated
from tests.cli.conftest import Run

ROOT = Path(__file__).parents[2]


def test_the_last_lines_of_each_log_are_shown(run: Run, tmp_path: Path) -> None:
    (tmp_path / "engine-0.log").write_text("one\ntwo\nthree\x1b[2J\n")
    (tmp_path / "balancer.log").write_text("first\n")
    at = ["--log-dir", str(tmp_path)]
    shown = "balancer: first\nengine-0: two\nengine-0: three?[2J\n"
    assert run("logs", "-n", "2", *at) == (0, shown, "")
    assert run("logs", "engine-0", "-n", "1", *at) == (0, "three?[2J\n", "")
    code, _, err = run("logs", "engine-1", *at)
    assert (code, err) == (2, "sgl-ext: logs: engine-1: must be one of balancer, engine-0\n")
    assert run("logs", "--log-dir", str(tmp_path / "none"))[0] == 1


def test_a_log_is_followed_over_a_rotation_and_a_new_start(tmp_path: Path) -> None:
    log = new_log(tmp_path / "engine-0.log")
    tail = Tail(log)
    log.write_text("one\ntw")
    assert [*tail.new_lines()] == ["one"]
    with log.open("a") as more:
        more.write("o\n")
    assert [*tail.new_lines()] == ["two"]
    assert rotated(log, 4)
    assert [*tail.new_lines()] == []
    log.write_text("three\n")
    assert [*tail.new_lines()] == ["three"]
    new_log(log).write_text("four\n")
    assert [*tail.new_lines()] == ["four"]
    log.unlink()
    assert [*tail.new_lines()] == []


def test_a_node_is_stopped_by_its_run_folder(run: Run, tmp_path: Path) -> None:
    program = (
        "import signal, sys; from pathlib import Path; from sgl_ext.node.log_dir import locked\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "with locked(Path(sys.argv[1])):\n    print('here', flush=True); signal.pause()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == "here\n"
        assert node_process(tmp_path) == node.pid
        said = f"process {node.pid} has ended\n"
        assert run("stop", "--log-dir", str(tmp_path)) == (0, said, "")
        assert node.wait() == 0


def test_no_process_is_stopped_that_has_not_the_lock(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a process got a signal"))
    (tmp_path / "lock").write_text(str(os.getpid()))
    code, _, err = run("stop", "--log-dir", str(tmp_path))
    assert (code, "no node runs with the run folder" in err) == (1, True)
