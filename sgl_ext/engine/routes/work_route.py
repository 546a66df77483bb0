"""`GET /sgl_ext/work`: signs of whether the schedulers of a silent engine work.

{"age_s": since the engine began to serve, "page_faults": within a second}

A scheduler that compiles kernels sends nothing for minutes, as does one that hangs. Page faults
tell them apart (`scheduler.silence`). They are those of all processes below this one: schedulers,
and the compilers that these started. On another system than Linux there are none, so that an engine
shows no sign of work.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

PATH = "/sgl_ext/work"
SAMPLE_S = 1.0
# Of /proc/PID/stat, after the name: minor and major faults, each with those of ended children.
_FAULTS = slice(7, 11)


def work_route() -> Route:
    """The route. The engine's age is counted from now."""
    started_s = time.monotonic()

    async def work(_: Request) -> JSONResponse:
        faults = await count_faults(faults_by_process, SAMPLE_S)
        return JSONResponse({"age_s": time.monotonic() - started_s, "page_faults": faults})

    return Route(PATH, work, methods=["GET"])


async def count_faults(read: Callable[[], Mapping[int, int]], sample_s: float) -> int:
    """The page faults of processes while `sample_s` go by. read: lists the total of each."""
    before = await asyncio.to_thread(read)
    await asyncio.sleep(sample_s)
    after = await asyncio.to_thread(read)
    return sum(max(total - before.get(pid, 0), 0) for pid, total in after.items())


def faults_by_process() -> dict[int, int]:
    """The page faults so far of each process below this one, and of its ended children."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(OSError, ValueError):  # it has ended, or this is not Linux
            stat = Path(f"/proc/{process.pid}/stat").read_text()
            found[process.pid] = sum(map(int, stat.rpartition(")")[2].split()[_FAULTS]))
    return found
