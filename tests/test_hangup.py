"""SIGHUP: held, it ends no process, calls what waits for it, and is inherited."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROCESS = """
import os, signal, subprocess, sys, threading
from sgl_ext.hangup import hold_hangups, on_hangup
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
