"""Pins: prefixes of prompts that a tree keeps until a lease runs out.

A pin is a lease on the first tokens of a prompt. All requests with the same prefix share
one, and each that reads it from the cache renews it. So a pin lasts for as long as it is
used at least once in `ttl_s`, and no longer. Pins nest: who reads a long prefix has read
every pinned one that it begins with, and renews them all.

What is pinned cannot be evicted, so there is a budget, of the tokens in the union of all
pinned prefixes. When it is full, a new pin has to displace others, in release order:

    (priority, standing_s, id)      standing_s = used_s + ttl_s * hits / (hits + 1)

The least valuable pin comes first. One that was never read stands where it was granted;
each read brings it closer to keeping all of its lease, as what was read often will be
read again. A new pin stands at the moment it is granted. So it displaces those of its
priority that were never read, or that have been idle for longer than their reads vouch
for, and never one in use. A higher priority displaces a lower one regardless. Pins that
the new one goes through stay, as does any that need not go when others do.

An owner's pins may add no more than a share of the budget, and beyond that displace only
each other. Tokens are charged to whom first had them pinned. Those who name no owner
count as one.

Each rank of an engine keeps pins of its own, and all must come to the same: whatever
happens here follows from the calls alone, in their order. `now` is passed in and never
runs backwards: one that is earlier than the latest so far counts as that.

Invariants, asserted by `check`: the union is within the budget and what each owner is
charged for within its share; every pin is in the tree, found by its prefix and by its
session, and at its place in the order; no deadline is before the soonest one known.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

import xxhash

from radix.pin_tree import TOKEN_BYTES, PinTree, Trial

EMPTY = "empty"
"""Refused: there are no tokens to pin."""
BUDGET = "budget"
"""Refused: the prefix alone is longer than the budget."""
OWNER_SHARE = "owner share"
"""Refused: the prefix alone is longer than the owner's share, or that is full of better pins."""
WORTH_LESS = "worth less"
"""Refused: there is no room beside the pins that are worth more."""

_Place = tuple[int, float, int]


@dataclass(slots=True, eq=False)
class Pin:
    """A lease on a prefix. All but `label` is for `Pins` to change."""

    id: int
    """Ascending, in the order of their grants."""
    prefix: str
    """The prefix by name: the hash of its space and tokens, in hexadecimal digits."""
    tokens: int
    ttl_s: float
    deadline_s: float
    granted_s: float
    used_s: float
    """When it was last read or asked for."""
    hits: int
    owner: str
    session: str
    priority: int
    label: Any

    @property
    def standing_s(self) -> float:
        """Until when its use so far vouches for it."""
        return self.used_s + self.ttl_s * self.hits / (self.hits + 1)


class Grant(NamedTuple):
    """What came of asking for a pin."""

    pin: Pin | None
    """None: refused."""
    is_new: bool
    """Whether there was no such pin before."""
    released: list[Pin]
    """Those it displaced; none if it was refused."""
    reason: str
    """Why it was refused, or nothing."""


class Pins:
    """All pins of one engine.

    `budget_tokens` is what the pinned prefixes may have together, `owner_share` what part
    of that one owner may be charged for, `owner_shares` what some owners may instead, and
    `limit_pins` how many pins there may be. They share whole pages, of `page` tokens each.
    """

    def __init__(
        self,
        *,
        budget_tokens: int,
        owner_share: float = 1.0,
        owner_shares: Mapping[str, float] = MappingProxyType({}),
        limit_pins: int = 4096,
        page: int = 1,
    ) -> None:
        if budget_tokens < 0:
            raise ValueError(f"budget_tokens is negative: {budget_tokens}")
        if not 0 < owner_share <= 1:
            raise ValueError(f"owner_share is not above 0 and at most 1: {owner_share}")
        for owner, share in owner_shares.items():
            if not 0 <= share <= 1:
                raise ValueError(f"owner_shares[{owner!r}] is not 0 to 1: {share}")
        if limit_pins < 1:
            raise ValueError(f"limit_pins is less than 1: {limit_pins}")
        self._budget_tokens = budget_tokens
        self._share_tokens = int(budget_tokens * owner_share)
        self._shares = {o: int(budget_tokens * share) for o, share in owner_shares.items()}
        self._limit_pins = limit_pins
        self._tree = PinTree(page)
        self._pins: dict[int, Pin] = {}
        self._by_prefix: dict[str, Pin] = {}
        self._by_session: dict[str, dict[int, Pin]] = {}
        self._order: list[_Place] = []  # ascending
        self._last_id = 0
        self._now_s = -inf
        self._soonest_s = inf  # no deadline is before it

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        """All pins, the oldest first."""
        return iter(self._pins.values())

    @property
    def tokens(self) -> int:
        """How many tokens are pinned, those that pins share counted once."""
        return self._tree.tokens

    def tokens_of(self, owner: str) -> int:
        """How many of the tokens the owner is charged for."""
        return self._tree.tokens_of(owner)

    def grant(
        self,
        space: Hashable,
        key: bytes,
        ttl_s: float,
        now: float,
        *,
        owner: str = "",
        session: str = "",
        priority: int = 0,
        label: Any = None,
    ) -> Grant:
        """Pins a prefix, or renews the pin it has, which counts as no hit.

        space: prefixes are shared within it only; its repr tells it from others.
        key: the prefix, its token ids as 8 bytes each; whole pages.
        label: kept with a new pin; a renewed one keeps its own.
        """
        if len(key) % TOKEN_BYTES:
            raise ValueError(f"key ends inside a token: {len(key)} bytes")
        if not 0 < ttl_s < inf:
            raise ValueError(f"ttl_s is not a positive time: {ttl_s}")
        now = self._advance(now)
        tokens = len(key) // TOKEN_BYTES
        path = self.prefixes_of(space, key)
        known = path[-1] if path and path[-1].tokens == tokens else None
        if known is not None:
            self._renew(known, now, ttl_s, priority, known.hits)
            known.owner = known.owner or owner
            if session and not known.session:
                known.session = session
                self._by_session.setdefault(session, {})[known.id] = known
            return Grant(known, False, [], "")
        if not tokens:
            return _refused(EMPTY)
        if tokens > self._budget_tokens:
            return _refused(BUDGET)
        if tokens > self._share_of(owner):
            return _refused(OWNER_SHARE)
        number, prefix = self._last_id + 1, _name(space, key)
        pin = Pin(
            number, prefix, tokens, ttl_s, now + ttl_s, now, now, 0, owner, session, priority, label
        )
        # It is in the tree before room is made: then what it shares with others is not freed.
        self._tree.insert(space, key, pin.id, owner)
        released = self._displaced(pin, {other.id for other in path})
        if isinstance(released, str):
            self._tree.remove(pin.id)
            return _refused(released)
        self._last_id = pin.id
        for other in released:
            self._remove(other)
        self._pins[pin.id] = self._by_prefix[pin.prefix] = pin
        if session:
            self._by_session.setdefault(session, {})[pin.id] = pin
        insort(self._order, _place(pin))
        self._soonest_s = min(self._soonest_s, pin.deadline_s)
        return Grant(pin, True, released, "")

    def hit(self, space: Hashable, key: bytes, now: float, tokens: int) -> list[Pin]:
        """A request read the first `tokens` of its prompt `key` from the cache.

        Every pin that it has read all of is renewed; returns these, the shortest first.
        """
        now = self._advance(now)
        pins = self.prefixes_of(space, key, tokens)
        for pin in pins:
            self._renew(pin, now, pin.ttl_s, pin.priority, pin.hits + 1)
        return pins

    def prefixes_of(self, space: Hashable, key: bytes, tokens: int | None = None) -> list[Pin]:
        """The pins that the first `tokens` of the key begin with, the shortest first."""
        return [self._pins[number] for number in self._tree.find(space, key, tokens)]

    def is_prefix(self, pin: Pin, space: Hashable, key: bytes) -> bool:
        """Whether the pin is held and `key` begins with its tokens.

        To ask about many pins, take `prefixes_of` once.
        """
        return pin in self.prefixes_of(space, key, pin.tokens)

    def expire(self, now: float) -> list[Pin]:
        """Removes the pins whose lease has run out, the soonest deadline first."""
        now = self._advance(now)
        if now < self._soonest_s:
            return []
        over = [pin for pin in self if pin.deadline_s <= now]
        for pin in over:
            self._remove(pin)
        self._soonest_s = min((pin.deadline_s for pin in self), default=inf)
        return sorted(over, key=lambda pin: (pin.deadline_s, pin.id))

    def release(self, pin: Pin) -> bool:
        """Removes a pin; whether it was held until now."""
        if not self._held(pin):
            return False
        self._remove(pin)
        return True

    def clear(self) -> list[Pin]:
        """Removes all pins, as the tree they were in was emptied; returns them."""
        pins = list(self)
        self._tree.clear()
        for record in (self._pins, self._by_prefix, self._by_session, self._order):
            record.clear()
        self._soonest_s = inf
        return pins

    def in_order(self) -> list[Pin]:
        """All pins in release order."""
        return [self._pins[number] for _, _, number in self._order]

    def find(self, prefix: str) -> Pin | None:
        """The pin of that name."""
        return self._by_prefix.get(prefix)

    def pinned(self, space: Hashable, key: bytes) -> Pin | None:
        """The pin of exactly this prefix, if there is one."""
        path = self.prefixes_of(space, key)
        return path[-1] if path and path[-1].tokens * TOKEN_BYTES == len(key) else None

    def of_session(self, session: str) -> list[Pin]:
        """The pins that the session was the first to ask for. Without a name it has none."""
        return list(self._by_session.get(session, {}).values())

    def _advance(self, now: float) -> float:
        self._now_s = max(self._now_s, now)
        return self._now_s

    def _held(self, pin: Pin) -> bool:
        return self._pins.get(pin.id) is pin

    def _renew(self, pin: Pin, now: float, ttl_s: float, priority: int, hits: int) -> None:
        self._unplace(pin)
        pin.ttl_s = max(pin.ttl_s, ttl_s)
        pin.priority = max(pin.priority, priority)
        pin.hits, pin.used_s = hits, now
        pin.deadline_s = now + pin.ttl_s  # never earlier: neither of the two ever falls
        insort(self._order, _place(pin))

    def _share_of(self, owner: str) -> int:
        return self._shares.get(owner, self._share_tokens)

    def _displaced(self, new: Pin, path: Container[int]) -> list[Pin] | str:
        """The pins that go for the new one, which is in the tree, or why it cannot stay."""
        place = _place(new)

        def before() -> Iterator[Pin]:
            for other in self._order:
                if other > place:
                    return
                if other[-1] not in path:  # the new one needs all of their tokens
                    yield self._pins[other[-1]]

        trial = self._tree.trial()
        gone: dict[int, Pin] = {}
        share = self._share_of(new.owner)
        if share < self._budget_tokens:
            own = (pin for pin in before() if pin.owner == new.owner)
            if not _make_room(trial, own, lambda: trial.tokens_of(new.owner), share, gone):
                return OWNER_SHARE
        rest = (pin for pin in before() if pin.id not in gone)
        if not _make_room(trial, rest, lambda: trial.tokens, self._budget_tokens, gone):
            return WORTH_LESS
        if not gone and len(self) >= self._limit_pins:
            return list(islice(before(), 1)) or WORTH_LESS
        return sorted(gone.values(), key=_place)

    def _remove(self, pin: Pin) -> None:
        self._tree.remove(pin.id)
        self._unplace(pin)
        del self._pins[pin.id]
        del self._by_prefix[pin.prefix]
        if pin.session:
            pins = self._by_session[pin.session]
            del pins[pin.id]
            if not pins:
                del self._by_session[pin.session]

    def _unplace(self, pin: Pin) -> None:
        del self._order[bisect_left(self._order, _place(pin))]

    def check(self) -> None:
        """Asserts the invariants."""
        self._tree.check()
        assert self.tokens <= self._budget_tokens
        assert len(self) <= self._limit_pins
        for owner in {pin.owner for pin in self}:
            assert self.tokens_of(owner) <= self._share_of(owner)
        assert self._tree.pins == self._pins.keys()
        assert self._by_prefix == {pin.prefix: pin for pin in self}
        sessions: dict[str, dict[int, Pin]] = {}
        for number, pin in self._pins.items():
            assert pin.id == number <= self._last_id
            assert pin.deadline_s >= self._soonest_s
            if pin.session:
                sessions.setdefault(pin.session, {})[number] = pin
        assert self._by_session == sessions
        assert self._order == sorted(_place(pin) for pin in self)


def _refused(reason: str) -> Grant:
    return Grant(None, False, [], reason)


def _place(pin: Pin) -> _Place:
    """Where a pin stands in the release order."""
    return pin.priority, pin.standing_s, pin.id


def _name(space: Hashable, key: bytes) -> str:
    name = xxhash.xxh3_128(repr(space).encode("utf-8", "surrogatepass"))
    name.update(key)
    return name.hexdigest()


def _make_room(
    trial: Trial, pins: Iterable[Pin], held: Callable[[], int], most: int, gone: dict[int, Pin]
) -> bool:
    """Leaves pins out, the first ones first, until no more than `most` tokens are held.

    Whether it can be done. Of those left out on the way, one that need not go after all
    stays, the last ones first: what it has may be shared, or too little to matter.
    """
    tried = []
    for pin in pins:
        if held() <= most:
            break
        trial.remove(pin.id)
        tried.append(pin)
    if held() > most:
        return False
    for pin in reversed(tried):
        trial.restore(pin.id)
        if held() > most:
            trial.remove(pin.id)
            gone[pin.id] = pin
    return True
