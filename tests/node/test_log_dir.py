"""The log directory belongs to one node, and earlier logs stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sgl_ext_cpu.node import ROOT

from sgl_ext.node.log_dir import locked, new_log
from sgl_ext.settings.schema import SettingsError


def test_a_second_node_ends_and_names_the_directory_and_the_first(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with locked(logs):
        (logs / "engine-0.log").write_text("of the first")
        command = [sys.executable, "-m", "sgl_ext.launch", "--model-path", "m"]
        command += ["--log-dir", str(logs)]
        environment = {**os.environ, "SGLANG_PLATFORM": "none"}
        ended = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
        )
        assert ended.returncode == 1
        owner = f"in use by another node (process {os.getpid()}); each needs its own\n"
        assert ended.stderr == f"sgl-ext: log_dir={str(logs)!r}: {owner}"
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
