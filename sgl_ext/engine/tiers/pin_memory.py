"""What pins hold in SGLang's memory: locks on the device, locked copies on the host."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from radix.pin import Pin
from radix.tier import Tier
from sgl_ext.engine.tiers.host_copies import HostCopies, HostLock


class Tree(Protocol):
    """What is needed of the extension's radix cache."""

    def lock(self, node: Any) -> Any: ...
    def unlock(self, lock: Any) -> None: ...
    def is_evicted(self, node: Any) -> bool: ...


@dataclass(slots=True, eq=False)
class PinLock:
    """The memory of a pin, as the pin's label.

    node: where its prefix ends in the tree.
    segment: the deepest segment that ends at or before the pin's end, of the request that made it.
    lock: of the prefix on the device; None while it is not locked there.
    copy: the lock of its host copy; None while it has none.
    is_shared: whether more than one session has used it.
    """

    node: Any
    segment: int | None
    lock: Any = None
    copy: HostLock | None = None
    is_shared: bool = False

    @property
    def tier(self) -> Tier:
        return Tier.DEVICE if self.copy is None else Tier.HOST


class PinMemory:
    """The memory of pins in one cache. copies: of its prefixes; None where pins have none."""

    def __init__(self, tree: Tree) -> None:
        self.copies: HostCopies | None = None
        self._tree = tree

    def is_evicted(self, pin: Pin) -> bool:
        """Whether a pin's prefix is no longer on the device."""
        return self._tree.is_evicted(pin.label.node)

    def lock(self, pins: Iterable[Pin]) -> None:
        """Locks pins on the device."""
        for pin in pins:
            pin.label.lock = self._tree.lock(pin.label.node)

    def unlock(self, pins: Iterable[Pin]) -> None:
        """Gives up their locks on the device, if they have one."""
        for pin in pins:
            self._tree.unlock(pin.label.lock)
            pin.label.lock = None

    def copy(self, pin: Pin) -> bool:
        """Whether a pin has a locked host copy, which is made if its prefix is on the device."""
        label = pin.label
        if label.copy is None and self.copies is not None and not self.is_evicted(pin):
            label.copy = self.copies.lock(label.node)
        return label.copy is not None

    def unlock_copies(self, pins: Iterable[Pin]) -> None:
        """Gives up their locks on the host, if they have one."""
        for pin in pins:
            if self.copies is not None and pin.label.copy is not None:
                self.copies.unlock(pin.label.copy)
                pin.label.copy = None
