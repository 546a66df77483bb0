"""An engine that ends: what it holds is stored in the tier that engines share.

With SGLang's `write_through` nearly all of it is there already, and is only touched. What is not
there: pages that were evicted or had no room, and all that other policies keep on the device.

All ranks store the same nodes in the same iteration: the entry rank names them, and whether a step
goes on depends only on what is equal on all ranks.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

from sgl_ext.engine.sglang_types import TreeCache


class Leaving:
    """Stores the prefixes that end at these nodes, those that matter most first."""

    def __init__(self, cache: TreeCache, nodes: Iterable[Any]) -> None:
        self._cache = cache
        self._waiting = deque(nodes)
        self._stored: set[Any] = set()

    def step(self) -> bool:
        """Goes on. Returns whether all is stored that can be. Call it once in an iteration."""
        while self._waiting:
            if not self._store(self._waiting[0]) and len(self._cache.ongoing_backup):
                return False  # host memory has room again when these are stored
            self._waiting.popleft()
        return not len(self._cache.ongoing_backup)

    def _store(self, end: Any) -> bool:
        """Hands the nodes of one prefix to the tier. False: host memory has no room for one."""
        try:
            (path,) = self._cache.tree_core.collect_path_info([end])
        except KeyError:  # it was evicted
            return True
        for each in path:
            node = each.node_id
            if node in self._stored:
                continue
            if self._cache.tree_core.is_backuped(node):
                self._cache.write_backup_storage(node)
            elif not self._cache.backup_node_for_write_back(node):
                return False
            self._stored.add(node)
        return True
