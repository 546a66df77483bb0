"""SIGHUP: held, it ends no process, calls what waits for it, and is inherited."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sgl_ext.process import LossyStream, remove_stale

_PROCESS = """
import os, signal, subprocess, sys, threading
from sgl_ext.process import hold_hangups, on_hangup
hold_hangups()
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"],
                         stdin=subprocess.PIPE)
{before}
os.kill(os.getpid(), signal.SIGHUP)
os.kill(child.pid, signal.SIGHUP)
{after}
child.stdin.close()
print("child", child.wait())
"""


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("", "", "child 0\n"),
        (
            "called = threading.Event()\non_hangup(called.set)",
            "print(called.wait(20))",
            "True\nchild 0\n",
        ),
    ],
    ids=["held", "called"],
)
def test_a_hangup_ends_nothing_and_calls_what_waits(before: str, after: str, said: str) -> None:
    code = _PROCESS.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, said), done.stderr


def test_a_pipe_that_nobody_reads_takes_what_fits_and_then_more_once_it_is_read() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        stream = LossyStream(pipe)
        for _ in range(200):  # 200 KB, and a pipe holds 64 KiB
            stream.write("x" * 1000)
            stream.flush()
        os.read(read, 1 << 20)
        stream.write("the end\n")
        stream.flush()
        assert os.read(read, 1 << 20).endswith(b"the end\n")
    os.close(read)


def test_what_is_no_file_of_the_system_is_written() -> None:
    file = io.StringIO()
    LossyStream(file).write("a line")
    assert file.getvalue() == "a line"


PREFIX = "sgl-ext-tested-"
MAKES = f"""
import os, sys
from sgl_ext.process import make_folder
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
