"""Pins give way to live requests: on the device, in the order of `radix.pins`.

    admission    `admit`: a request that does not fit is tried again with one pin less each time,
                 from the owner that has most its least valuable, until it fits. If it never
                 fits, all pins stay.
    allocation   `make_room`: before decoding requests are retracted or an allocation fails, pins
                 give way until there is enough memory.

A pin that gives way spills to the host if it finds room there, and ends if it does not. Only what
gives way is copied, and before anything is evicted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from radix.pin import Pin
from sgl_ext.engine.scheduler.pin_keeper import PinKeeper, key_of, space_of
from sgl_ext.engine.sglang_types import Req

if TYPE_CHECKING:
    from sgl_ext.engine.scheduler.radix_cache import ExtendedRadixCache


class PinPressure:
    """What memory pressure takes of the pins of `keeper` in `cache`."""

    def __init__(self, cache: "ExtendedRadixCache", keeper: PinKeeper) -> None:
        self._cache = cache
        self._keeper = keeper
        self._is_admitting = False

    def admit(
        self, req: Req, fits: Callable[[], bool], may_fit: Callable[[], bool] = lambda: True
    ) -> bool:
        """Whether `fits` becomes true with fewer pins on the device. If it does, those give way; if
        it does not, all pins stay, except for those that `fits` evicted.

        may_fit: tells, and evicts nothing, whether `fits` is worth the copies of all pins that are
            unlocked for it.
        """
        keeper, memory = self._keeper, self._keeper.memory
        own = keeper.pins.device.prefixes_of(space_of(req), key_of(req))
        others = [pin for pin in keeper.pins.device.in_turns() if pin not in own]
        unlocked: list[Pin] = []
        uncopied: list[Pin] = []
        with self._keep_match(req):
            for freed in self._unlock_in_turn(others):
                unlocked += freed
                uncopied += freed
                if may_fit():
                    keeper.copy_for_spill(uncopied)
                    uncopied.clear()
                    if self._try(fits):
                        keeper.give_way(unlocked)
                        return True
        evicted = [pin for pin in unlocked if memory.is_evicted(pin)]
        keeper.give_way(evicted)
        kept = [pin for pin in unlocked if pin not in evicted]
        memory.lock(kept)
        memory.unlock_copies(kept)
        return False

    def make_room(self, is_enough: Callable[[], bool]) -> None:
        """Has pins give way, as `admit` does, until there is enough or none frees memory. It does
        nothing within `admit`, which sees to that itself."""
        if is_enough() or self._is_admitting:
            return
        for freed in self._unlock_in_turn(self._keeper.pins.device.in_turns()):
            self._keeper.give_way(freed)
            if is_enough():
                return

    def _try(self, fits: Callable[[], bool]) -> bool:
        self._is_admitting = True
        try:
            return fits()
        finally:
            self._is_admitting = False

    @contextmanager
    def _keep_match(self, req: Req) -> Iterator[None]:
        """Keeps what a request matched on the host, where room is made for copies."""
        if self._keeper.memory.copies is None or not req.needs_host_load_back():
            yield
            return
        node = req.best_match_node
        receipt = self._cache.inc_host_lock_ref(node).to_dec_params()
        try:
            yield
        finally:
            self._cache.dec_host_lock_ref(node, receipt)

    def _unlock_in_turn(self, pins: list[Pin]) -> Iterator[list[Pin]]:
        """Unlocks, in this order, the pins that free memory when they are unlocked.

        A pin frees nothing if a longer pin or a request holds the same tokens; once the longer
        one is unlocked, it may. Groups that share a prefix may each have a pin on its node: these
        are unlocked together. Last come the pins that free no tokens, but the state that a model
        caches at their end.
        """
        memory, nodes = self._keeper.memory, _by_node(pins)
        for evictable in (self._cache.full_evictable_size, self._states_evictable_size):
            has_freed = True
            while has_freed:
                has_freed, useless = False, []
                for of_node in nodes:
                    before = evictable()
                    memory.unlock(of_node)
                    if evictable() > before:
                        has_freed = True
                        yield of_node
                    else:
                        memory.lock(of_node)
                        useless.append(of_node)
                nodes = useless

    def _states_evictable_size(self) -> int:
        return self._cache.swa_evictable_size() + self._cache.mamba_evictable_size()


def _by_node(pins: list[Pin]) -> list[list[Pin]]:
    """Pins grouped by their node; a group stands where its last pin stood."""
    groups: dict[Any, list[Pin]] = {}
    for pin in reversed(pins):
        groups.setdefault(pin.label.node, []).append(pin)
    return list(reversed(groups.values()))
