"""The log directory belongs to one node, and earlier logs stay."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from sgl_ext_cpu.node import ROOT

from sgl_ext import logs
from sgl_ext.node.log_dir import begin_log, launcher_log, locked, new_log, rotated
from sgl_ext.settings.schema import BalancerSettings, LaunchSettings, SettingsError


def test_a_second_node_ends_and_names_the_directory_and_the_first(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with locked(logs):
        (logs / "engine-0.log").write_text("of the first")
        command = [sys.executable, "-m", "sgl_ext.launch", "--model-path", "s3://m"]
        command += ["--log-dir", str(logs)]
        environment = {**os.environ, "SGLANG_PLATFORM": "none"}
        ended = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
        )
        assert ended.returncode == 1
        owner = f"in use by another node (process {os.getpid()}); each needs its own\n"
        assert ended.stderr == f"sgl-ext serve: log_dir={str(logs)!r}: {owner}"
        assert (logs / "engine-0.log").read_text() == "of the first"
    with locked(logs):
        pass
    assert logs.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"log_dir='.*file'"), locked(tmp_path / "file"):
        pass


def test_the_last_logs_stay(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    for number in range(6):
        assert new_log(log).read_text() == ""
        assert log.stat().st_mode & 0o777 == 0o600
        log.write_text(str(number))
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {
        "engine-0.log": "5",
        "engine-0.log.1": "4",
        "engine-0.log.2": "3",
        "engine-0.log.3": "2",
    }


def test_a_log_that_grows_stays_within_its_limit(tmp_path: Path) -> None:
    log, limit_bytes = new_log(tmp_path / "engine-0.log"), 4000
    with log.open("ab", buffering=0) as child:
        for number in range(100):
            child.write(b"%d " % number * 100)
            assert rotated(log, limit_bytes)
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= limit_bytes + 1600
        child.write(b"the end")
    assert log.read_bytes().endswith(b"the end")
    assert b"99 " in log.read_bytes() + (tmp_path / "engine-0.log.1").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {
        "engine-0.log",
        *(f"engine-0.log.{number}" for number in (1, 2, 3)),
    }
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())


def test_a_log_on_a_full_disk_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, to: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sgl_ext.node.log_dir.shutil.copyfile", full)
    log = new_log(tmp_path / "engine-0.log")
    log.write_bytes(b"x" * 4000)
    assert not rotated(log, 4000)
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [(log.name, 0)]


def test_a_process_goes_on_if_its_output_cannot_be_written() -> None:
    lines = "from sgl_ext.process import outlive_output; outlive_output()\n"
    lines += "for _ in range(3): print('x' * 10_000, flush=True)\n"
    lines += "open(3, 'w').write('went on')\n"
    read, write = os.pipe()
    with open("/dev/full", "w") as full:
        ended = subprocess.Popen(
            ["bash", "-c", f'"$0" -c "$1" 3>&{write}', sys.executable, lines],
            **dict.fromkeys(("stdout", "stderr"), full),
            cwd=ROOT,
            pass_fds=(write,),
        )
        ended.wait()
    os.close(write)
    with open(read) as said:
        assert said.read() == "went on"


def test_it_has_what_is_printed_after_the_versions_and_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pytest's own handlers stay.
    monkeypatch.setattr(logs.logging, "getLogger", lambda name=None: logger)
    logger = logging.Logger("sgl_ext")
    monkeypatch.setattr("sgl_ext.node.log_dir.log", logger)
    balancer = BalancerSettings(log_format="json", store="redis://:secret@host")
    settings = LaunchSettings(model_path="m", log_dir=str(tmp_path), balancer=balancer)
    printed = io.StringIO()
    say = begin_log(settings, Console(file=printed, width=40))
    line = "engine-0 ended with exit code 1 and restarts in [1] s"
    say(line)
    say.error("reload: no")
    logger.handlers[0].flush()
    first, second, third, fourth = map(json.loads, launcher_log(settings).read_text().splitlines())
    assert (first["message"], first["sglang"]) == ("starting", first["sglang"])
    assert (second["model_path"], second["store"], second["log_format"]) == ("m", "...", "json")
    assert (third["message"], third["level"]) == (line, "info")
    assert (fourth["message"], fourth["level"]) == ("reload: no", "error")
    assert printed.getvalue() == f"{line}\nreload: no\n"
