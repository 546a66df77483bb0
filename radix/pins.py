"""All pins of an engine: which prefixes keep their place in the cache, and for how long.

Requests with the same prefix share one pin, and each request that reads the prefix from the cache
renews it. Pins nest: a request that reads a long prefix renews every pin on a part of it.

The cache cannot evict a pinned prefix. So there is a budget for the tokens of all pinned
prefixes together. If a new pin exceeds it, other pins are released in the order below,
except for those on a part of the new prefix and those whose release would not help.

The pins of one owner can use a share of the budget (below). Tokens that several
owners pin are charged to the first of them. Requests without an owner count as one owner.

Each rank of an engine has its own pins, and all ranks must decide the same. So every result
depends only on the calls and their order. Times are parameters; a time that is earlier than the
latest one counts as the latest one.

Invariants, asserted by `check`: pinned tokens are within the budget, and each owner's charge and
number of pins are within its share; every pin is in the tree and in the release order; no deadline
is before the soonest one that is known.

A pin is a lease on the first tokens of prompts. Pins are released in this order, the least valuable
first:

    (priority, valuable_until_s, id)
    valuable_until_s = used_s + VALUE_SHARE * ttl_s * hits / (hits + 1)

A pin that was never read is valuable until the time of its grant. Each read brings the time closer
to VALUE_SHARE of the lease, as a prefix that was read often will be read again. A new pin is
valuable until now, so it displaces pins of its priority that were never read, or that are idle for
longer than their reads justify, and never one in use.

Why not the whole lease: most agents come back within seconds, and the longer one is away, the less
likely it is back in the next seconds. On recorded sessions (`bench.recorded`) with more agents than
memory, where all prompts are marked, pins that were valuable for their whole lease held prompts
that no agent read in place of those that agents came back to: a fifth more tokens were computed
again.

A new pin displaces others within the limits that pins and their owners have. One owner can use a
share of the budget, and of the number of pins. Beyond that share its pins displace only each other.
While several owners have pins, each is guaranteed an equal part of the budget and of the number, or
its share if that is less. What others leave of it can be used:

    within its part    an owner's pins are displaced by its own alone, whatever the priority of
                       others', and for a new pin others give back what they have beyond theirs
    beyond             others displace its pins in release order, down to its part
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

import xxhash

from radix.pin_tree import TOKEN_BYTES, PinTree, Trial

EMPTY = "empty"
"""Rejected: there are no tokens to pin."""
BUDGET = "budget"
"""Rejected: the prefix alone is longer than the budget."""
OWNER_SHARE = "owner share"
"""Rejected: the prefix alone exceeds the owner's share, or more valuable pins fill that share."""
LESS_VALUABLE = "less valuable"
"""Rejected: more valuable pins leave no room for it."""

VALUE_SHARE = 0.1
"""Of its lease, how long a pin that was read often and is idle now goes after new ones."""

ReleaseOrder = tuple[int, float, int]


@dataclass(slots=True, eq=False)
class Pin:
    """A lease on a prefix. Only `Pins` changes it, except for `label`.

    id: ascending in the order of grants.
    prefix: a hash of the space and the tokens, as hexadecimal digits.
    used_s: the time of the last read or request for the pin.
    hits: how many requests have read the whole prefix from the cache.
    owner: the first tenant that named itself in a request for the pin.
    session: the first session that did.
    label: belongs to the caller.
    """

    id: int
    prefix: str
    tokens: int
    ttl_s: float
    deadline_s: float
    granted_s: float
    used_s: float
    hits: int
    owner: str
    session: str
    priority: int
    label: Any

    @property
    def valuable_until_s(self) -> float:
        return self.used_s + VALUE_SHARE * self.ttl_s * self.hits / (self.hits + 1)

    @property
    def release_order(self) -> ReleaseOrder:
        return self.priority, self.valuable_until_s, self.id


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


class Grant(NamedTuple):
    """The result of a request for a pin.

    pin: None if the request was rejected, for `reason`.
    released: the pins that the new one displaced; none if it was rejected.
    """

    pin: Pin | None
    is_new: bool = False
    released: list[Pin] = []  # noqa: RUF012 - never changed
    reason: str = ""


class Pins:
    """The pins of one engine, whose prefixes are whole pages of `page` tokens.

    budget_tokens: how many tokens all pinned prefixes can have together.
    owner_share: the part of the budget that one owner can be charged for, and of `limit_pins`.
    owner_shares: the same for single owners, in place of `owner_share`.
    ids: the numbers of new pins, ascending, where pins move between several `Pins`.
    on_displaced: called with each pin that the limits remove, the most valuable first, while it is
        still here.
    """

    def __init__(
        self,
        *,
        budget_tokens: int,
        owner_share: float = 1.0,
        owner_shares: Mapping[str, float] = MappingProxyType({}),
        limit_pins: int = 4096,
        page: int = 1,
        ids: Iterator[int] | None = None,
        on_displaced: Callable[[Pin], object] = lambda _: None,
    ) -> None:
        self._limits = PinLimits(budget_tokens, limit_pins, owner_share, owner_shares)
        self._tree = PinTree(page)
        self._pins: dict[int, Pin] = {}
        self._counts: Counter[str] = Counter()  # pins, by owner
        self._order: list[ReleaseOrder] = []
        self._ids = count(1) if ids is None else ids
        self._on_displaced = on_displaced
        self._now_s = -inf
        self._soonest_s = inf

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        """All pins, the oldest first."""
        return iter(self._pins.values())

    def __contains__(self, pin: Pin) -> bool:
        return self._pins.get(pin.id) is pin

    @property
    def tokens(self) -> int:
        """The number of pinned tokens; tokens that pins share count once."""
        return self._tree.tokens

    @property
    def budget_tokens(self) -> int:
        return self._limits.tokens

    def tokens_of(self, owner: str) -> int:
        """The number of tokens that the owner is charged for."""
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
        tokens: int | None = None,
    ) -> Grant:
        """Pins a prefix, or renews its pin, which counts as no hit and keeps its label. A renewal
        copies nothing of the key.

        space: pins of different spaces share no tokens; its repr identifies it.
        key: the prefix, or a prompt that begins with it, each token id as 8 bytes.
        tokens: the prefix's, whole pages; all of the key by default.
        """
        assert len(key) % TOKEN_BYTES == 0, "a key ends between two tokens"
        assert 0 < ttl_s < inf, "a lease has an end"
        now = self._advance(now)
        tokens = len(key) // TOKEN_BYTES if tokens is None else tokens
        path = self.prefixes_of(space, key, tokens)
        if path and path[-1].tokens == tokens:
            known = path[-1]
            self._renew(known, now, ttl_s, priority, known.hits)
            known.session = known.session or session
            if not known.owner and self._counts[owner] < self._limits.share_of(owner)[1]:
                self._count(known.owner, -1)
                known.owner = owner
                self._count(owner, 1)
            return Grant(known)
        if reason := self._too_long(tokens, owner):
            return Grant(None, reason=reason)
        key = key[: tokens * TOKEN_BYTES]
        number, prefix = next(self._ids), _hash(space, key)
        pin = Pin(
            number, prefix, tokens, ttl_s, now + ttl_s, now, now, 0, owner, session, priority, label
        )
        return self._place(pin, space, key, path)

    def adopt(self, pin: Pin, space: Hashable, key: bytes) -> Grant:
        """Takes a pin on the whole key from other `Pins`, with its lease and its reads, if there is
        room as for a new one."""
        if reason := self._too_long(pin.tokens, pin.owner):
            return Grant(None, reason=reason)
        return self._place(pin, space, key, self.prefixes_of(space, key))

    def _too_long(self, tokens: int, owner: str) -> str:
        """Why a prefix of so many tokens is rejected whatever else is pinned; "" if it is not."""
        if not tokens:
            return EMPTY
        if tokens > self._limits.tokens:
            return BUDGET
        return OWNER_SHARE if tokens > self._limits.share_of(owner)[0] else ""

    def _place(self, pin: Pin, space: Hashable, key: bytes, path: list[Pin]) -> Grant:
        # The pin is in the tree before others are released: tokens it shares do not become free.
        self._tree.insert(space, key, pin.id, pin.owner)
        released = choose_released(
            pin,
            self.in_order,
            {other.id for other in path},
            self._tree,
            self._counts,
            self._limits,
        )
        if isinstance(released, str):
            self._tree.remove(pin.id)
            return Grant(None, reason=released)
        self._displace(released)
        self._pins[pin.id] = pin
        self._count(pin.owner, 1)
        insort(self._order, pin.release_order)
        self._soonest_s = min(self._soonest_s, pin.deadline_s)
        return Grant(pin, True, released)

    def place_of(self, pin: Pin) -> tuple[Hashable, bytes]:
        """A pin's space and its whole key."""
        return self._tree.place_of(pin.id)

    def hit(self, space: Hashable, key: bytes, now: float, tokens: int) -> list[Pin]:
        """A request read the first `tokens` of its prompt `key` from the cache.

        Renews every pin whose prefix it read whole; returns them, the shortest first.
        """
        now = self._advance(now)
        pins = self.prefixes_of(space, key, tokens)
        for pin in pins:
            self._renew(pin, now, pin.ttl_s, pin.priority, pin.hits + 1)
        return pins

    def prefixes_of(self, space: Hashable, key: bytes, tokens: int | None = None) -> list[Pin]:
        """The pins on prefixes of the key's first `tokens`, the shortest first."""
        return [self._pins[number] for number in self._tree.find(space, key, tokens)]

    def expire(self, now: float, most: int | None = None) -> list[Pin]:
        """Removes the pins whose lease is over, or `most` of them; returns them, the soonest
        deadline first."""
        now = self._advance(now)
        if now < self._soonest_s:
            return []
        over = sorted(
            (pin for pin in self if pin.deadline_s <= now), key=lambda pin: (pin.deadline_s, pin.id)
        )[:most]
        for pin in over:
            self._remove(pin)
        self._soonest_s = min((pin.deadline_s for pin in self), default=inf)
        return over

    def change_limits(
        self, budget_tokens: int, owner_share: float, owner_shares: Mapping[str, float]
    ) -> list[Pin]:
        """Changes the limits. Removes the pins that exceed them, as few as possible; returns these,
        the least valuable first."""
        self._limits = PinLimits(budget_tokens, self._limits.pins, owner_share, owner_shares)
        excess = choose_excess(
            self.in_order(), self.in_turns(), self._tree, self._counts, self._limits
        )
        self._displace(excess)
        return excess

    def release(self, pin: Pin) -> bool:
        """Removes a pin; False if it was removed before."""
        if pin not in self:
            return False
        self._remove(pin)
        return True

    def clear(self) -> list[Pin]:
        """Removes all pins, because the cache was emptied; returns them."""
        pins = list(self)
        for pin in pins:
            self._remove(pin)
        self._soonest_s = inf
        return pins

    def in_order(self) -> list[Pin]:
        """All pins in release order."""
        return [self._pins[number] for _, _, number in self._order]

    def in_turns(self) -> list[Pin]:
        """All pins in the order in which they give way to other things than pins: always the least
        valuable one of the owner that has most."""
        queues: dict[str, list[Pin]] = {}
        for pin in reversed(self.in_order()):
            queues.setdefault(pin.owner, []).append(pin)
        turns = [(-self.tokens_of(owner), owner) for owner in queues]
        heapify(turns)
        order: list[Pin] = []
        while turns:
            held, owner = heappop(turns)
            order.append(queues[owner].pop())
            if queues[owner]:
                heappush(turns, (held + order[-1].tokens, owner))
        return order

    def pinned(self, space: Hashable, key: bytes, tokens: int | None = None) -> Pin | None:
        """The pin on exactly the key's first `tokens`, or all of them."""
        tokens = len(key) // TOKEN_BYTES if tokens is None else tokens
        path = self.prefixes_of(space, key, tokens)
        return path[-1] if path and path[-1].tokens == tokens else None

    def of_session(self, session: str) -> list[Pin]:
        """The pins that the session requested first. "" is no session."""
        return [pin for pin in self if session and pin.session == session]

    def _advance(self, now: float) -> float:
        self._now_s = max(self._now_s, now)
        return self._now_s

    def _renew(self, pin: Pin, now: float, ttl_s: float, priority: int, hits: int) -> None:
        self._remove_from_order(pin)
        pin.ttl_s = max(pin.ttl_s, ttl_s)
        pin.priority = max(pin.priority, priority)
        pin.hits, pin.used_s = hits, now
        pin.deadline_s = now + pin.ttl_s  # never earlier than before, as neither ever decreases
        insort(self._order, pin.release_order)

    def _count(self, owner: str, by: int) -> None:
        self._counts[owner] += by
        if not self._counts[owner]:
            del self._counts[owner]

    def _displace(self, pins: list[Pin]) -> None:
        for pin in reversed(pins):
            self._on_displaced(pin)
            self._remove(pin)

    def _remove(self, pin: Pin) -> None:
        self._tree.remove(pin.id)
        self._remove_from_order(pin)
        self._count(pin.owner, -1)
        del self._pins[pin.id]

    def _remove_from_order(self, pin: Pin) -> None:
        del self._order[bisect_left(self._order, pin.release_order)]

    def check(self) -> None:
        """Asserts the invariants."""
        self._tree.check()
        assert self.tokens <= self._limits.tokens
        assert len(self) <= self._limits.pins
        for owner in {pin.owner for pin in self}:
            tokens, pins = self._limits.share_of(owner)
            assert self.tokens_of(owner) <= tokens
            assert self._counts[owner] <= pins
        assert self._counts == Counter(pin.owner for pin in self)
        assert self._tree.pins == self._pins.keys()
        for number, pin in self._pins.items():
            assert pin.id == number
            assert pin.deadline_s >= self._soonest_s
        assert self._order == sorted(pin.release_order for pin in self)


def _hash(space: Hashable, key: bytes) -> str:
    hashed = xxhash.xxh3_128(repr(space).encode("utf-8", "surrogatepass"))
    hashed.update(key)
    return hashed.hexdigest()
