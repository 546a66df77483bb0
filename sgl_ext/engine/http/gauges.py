"""The engine's gauges on its `/metrics`: versions, sizes of tables, subscribers and memory.

SGLang adds up the processes of an engine from files, which have what was last set. So the HTTP
process sets its gauges every few seconds.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

from sgl_ext.engine.core.counters import background_failed, gauge, show_counters
from sgl_ext.engine.http.extension import HttpExtension
from sgl_ext.supervision import supervise
from sgl_ext.version import versions

_INTERVAL_S = 5.0
_KINDS = ("scheduler", "detokenizer", "data_parallel_controller", "tokenizer_worker")


@asynccontextmanager
async def gauging(extension: HttpExtension) -> AsyncIterator[None]:
    """Sets the gauges while the block runs, and shows every counter from the start."""
    show_counters()
    gauge("build_info").labels(*(found or "" for found in versions())).set(1)
    for feature in extension.degraded:
        gauge("degraded").labels(feature).set(1)

    async def step() -> None:
        set_gauges(extension)
        set_memory(await asyncio.to_thread(memory_by_kind))

    task = asyncio.create_task(supervise("gauges", background_failed, step, _INTERVAL_S))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def set_gauges(extension: HttpExtension) -> None:
    """Sets the gauges of the HTTP process's own state."""
    gauge("event_subscribers").set(extension.subscriber_count)
    for table, unit, size, limit in extension.tables():
        gauge("table_size").labels(table, unit).set(size)
        gauge("table_limit").labels(table, unit).set(limit)
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    off = set()
    for worth in extension.accounts():
        seconds[worth.name, "taken"] += worth.took_s
        seconds[worth.name, "replaced"] += worth.replaced_s
        if worth.is_off:
            off.add(worth.name)
    for (name, work), so_far_s in seconds.items():
        gauge("host_cache_seconds").labels(name, work).set(so_far_s)
        gauge("host_cache_off").labels(name).set(name in off)
    for broadcaster in extension.broadcasters:
        broadcaster.show_caches_off(sorted(off))


def set_memory(by_kind: dict[str, int]) -> None:
    """Sets the memory of the engine's processes; a kind that has ended has none."""
    for kind in ("http", *_KINDS, "other"):
        gauge("engine_memory_bytes").labels(kind).set(by_kind.get(kind, 0))


def memory_by_kind() -> dict[str, int]:
    """The resident bytes of this process and of those that it started, by what they are. It takes
    milliseconds."""
    found: defaultdict[str, int] = defaultdict(int)
    own = psutil.Process()
    found["http"] += own.memory_info().rss
    for child in own.children(recursive=True):
        try:
            title = " ".join(child.cmdline()[:1]).removeprefix("sglang::")
            kind = next((kind for kind in _KINDS if title.startswith(kind)), "other")
            found[kind] += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return found
