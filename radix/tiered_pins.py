"""The pins of one engine on two tiers: its device, and its host.

    device    the prefix itself is locked in device memory
    host      a copy of it is locked in host memory, and a request that reads it loads it first

A pin is on one tier at a time. Each tier has its own limits (`radix.pins`), and pins give way on
both in the same release order:

    grant    on the device, or on the host where the device has no room for it
    spill    from the device to the host, for memory or for another pin; ends the pin if the host
             has no room for it
    load     from the host to the device, once a request has loaded the prefix

A move changes neither a pin's name nor its lease, reads, owner and session. The caller moves the
memory, and ends a pin whose memory it cannot move.

Invariant, asserted by `check`: no prefix has a pin on both tiers.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain, count
from types import MappingProxyType
from typing import Any

from radix.pins import BUDGET, Grant, Pin, Pins
from radix.residency import Tier


@dataclass(slots=True)
class Moves:
    """What the limits did to pins: no pin is in both lists.

    spilled: moved from the device to the host. ended: the pins that found no room on either tier.
    refused: why the host had no room for pins that would have moved there.
    """

    spilled: list[Pin] = field(default_factory=list)
    ended: list[Pin] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


class TieredPins:
    """The pins of one engine, whose prefixes are whole pages of `page` tokens.

    budget_tokens, host_budget_tokens: how many tokens all pins of each tier can have together; 0
        pins nothing there.
    owner_share, owner_shares, limit_pins: of each tier, as for `Pins`.
    """

    def __init__(
        self,
        *,
        budget_tokens: int,
        host_budget_tokens: int = 0,
        owner_share: float = 1.0,
        owner_shares: Mapping[str, float] = MappingProxyType({}),
        limit_pins: int = 4096,
        page: int = 1,
    ) -> None:
        common: dict[str, Any] = {
            "owner_share": owner_share,
            "owner_shares": owner_shares,
            "limit_pins": limit_pins,
            "page": page,
            "ids": count(1),
        }
        self.device = Pins(budget_tokens=budget_tokens, on_displaced=self._move_to_host, **common)
        self.host = Pins(budget_tokens=host_budget_tokens, **common)
        self._moves = Moves()

    def __len__(self) -> int:
        return len(self.device) + len(self.host)

    def __iter__(self) -> Iterator[Pin]:
        return chain(self.device, self.host)

    def tier_of(self, pin: Pin) -> Tier:
        """The tier of a pin that has not ended."""
        return Tier.HOST if pin in self.host else Tier.DEVICE

    def pinned(self, space: Hashable, key: bytes, tokens: int) -> Pin | None:
        """The pin on exactly the key's first `tokens`."""
        on_device = self.device.pinned(space, key, tokens)
        return on_device or self.host.pinned(space, key, tokens)

    def prefixes_of(self, space: Hashable, key: bytes) -> list[Pin]:
        """The pins on prefixes of the key, the shortest first."""
        return _by_length(self.device.prefixes_of(space, key), self.host.prefixes_of(space, key))

    def of_session(self, session: str) -> list[Pin]:
        """The pins that the session requested first. "" is no session."""
        return self.device.of_session(session) + self.host.of_session(session)

    def grant(
        self, tier: Tier, space: Hashable, key: bytes, ttl_s: float, now: float, **named: Any
    ) -> tuple[Grant, Moves]:
        """Pins a prefix on this tier, or renews its pin on either one. For what is `named`, and for
        the result, see `Pins.grant`. The moves are of other pins."""
        tokens = named.get("tokens")
        if self.host.pinned(space, key, tokens) is not None:
            tier = Tier.HOST
        elif self.device.pinned(space, key, tokens) is not None:
            tier = Tier.DEVICE
        pins = self.device if tier is Tier.DEVICE else self.host
        granted = pins.grant(space, key, ttl_s, now, **named)
        return granted, self._moved(granted.released)

    def spill(self, pins: Iterable[Pin]) -> Moves:
        """Moves pins from the device to the host, or ends them."""
        pins = list(pins)
        for pin in reversed(pins):  # the most valuable first
            self._move_to_host(pin)
            self.device.release(pin)
        return self._moved(pins)

    def load(self, pin: Pin) -> Moves | None:
        """Moves a pin from the host to the device; None if it stays, as the device has no room for
        it. The moves are of other pins."""
        space, key = self.host.place_of(pin)
        self.host.release(pin)
        granted = self.device.adopt(pin, space, key)
        if granted.pin is None:
            back = self.host.adopt(pin, space, key)
            assert back.pin is pin, "there was room for it"
            assert not back.released, "there was room for it"
            return None
        return self._moved(granted.released)

    def hit(self, space: Hashable, key: bytes, now: float, tokens: int) -> list[Pin]:
        """As `Pins.hit`, of both tiers."""
        on_device = self.device.hit(space, key, now, tokens)
        return _by_length(on_device, self.host.hit(space, key, now, tokens))

    def expire(self, now: float, most: int) -> list[Pin]:
        """Removes the pins whose lease is over, or `most` of them; returns them."""
        over = self.device.expire(now, most)
        return over + self.host.expire(now, most - len(over))

    def change_limits(
        self,
        budget_tokens: int,
        host_budget_tokens: int,
        owner_share: float,
        owner_shares: Mapping[str, float],
    ) -> Moves:
        """Changes the limits of both tiers."""
        ended = self.host.change_limits(host_budget_tokens, owner_share, owner_shares)
        return self._moved(
            ended + self.device.change_limits(budget_tokens, owner_share, owner_shares)
        )

    def release(self, pin: Pin) -> bool:
        """Ends a pin; False if it had ended before."""
        return self.device.release(pin) or self.host.release(pin)

    def clear(self) -> list[Pin]:
        """Ends all pins, because both caches were emptied; returns them."""
        return self.device.clear() + self.host.clear()

    def _move_to_host(self, pin: Pin) -> None:
        """Gives a pin that leaves the device a place on the host, if there is room."""
        if pin.tokens > self.host.budget_tokens:  # without a look at its key, which is long
            self._moves.refused.append(BUDGET)
            return
        granted = self.host.adopt(pin, *self.device.place_of(pin))
        self._moves.ended += granted.released
        if granted.pin is None:
            self._moves.refused.append(granted.reason)

    def _moved(self, released: Iterable[Pin]) -> Moves:
        """The moves since the last call, in which these pins left their tier."""
        moves, self._moves = self._moves, Moves()
        gone = dict.fromkeys(chain(moves.ended, released))
        moves.spilled = [pin for pin in gone if pin in self.host]
        moves.ended = [pin for pin in gone if pin not in self.host]
        return moves

    def check(self) -> None:
        """Asserts the invariants."""
        self.device.check()
        self.host.check()
        for pin in self.host:
            assert self.device.pinned(*self.host.place_of(pin)) is None


def _by_length(*sorted_pins: list[Pin]) -> list[Pin]:
    return list(merge(*sorted_pins, key=lambda pin: pin.tokens))
