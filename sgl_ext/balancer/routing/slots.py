"""The slots of workers: their bits in the prefix index."""

from itertools import count


class Slots:
    """The slots of one process's workers. A slot is free again after its worker has left."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def take(self, worker: str) -> int:
        """A free slot for a worker. `worker`: its name; no two that are there have the same."""
        slot = next(slot for slot in count() if slot not in self._taken)
        self._taken.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """The worker has left, and nothing is known of it any more."""
        self._taken.discard(slot)
