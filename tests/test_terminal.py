"""SIGHUP: held, it ends no process, calls what waits for it, and is inherited."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from sgl_ext.terminal import LossyStream

_PROCESS = """
import os, signal, subprocess, sys, threading
from sgl_ext.terminal import hold_hangups, on_hangup
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
