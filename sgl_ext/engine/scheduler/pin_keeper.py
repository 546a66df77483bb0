"""The pins of one scheduler, as locks in its radix cache. `radix.pins` decides.

All ranks of an engine must lock and unlock in the same iteration, or their memory differs
and their collectives hang. So nothing here asks a clock: time is what requests were stamped
with and what the entry rank tells all ranks (`sgl_ext.engine.scheduler.clock`), and everything else
is equal on all ranks anyhow.

A pin holds against the cache pressure of other prefixes, never against a live request:

    admission    `admit`: a request that does not fit is asked for again, with one pin less
                 each time, least valuable first, until it fits. If it never does, all stay.
    allocation   `make_room`: before decoding requests are retracted, or an allocation fails,
                 pins are given up until there is room.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from radix.pin import Pin
from radix.pins import Pins
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.hints import Hints
from sgl_ext.engine.core.request_context import WHOLE_PROMPT
from sgl_ext.engine.core.shared_prefixes import group_salt

_TOKEN_BYTES = 8
_SEEN = "_sgl_ext_pinned"


@dataclass(slots=True, eq=False)
class Holding:
    """A pin's lock, and what the adapter knows of it.

    segment: the deepest segment at or before its end, of the request that had it made.
    is_shared: more than one session has used it.
    """

    node: Any
    lock: Any
    segment: int | None
    is_shared: bool = False


@dataclass(slots=True)
class Changes:
    """Pins made, renewed or read, and pins gone, since they were last taken."""

    seen: dict[str, Pin] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)


class PinKeeper:
    """Keeps `pins` in `cache`. `tells`: whether this rank counts and publishes."""

    def __init__(self, cache: Any, pins: Pins, page: int, tells: bool) -> None:
        self.pins = pins
        self.now_s = 0.0
        self._cache = cache
        self._page = page
        self._tells = tells
        self._changes = Changes()

    @property
    def tokens(self) -> int:
        """Tokens that are pinned, each once."""
        return self.pins.tokens

    def advance(self, now_s: float) -> None:
        """Time goes on, on every rank alike: leases end."""
        if now_s > self.now_s:
            self.now_s = now_s
            self._drop(self.pins.expire(now_s), "expired")

    def seen(self, req: Any, hints: Hints, resident: int) -> None:
        """A request's prompt is in the tree up to `resident` tokens: reads and marks count."""
        if not (hints.pins or len(self.pins)):
            return
        self.advance(hints.sent_s)
        space, key = _space(req), _key(req)
        if not hasattr(req, _SEEN):
            setattr(req, _SEEN, 0)
            for pin in self.pins.hit(space, key, self.now_s, req.cached_tokens):
                pin.label.is_shared |= pin.session != hints.session
                self._count("pins_read")
                self._tell(pin)
        for tokens, ttl_s in hints.pins[getattr(req, _SEEN) :]:
            end = len(req.origin_input_ids) if tokens == WHOLE_PROMPT else tokens
            end -= end % self._page
            if end > resident:
                return
            setattr(req, _SEEN, getattr(req, _SEEN) + 1)
            if hints.is_reusable and not hints.is_last and end:
                self._pin(req, hints, space, key, end, ttl_s)

    def _pin(
        self, req: Any, hints: Hints, space: Any, key: bytes, tokens: int, ttl_s: float
    ) -> None:
        node: Any = None
        if self.pins.pinned(space, key[: tokens * _TOKEN_BYTES]) is None:
            # Where a model keeps more than keys and values, less may be of use than is there.
            tokens, node = self._cache.match_until(req, tokens)
            if not tokens:
                self._count("pins_refused", "nothing to lock")
                return
        grant = self.pins.grant(
            space,
            key[: tokens * _TOKEN_BYTES],
            ttl_s,
            self.now_s,
            owner=hints.owner,
            session=hints.session,
            priority=hints.priority,
        )
        self._drop(grant.released, "displaced")
        if grant.pin is None:
            self._count("pins_refused", grant.reason)
            return
        if grant.is_new:
            segment = _segment_before(hints, tokens, len(req.origin_input_ids))
            grant.pin.label = Holding(node, self._cache.lock(node), segment)
        elif grant.pin.session != hints.session:
            grant.pin.label.is_shared = True
        self._count("pins_granted" if grant.is_new else "pins_renewed")
        self._tell(grant.pin)

    def ended(self, hints: Hints) -> None:
        """A session will not come back: what it alone used need not be kept."""
        if hints.session:
            pins = self.pins.of_session(hints.session)  # of whoever calls one by this name
            own = [p for p in pins if p.owner == hints.owner and not p.label.is_shared]
            self.release(own, "ended")

    def release(self, pins: Iterable[Pin], why: str) -> int:
        """Gives up pins, whose number is returned."""
        released = [pin for pin in pins if self.pins.release(pin)]
        self._drop(released, why)
        return len(released)

    def release_named(self, prefixes: Iterable[str]) -> None:
        """Gives up the pins of these prefixes, where there are any."""
        named = frozenset(prefixes)
        self.release([pin for pin in self.pins if pin.prefix in named], "deleted")

    def admit(self, req: Any, fits: Callable[[], bool]) -> bool:
        """Whether `fits` comes true with fewer pins; then those are given up, else none is."""
        own = self.pins.prefixes_of(_space(req), _key(req))
        others = [pin for pin in self.pins.in_order() if pin not in own]
        unlocked: list[Pin] = []
        for freed in self._freeing(others):
            unlocked += freed
            if fits():
                self.release(unlocked, "pressure")
                return True
        for pin in unlocked:
            pin.label.lock = self._cache.lock(pin.label.node)
        return False

    def make_room(self, is_enough: Callable[[], bool]) -> None:
        """Gives up pins, least valuable first, until there is enough or none is of use."""
        if is_enough():
            return
        for freed in self._freeing(self.pins.in_order()):
            self.release(freed, "pressure")
            if is_enough():
                return

    def _freeing(self, pins: list[Pin]) -> Iterator[list[Pin]]:
        """Unlocks in this order those that free something: not what a longer pin or a request
        holds as well. When the longer one is gone, the shorter may. Groups that share a prefix
        may each have a pin on it: these go together. Last come those that free no tokens but
        the state that a model keeps at their end."""
        together = _by_node(pins)
        for evictable in (self._cache.full_evictable_size, self._states_evictable_size):
            is_going = True
            while is_going:
                is_going, useless = False, []
                for some in together:
                    before = evictable()
                    for pin in some:
                        self._cache.unlock(pin.label.lock)
                    if evictable() > before:
                        for pin in some:
                            pin.label.lock = None
                        is_going = True
                        yield some
                    else:
                        for pin in some:
                            pin.label.lock = self._cache.lock(pin.label.node)
                        useless.append(some)
                together = useless

    def _states_evictable_size(self) -> int:
        return int(self._cache.swa_evictable_size() + self._cache.mamba_evictable_size())

    def forget_all(self) -> None:
        """The tree was emptied, and every lock in it with it."""
        for pin in self.pins.clear():
            self._count("pins_ended", "flushed")
            self._tell_gone(pin)

    def take(self) -> Changes:
        """What happened since the last call."""
        changes, self._changes = self._changes, Changes()
        return changes

    @property
    def changed(self) -> bool:
        """Whether `take` would return anything."""
        return bool(self._changes.seen or self._changes.gone)

    def _drop(self, pins: Iterable[Pin], why: str) -> None:
        for pin in pins:
            self._cache.unlock(pin.label.lock)
            self._count("pins_ended", why)
            self._tell_gone(pin)

    def _tell(self, pin: Pin) -> None:
        if self._tells:
            self._changes.seen[pin.prefix] = pin
            self._changes.gone.discard(pin.prefix)

    def _tell_gone(self, pin: Pin) -> None:
        if self._tells:
            self._changes.seen.pop(pin.prefix, None)
            self._changes.gone.add(pin.prefix)

    def _count(self, name: str, *labels: str) -> None:
        if self._tells:
            made = counter(name)
            (made.labels(*labels) if labels else made).inc()


def _by_node(pins: list[Pin]) -> list[list[Pin]]:
    """Pins, those of one node together, each where the last of them stands."""
    together: dict[Any, list[Pin]] = {}
    for pin in reversed(pins):
        together.setdefault(pin.label.node, []).append(pin)
    return list(reversed(together.values()))


def _space(req: Any) -> tuple[str, ...]:
    """What parts the tree into trees that share nothing. Of a prefix that the operator has all
    groups share, each has its own pins."""
    salt = req.cache_salt or ""
    group = group_salt(salt)
    return (req.extra_key or "", *((salt,) if group is None else (group, "shared")))


def _key(req: Any) -> bytes:
    ids = req.origin_input_ids
    return (ids if isinstance(ids, array) and ids.itemsize == 8 else array("q", ids)).tobytes()


def _segment_before(hints: Hints, tokens: int, prompt_tokens: int) -> int | None:
    """The deepest segment that ends at or before so many tokens, as far as bytes tell."""
    if not hints.ends:
        return None
    reached = hints.ends[-1] * tokens / prompt_tokens
    held = [h for h, end in zip(hints.hashes, hints.ends, strict=True) if end <= reached]
    return held[-1] if held else None
