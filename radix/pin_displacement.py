"""Which pins give way to a new one, within the limits that pins and their owners have.

One owner can use a share of the budget, and of the number of pins. Beyond that share its pins
displace only each other. While several owners have pins, each is guaranteed an equal part of the
budget and of the number, or its share if that is less. What others leave of it can be used:

    within its part    an owner's pins are displaced by its own alone, whatever the priority of
                       others', and for a new pin others give back what they have beyond theirs
    beyond             others displace its pins in release order, down to its part
"""

from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial

from radix.pin import LESS_VALUABLE, OWNER_SHARE, Pin
from radix.pin_tree import PinTree, Trial


@dataclass(frozen=True)
class PinLimits:
    """The budget of all pins in tokens, their number, and each owner's share of both."""

    tokens: int
    pins: int
    share: float
    shares: Mapping[str, float]

    def share_of(self, owner: str) -> tuple[int, int]:
        """The tokens and the number of pins that an owner can have at most."""
        share = self.shares.get(owner, self.share)
        return int(self.tokens * share), max(int(self.pins * share), 1)

    def part_of(self, owner: str, owners: int) -> tuple[int, int]:
        """The tokens and the number of pins that are guaranteed to one of so many owners."""
        tokens, pins = self.share_of(owner)
        return min(tokens, self.tokens // owners), min(pins, self.pins // owners)


class _Trial:
    """What would be pinned without some of the pins. counts: the number of all pins by owner."""

    def __init__(self, tree: PinTree, counts: Counter[str], limits: PinLimits) -> None:
        self._tree = Trial(tree)
        self._counts = Counter(counts)
        self._owners, self._pins = len(self._counts), self._counts.total()
        self._limits = limits

    def is_within_share(self, owner: str) -> bool:
        tokens, pins = self._limits.share_of(owner)
        # An owner with the whole budget may be charged for what others pin beyond it.
        tokens_fit = tokens >= self._limits.tokens or self._tree.tokens_of(owner) <= tokens
        return tokens_fit and (pins >= self._limits.pins or self._counts[owner] <= pins)

    def is_within_budget(self) -> bool:
        limits = self._limits
        return self._tree.tokens <= limits.tokens and self._pins <= limits.pins

    def is_within_part(self, owner: str) -> bool:
        tokens, pins = self._limits.part_of(owner, self._owners)
        return self._tree.tokens_of(owner) <= tokens and self._counts[owner] <= pins

    def remove(self, pin: Pin) -> None:
        self._tree.remove(pin.id)
        self._counts[pin.owner] -= 1
        self._pins -= 1

    def restore(self, pin: Pin) -> None:
        self._tree.restore(pin.id)
        self._counts[pin.owner] += 1
        self._pins += 1


def choose_released(
    new: Pin,
    in_order: Callable[[], list[Pin]],
    path: Container[int],
    tree: PinTree,
    counts: Counter[str],
    limits: PinLimits,
) -> list[Pin] | str:
    """The pins to release for the new one, in release order, or why it is rejected.

    in_order: gives all other pins in release order.
    path: the ids of those that the new one contains.
    tree: all pinned prefixes, with the new one.
    counts: the number of other pins by owner.
    """
    trial = _Trial(tree, counts + Counter([new.owner]), limits)
    is_within_share = partial(trial.is_within_share, new.owner)
    if is_within_share() and trial.is_within_budget():
        return []
    # The new pin needs all tokens of the pins on its path.
    others = [pin for pin in in_order() if pin.id not in path]
    tried: dict[int, Pin] = {}

    def may_go(pin: Pin) -> bool:
        is_less_valuable = pin.release_order < new.release_order
        if pin.owner == new.owner:
            return is_less_valuable
        if trial.is_within_part(pin.owner):
            return False
        return is_less_valuable or trial.is_within_part(new.owner)

    own = [pin for pin in others if pin.owner == new.owner]
    theirs = [pin for pin in others if pin.owner != new.owner]
    # An owner within its part first gets back what others have beyond theirs.
    before = theirs if trial.is_within_part(new.owner) else []
    for candidates, fits, reason in (
        (own, is_within_share, OWNER_SHARE),
        (before + others, trial.is_within_budget, LESS_VALUABLE),
    ):
        for pin in candidates:
            if fits():
                break
            if pin.id not in tried and may_go(pin):
                trial.remove(pin)
                tried[pin.id] = pin
        if not fits():
            return reason
    # Keep those that need not go, the most valuable first: the tokens that their release frees
    # can be shared, or too few to matter.
    released: list[Pin] = []
    for pin in sorted(tried.values(), key=lambda pin: pin.release_order, reverse=True):
        trial.restore(pin)
        if not (is_within_share() and trial.is_within_budget()):
            trial.remove(pin)
            released.insert(0, pin)
    return released


def choose_excess(
    in_order: list[Pin],
    in_turns: list[Pin],
    tree: PinTree,
    counts: Counter[str],
    limits: PinLimits,
) -> list[Pin]:
    """The pins to release because the limits are lower than they were, in release order.

    First each owner beyond its share gives up its own, in release order. Others' follow only where
    they hold tokens that the owner is charged for. Then all pins give way in turns.

    in_order: all pins in release order. in_turns: the same, as they give way to other things than
    pins. counts: the number of pins by owner.
    """
    trial = _Trial(tree, counts, limits)
    over = [owner for owner in tree.owners if not trial.is_within_share(owner)]
    tried: dict[int, Pin] = {}

    def release(candidates: list[Pin], is_enough: Callable[[], bool]) -> None:
        for pin in candidates:
            if is_enough():
                return
            if pin.id not in tried:
                trial.remove(pin)
                tried[pin.id] = pin

    for owner in over:
        own = [pin for pin in in_order if pin.owner == owner]
        others = [pin for pin in in_order if pin.owner != owner]
        release(own + others, partial(trial.is_within_share, owner))
    release(in_turns, trial.is_within_budget)
    released: list[Pin] = []
    for pin in sorted(tried.values(), key=lambda pin: pin.release_order, reverse=True):
        trial.restore(pin)
        if not (all(map(trial.is_within_share, over)) and trial.is_within_budget()):
            trial.remove(pin)
            released.append(pin)
    return released[::-1]
