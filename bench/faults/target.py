"""The node that faults are done to: its disks, its processes, and what it says of itself."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from sgl_ext_cpu.node import Node, free_port, running_node

from bench.faults.disk import disk
from bench.faults.processes import NodeProcesses, find_processes, have_ended

PROCESSES = 2
POOL_TOKENS = 6000
_FLAGS = (
    *("--instances", "2", "--processes", str(PROCESSES), "--drain-s", "20"),
    # Requests do not fit the memory all the time, and the more important ones preempt.
    *("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", "12"),
    *("--chunked-prefill-size", "1024"),
)
_COUNTED = re.compile(rb'^sgl_ext_requests_total\{path="/v1/[^"]*",status="\d+"\} (\S+)', re.M)
_PAGES = 8
_TIMEOUT = aiohttp.ClientTimeout(total=5)


class Target:
    """A node with two engines and two balancer processes. `start` before anything else.

    has_small_disks: whether its log, store and temporary files are on disks that can be full.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        environment: Mapping[str, str],
        *,
        has_small_disks: bool = True,
    ) -> None:
        self.model = model
        self.folder = folder
        self._stack = ExitStack()
        self._running = ExitStack()
        names = ("log", "store", "tmp")
        disks = {
            name: self._stack.enter_context(disk(folder / name, is_small=has_small_disks))
            for name in names
        }
        self.log_disk, self.store_disk, self.tmp_disk = disks.values()
        self.log = self.log_disk.path / "requests.jsonl"
        self.store = self.store_disk.path / "store.sqlite"
        self._environment = {**environment, "TMPDIR": str(self.tmp_disk.path)}
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.node: Node
        self.processes: NodeProcesses

    def start(self) -> None:
        """Starts the node. Raises RuntimeError with its output if it does not come up."""
        files = ("--request-log", str(self.log), "--store", str(self.store))
        self.node = self._running.enter_context(
            running_node(
                self.model,
                self.folder,
                *(*_FLAGS, *files),
                environment=self._environment,
                port=self._port,
            )
        )
        self.look()

    def look(self) -> None:
        """Finds the processes; some may be new. Raises LookupError."""
        self.processes = find_processes(self.node.process.pid, self.node.engines)

    def restart(self) -> int:
        """Starts the node in place of one that ended or is to end. How many processes of the
        old one were still running, half a minute after its launcher ended."""
        if self.node.process.poll() is None:
            self.node.process.send_signal(signal.SIGKILL)
            self.node.process.wait()
        old = [p for p in self.processes.all if p != self.processes.launcher]
        left = 0 if have_ended(old) else sum(process.is_running() for process in old)
        for process in old:
            if process.is_running():
                process.kill()
        self._running.close()
        self.start()
        return left

    def close(self) -> None:
        """Ends the node, and removes its disks."""
        for each in (self.log_disk, self.store_disk, self.tmp_disk):
            each.free()
        with self._stack, self._running:
            pass

    @property
    def writers(self) -> list[psutil.Process]:
        """The processes that write the request log and the store."""
        return list(self.processes.balancers)

    async def workers(self, http: aiohttp.ClientSession, url: str = "") -> list[dict[str, Any]]:
        """The engines as a balancer sees them; none if it does not answer."""
        try:
            async with http.get(f"{url or self.url}/health", timeout=_TIMEOUT) as answer:
                return list((await answer.json())["workers"])
        except (aiohttp.ClientError, TimeoutError):
            return []

    async def serves(self, http: aiohttp.ClientSession) -> bool:
        """Whether the node takes requests, by its health check."""
        try:
            async with http.get(f"{self.url}/health", timeout=_TIMEOUT) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def is_whole(self, http: aiohttp.ClientSession) -> bool:
        """Whether every process runs, and every balancer process calls every engine ready."""
        for _ in range(_PAGES):
            workers = await self.workers(http)
            if len(workers) != len(self.node.engines) or not all(w["ready"] for w in workers):
                return False
        try:
            self.look()
        except (LookupError, ValueError, psutil.Error):
            return False
        return len(self.processes.balancers) == PROCESSES

    async def pages_agree(self, http: aiohttp.ClientSession) -> bool:
        """Whether all balancer processes report the same count of answered requests, which they
        do within seconds if none is running."""
        counts = set()
        for _ in range(_PAGES):
            try:
                async with http.get(f"{self.url}/metrics", timeout=_TIMEOUT) as answer:
                    counts.add(sum(map(float, _COUNTED.findall(await answer.read()))))
            except (aiohttp.ClientError, TimeoutError):
                return False
        return len(counts) == 1

    async def preemptions(self, http: aiohttp.ClientSession) -> float:
        """How many requests the engines have preempted."""
        total = 0.0
        for engine in self.node.engines:
            async with http.get(f"{engine}/metrics", timeout=_TIMEOUT) as answer:
                lines = (await answer.text()).splitlines()
            found = [line for line in lines if line.startswith("sgl_ext_preempted_requests_total")]
            total += sum(float(line.rsplit(" ", 1)[1]) for line in found)
        return total
