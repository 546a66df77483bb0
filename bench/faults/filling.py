"""Faults of files: full disks, and a store that another program locks."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

from bench.faults.disk import Disk
from bench.faults.effect import Effect, Scene, under_load
from bench.lib.script import require

_BURST, _CONNECTIONS, _BURST_S = 400, 16, 40.0
_PAGE_BYTES = 4096  # the last page of a file may have room


@asynccontextmanager
async def log_full(scene: Scene) -> AsyncIterator[Effect]:
    """No room for the request log, for so many requests that no buffer takes their lines."""
    log = scene.target.log
    async with _full(scene, scene.target.log_disk) as effect:
        await asyncio.sleep(1)
        size = log.stat().st_size
        await scene.load.burst(_BURST, _CONNECTIONS, _BURST_S)
        await asyncio.sleep(scene.hold_s)
        grown = log.stat().st_size - size
        require(grown < _PAGE_BYTES, "a log on a full disk cannot grow", grown_bytes=grown)
        yield effect


@asynccontextmanager
async def store_full(scene: Scene) -> AsyncIterator[Effect]:
    """No room for the store of responses and contexts."""
    async with _full(scene, scene.target.store_disk) as effect:
        await asyncio.sleep(scene.hold_s)
        yield effect


@asynccontextmanager
async def tmp_full(scene: Scene) -> AsyncIterator[Effect]:
    """No room for temporary files, of any process of the node."""
    async with _full(scene, scene.target.tmp_disk) as effect:
        await asyncio.sleep(scene.hold_s)
        yield effect


@asynccontextmanager
async def _full(scene: Scene, disk: Disk) -> AsyncIterator[Effect]:
    await under_load(scene)
    disk.fill(scene.target.writers)
    require(disk.is_full(), "a full disk takes no byte more")
    effect = Effect(time.monotonic())
    try:
        yield effect
        disk.fill(scene.target.writers)  # what was deleted meanwhile made no room
        require(disk.is_full(), "a full disk stays full")
    finally:
        disk.free()
        effect.ended_s = time.monotonic()


@asynccontextmanager
async def store_locked(scene: Scene) -> AsyncIterator[Effect]:
    """Another program holds the store's lock."""
    await under_load(scene)
    with closing(_opened(scene)) as holder:
        await asyncio.to_thread(holder.execute, "BEGIN EXCLUSIVE")
        effect = Effect(time.monotonic())
        await asyncio.sleep(scene.hold_s)
        with closing(_opened(scene, timeout_s=0)) as other:
            try:
                other.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                effect.notes["error"] = str(error)
        require("error" in effect.notes, "a locked store cannot be written")
        holder.execute("ROLLBACK")
        effect.ended_s = time.monotonic()
        yield effect


def _opened(scene: Scene, timeout_s: float = 30) -> sqlite3.Connection:
    return sqlite3.connect(
        scene.target.store, isolation_level=None, timeout=timeout_s, check_same_thread=False
    )
