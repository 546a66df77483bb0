"""The memory of a node's processes, by what each of them is."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

_MIB = 1 << 20
_NAMES = {
    "sglang::scheduler": "scheduler",
    "sglang::detokenizer": "detokenizer",
    "sgl_ext.balancer": "balancer",
    "sgl_ext.engine.serve": "engine HTTP",
    "sglang.launch_server": "engine HTTP",
}


def processes_of(pid: int) -> dict[int, str]:
    """The processes of a node that belong to a request's path, by their number."""
    found: dict[int, str] = {}
    for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
        with suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            names = [name for part, name in _NAMES.items() if part in command]
            parent = found.get(process.ppid())
            if names:
                found[process.pid] = names[0]
            elif parent == "balancer" and "multiprocessing.spawn" in command:
                found[process.pid] = "large bodies"
    return found


def begin_peak(pids: dict[int, str]) -> None:
    """Makes `memory_mib` show the largest size since now."""
    for pid in pids:
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def memory_mib(pids: dict[int, str]) -> dict[str, dict[str, int]]:
    """The size of each process in memory, now and at the peak, in MiB."""
    found: dict[str, dict[str, int]] = {}
    for pid, name in pids.items():
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            fields = dict(line.split(":", 1) for line in lines)
            kib = {key: int(fields[key].split()[0]) for key in ("VmRSS", "VmHWM")}
            found[name] = {"now": kib["VmRSS"] * 1024 // _MIB, "peak": kib["VmHWM"] * 1024 // _MIB}
    return found
