"""A folder ends with its process, however the process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sgl_ext.temporary_folder import remove_stale

PREFIX = "sgl-ext-tested-"
MAKES = f"""
import os, sys
from sgl_ext.temporary_folder import make_folder
folder = make_folder({PREFIX!r})
(folder / "socket").touch()
if os.fork() == 0:
    sys.exit(0)  # a child that was forked does not own it
os.wait()
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def started() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_ends_with_its_process(tmp_path: Path) -> None:
    process, folder = started()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "socket").exists()
    process.communicate()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    killed, stale = started()
    running, folder = started()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    (tmp_path / f"{PREFIX}of-another-program").mkdir()
    os.symlink(folder, tmp_path / f"{PREFIX}link")
    assert stale.exists()
    later, newest = started()
    assert not stale.exists()
    assert (folder / "socket").exists()
    for process in (running, later):
        process.send_signal(signal.SIGKILL)
        process.communicate()
    remove_stale(PREFIX)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"{PREFIX}of-another-program", f"{PREFIX}link"}
    assert not newest.exists()
