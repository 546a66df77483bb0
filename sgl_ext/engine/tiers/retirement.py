"""The end of stored pages when an engine's weights change while it serves.

The pages are those of the weights at its start, and nothing says which weights it has later.
"""

import logging
from typing import Any, Protocol
from weakref import WeakSet

log = logging.getLogger(__name__)


class Storage(Protocol):
    def retire(self) -> None: ...


_storages: WeakSet[Storage] = WeakSet()


def note_storage(storage: Storage) -> None:
    """Notes a storage of this process, to be retired when weights change."""
    _storages.add(storage)


def retire(*_: Any, **__: Any) -> None:
    """Before `SchedulerWeightUpdaterManager.flush_cache_after_weight_update`: the storages of this
    process neither read nor write from now on."""
    for storage in _storages:
        storage.retire()
        log.warning("weights changed while serving: the shared tier is off until a restart")
