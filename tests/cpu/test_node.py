"""Servers that benches and tests start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.waiting import until

_STARTER = """
import sys
from pathlib import Path
from sgl_ext_cpu.node import running_process

command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
log = Path(sys.argv[1])
with running_process(command, log, lambda: "up" in log.read_text(), own_session=True) as process:
    print(process.pid, flush=True)
    sys.stdin.read()
"""


def test_a_session_of_its_own_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    for end in (signal.SIGKILL, None):
        starter = subprocess.Popen(
            [sys.executable, "-c", _STARTER, str(tmp_path / "log")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert starter.stdin is not None
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert os.getsid(pid) == pid
        if end is not None:
            starter.send_signal(end)
        starter.stdin.close()
        starter.wait()
        starter.stdout.close()
        until(lambda pid=pid: not _runs(pid))


def _runs(pid: int) -> bool:
    """A process that has ended may wait for init to collect it."""
    try:
        return not Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return False
