"""Host memory as a tier of the cache: how much of a prompt is there, what loads take, and locked
copies.

What loads take is measured by a clock, so each rank measures something else. All ranks decide by
the figures that the entry rank's orders carry (`iteration.py`).

A spilled pin holds a locked copy of its prefix.

SGLang's HiCache copies a node of the radix tree to the host, and then eviction only takes the
node's device memory. It also evicts host copies, the least recently used first, but for those
that are locked. A host lock holds one node, and both halves of it after a split, so a prefix has
one for each node of its path.

All ranks copy and lock alike: their host pools have the same number of slots, their trees are the
same, and a copy is waited for, so nothing depends on how quick a rank's copies are.

Only for models without sliding windows and states: those have locks of their own kind.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from radix.residency import Tier
from scheduler.load_cost import LoadCost
from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.sglang_types import (
    HiCacheAck,
    RadixKey,
    Req,
    ScheduleBatch,
    Scheduler,
    TreeCache,
)

# SGLang has three loads under way at most.
_MOST_UNDER_WAY = 8


class Loads:
    """The measurements of one scheduler. cost: what they come to."""

    def __init__(self) -> None:
        self.cost = LoadCost()
        self._took_s: deque[float] = deque(maxlen=_MOST_UNDER_WAY)
        self._computed = 0, 0

    def started(self, took_s: float) -> None:
        """A load was started, by a call that took so long. Where a device's events have no clock,
        such as the CPU's, the call has copied everything when it returns."""
        self._took_s.append(took_s)

    def finished(self, loads: Iterable[HiCacheAck]) -> None:
        """These loads, in the order in which they were started, are done."""
        for load in loads:
            took_s = self._took_s.popleft() if self._took_s else 0.0
            if load.timing_enabled:
                took_s = load.start_event.elapsed_time(load.finish_event) / 1000
            self.cost.loaded(load.num_tokens, took_s)

    def computed(self, scheduler: Scheduler, batch: ScheduleBatch) -> None:
        """The output of a batch was sent. SGLang has added up what its prompts took. Where a prefix
        was loaded for it, it may have waited for that."""
        total = scheduler.total_prefill_uncached_tokens, scheduler.total_prefill_busy_us
        before, self._computed = self._computed, total
        tokens, took_us = total[0] - before[0], total[1] - before[1]
        if tokens > 0 and not any(req.host_loaded_length for req in batch.reqs):
            self.cost.computed(tokens, took_us / 1e6)


class Cached(NamedTuple):
    """How many tokens of a prompt are on the device, from its first one on, and how many of those
    that follow the host would load."""

    on_device: int
    on_host: int


def look_up(cache: TreeCache, key: RadixKey) -> Cached:
    """How much of a key is cached.

    Without host copies it changes nothing. With them it is a match of SGLang's, which counts as a
    read of the prefix and may split a node: nothing else shows what is on the host.
    """
    if cache.cache_controller is None:
        matched, *_ = cache.tree_core.match_full_device_prefix(key)
        return Cached(matched, 0)
    found = cache.match_prefix(sglang_api.MatchPrefixParams(key=key))
    # SGLang computes fewer tokens than its threshold instead of loading them.
    is_loaded = found.host_hit_length >= cache.load_back_threshold
    return Cached(found.device_prefix_len, found.host_hit_length if is_loaded else 0)


def count_cached(req: Req) -> None:
    """Counts the tokens of a request that were cached, by tier."""
    tokens = req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage
    for tier, amount in zip(Tier, tokens, strict=True):
        if amount:
            counter("cached_tokens").labels(tier.value).inc(amount)


HostLock = list[tuple[Any, Any]]
"""The nodes of a path, each with SGLang's receipt for its lock."""


class HostCopies:
    """Host copies in a cache with HiCache."""

    def __init__(self, cache: TreeCache) -> None:
        self._cache = cache

    @property
    def size(self) -> int:
        """The tokens that host memory can have."""
        assert self._cache.cache_controller is not None, "there is host memory"
        return int(self._cache.cache_controller.mem_pool_host.size)

    def lock(self, node: Any) -> HostLock | None:
        """Locks the host copy of the prefix that ends at a node, and makes what is missing of it.

        The prefix must be on the device. None if host memory has no room: then the copies that
        were made stay, and can be evicted.
        """
        (path,) = self._cache.tree_core.collect_path_info([node])
        lock: HostLock = []
        for one in path:
            if not self._is_copied(one.node_id):
                self.unlock(lock)
                return None
            receipt = self._cache.inc_host_lock_ref(one.node_id).to_dec_params()
            lock.append((one.node_id, receipt))
        return lock

    def unlock(self, lock: HostLock) -> None:
        """Gives up a lock; the copy can be evicted, unless something else locks it."""
        for node, receipt in reversed(lock):
            self._cache.dec_host_lock_ref(node, receipt)

    def _is_copied(self, node: Any) -> bool:
        """Whether a node has a copy, which is made if it has none: each after its parent's, as
        SGLang loads a path from the top."""
        if self._cache.tree_core.is_backuped(node):
            return True
        return self._cache.backup_node_for_write_back(node)
