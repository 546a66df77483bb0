"""Copies of prefixes in host memory, locked there: what a spilled pin holds.

SGLang's HiCache copies a node of the radix tree to the host, and then eviction only takes the
node's device memory. It also evicts host copies, the least recently used first, but for those
that are locked. A host lock holds one node, and both halves of it after a split, so a prefix has
one for each node of its path.

All ranks copy and lock alike: their host pools have the same number of slots, their trees are the
same, and a copy is waited for, so nothing depends on how quick a rank's copies are.

Only for models without sliding windows and states: those have locks of their own kind.
"""

from typing import Any

from sgl_ext.engine.sglang_types import TreeCache

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
