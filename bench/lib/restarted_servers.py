"""Two engines of one arm, which are restarted one by one, or killed and started again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path

import aiohttp
import psutil
from sgl_ext_cpu.node import FORKING, Node

from bench.lib.engines import Engines
from bench.lib.script import require

STOCK, FILE, MEMORY, OURS = "stock", "stock_file", "ours_memory", "ours"
ARMS = (STOCK, FILE, MEMORY, OURS)
_HICACHE = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--page-size", "64"),
    *("--hicache-storage-prefetch-policy", "timeout"),
)
_TIER_BYTES = str(4 << 30)
_FILE_FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
_RESTART = "/sgl_ext/restart"
_ENGINES = 2
_POLL_S = 0.25


class Servers:
    """The two engines of one arm, of which some may be down. ask: sends a session's request."""

    def __init__(self, arm: str, engines: Engines, pool_tokens: int, folder: Path) -> None:
        self.arm = arm
        self._engines = engines
        self._folder = folder / arm
        self._disk = folder / f"{arm}-tier"
        self._flags = ("--max-total-tokens", str(pool_tokens))
        self._running: list[ExitStack] = []
        self.nodes: list[Node] = []
        self._down: set[int] = set()

    def start(self) -> None:
        """Starts all engines."""
        if self.arm in (MEMORY, OURS):
            on_disk = ("--disk-tier", str(self._disk), "--disk-tier-bytes", _TIER_BYTES)
            in_memory = ("--shared-tier-bytes", _TIER_BYTES)
            tier = on_disk if self.arm == OURS else in_memory
            flags = (*self._flags, *_HICACHE, *tier, "--instances", str(_ENGINES))
            self._enter(self._engines.ours(self._folder, *flags, environment=FORKING))
            return
        self._running, self.nodes = [ExitStack()] * _ENGINES, [None] * _ENGINES  # type: ignore[list-item]
        with ThreadPoolExecutor() as pool:
            places = range(_ENGINES)
            list(pool.map(lambda place: self._enter(self._stock(place), place), places))

    def _stock(self, number: int) -> AbstractContextManager[Node]:
        """Starts one stock engine."""
        more, environment = tuple[str, ...](), dict(FORKING)
        if self.arm == FILE:
            self._disk.mkdir(exist_ok=True)
            more = (*_HICACHE, "--hicache-storage-backend", "file")
            environment[_FILE_FOLDER] = str(self._disk)
        folder = self._folder.with_name(f"{self.arm}-{number}")
        return self._engines.stock(folder, *self._flags, *more, environment=environment)

    def _enter(self, server: AbstractContextManager[Node], place: int | None = None) -> None:
        stack = ExitStack()
        node = stack.enter_context(server)
        if place is None:
            self._running.append(stack)
            self.nodes.append(node)
        else:
            self._running[place], self.nodes[place] = stack, node

    def kill(self) -> None:
        """Kills every process at once, without a warning."""
        found = [psutil.Process(node.process.pid) for node in self.nodes]
        found += [child for each in found for child in each.children(recursive=True)]
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=30)
        self.stop()

    def stop(self) -> None:
        for stack in self._running:
            with suppress(ProcessLookupError):
                stack.close()
        self._running, self.nodes = [], []

    def url(self, session: int) -> str:
        """Where a session's request goes."""
        if len(self.nodes) == 1:
            return self.nodes[0].url
        place = session % _ENGINES
        return self.nodes[place if place not in self._down else (place + 1) % _ENGINES].url

    async def restart_one_by_one(self, is_idle: Callable[[str], bool]) -> None:
        """Restarts all engines while sessions go on. is_idle: whether no request is at a URL."""
        if len(self.nodes) == 1:
            await _restart_ours(self.nodes[0].url)
            return
        for place in range(_ENGINES):
            self._down.add(place)
            while not is_idle(self.nodes[place].url):  # noqa: ASYNC110 - requests end elsewhere
                await asyncio.sleep(_POLL_S)
            await asyncio.to_thread(self._running[place].close)
            await asyncio.to_thread(self._enter, self._stock(place), place)
            self._down.clear()


async def _restart_ours(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        async with http.post(url + _RESTART, json={}) as answer:
            require(answer.status < 300, "a rolling restart begins", said=await answer.text())
        while True:
            await asyncio.sleep(_POLL_S)
            async with http.get(url + _RESTART) as answer:
                restart = await answer.json()
            if restart["state"] != "running":
                require(restart["state"] == "done", "engines restart", said=restart["error"])
                return
