"""A worker that only answers, as a process, and the CPU time of processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from sgl_ext_cpu.node import free_port, is_healthy, running_process


@contextmanager
def running_responder(folder: Path, cores: Collection[int] = ()) -> Iterator[str]:
    """The address of a `bench.lib.responder`, which ends with the context."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "bench.lib.responder", str(port)]
    log = folder / f"responder-{port}.log"
    with running_process(command, log, partial(is_healthy, url), cores=cores):
        yield url


def cpu_s(pid: int | None) -> float:
    """CPU seconds of a process so far, all its threads, to the nanosecond; 0 for None."""
    if pid is None:
        return 0.0
    # Linux's clock of another process: its id, inverted, above three bits that name the clock.
    return time.clock_gettime((~pid << 3) | 2)
