"""The pins of one scheduler, as locks in its radix cache. `radix.pins` decides.

All ranks of an engine must lock and unlock in the same iteration, or their memory differs and
their collectives hang. So nothing here reads a clock: time comes from the timestamps of requests
and from the entry rank's ticks (`sgl_ext.engine.scheduler.iteration`), and all other input is
equal on all ranks.

A pin holds against the cache pressure of other prefixes, never against a live request:

    admission    `admit`: a request that does not fit is tried again with one pin less each time,
                 from the owner that has most its least valuable, until it fits. If it never
                 fits, all pins stay.
    allocation   `make_room`: before decoding requests are retracted or an allocation fails, pins
                 are given up until there is enough memory.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from radix.pin import Pin
from radix.pins import Pins
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.hints import Hints
from sgl_ext.engine.core.request_context import WHOLE_PROMPT
from sgl_ext.engine.core.shared_prefixes import group_salt
from sgl_ext.engine.scheduler.state import compare, state_of
from sgl_ext.engine.sglang_types import Req

if TYPE_CHECKING:
    from sgl_ext.engine.scheduler.radix_cache import ExtendedRadixCache

_MOST_EXPIRED = 256  # at most about 3 ms


@dataclass(slots=True, eq=False)
class PinLock:
    """The lock of a pin, as the pin's label.

    segment: the deepest segment that ends at or before the pin's end, of the request that made it.
    is_shared: whether more than one session has used it.
    """

    node: Any
    lock: Any
    segment: int | None
    is_shared: bool = False


class PinKeeper:
    """Keeps `pins` locked in `cache`. Only the entry rank counts and publishes changes.

    changed: the pins that were made, renewed or read since the last publication, by name; None for
        one that ended.
    lookahead: how many tokens must follow a prefix in the tree. It is 1 with a draft model, for
        which SGLang's tree has pairs of tokens.
    """

    def __init__(
        self,
        cache: "ExtendedRadixCache",
        pins: Pins,
        page: int,
        is_entry_rank: bool,
        lookahead: int = 0,
    ) -> None:
        self.pins = pins
        self.now_s = 0.0
        self.changed: dict[str, Pin | None] = {}
        self._cache = cache
        self._page = page
        self._lookahead = lookahead
        self._is_entry_rank = is_entry_rank
        self._is_admitting = False

    @property
    def tokens(self) -> int:
        """The pinned tokens; a token of several pins counts once."""
        return self.pins.tokens

    def advance(self, now_s: float) -> None:
        """Sets the clock, on every rank alike, and ends the leases that expire, a bounded number in
        a call: a batch's output may wait for this."""
        if now_s > self.now_s:
            self.now_s = now_s
            self._drop(self.pins.expire(now_s, _MOST_EXPIRED), "expired")

    def prompt_stored(self, req: Req, hints: Hints, resident: int) -> None:
        """A request's prompt is in the tree up to `resident` tokens: counts the pins that it read,
        and pins the marked prefixes that are in the tree."""
        if not (hints.pins or len(self.pins)):
            return
        self.advance(hints.sent_s)
        state = state_of(req)
        is_first = state.marks_seen is None
        seen = state.marks_seen or 0
        reached = [*takewhile(lambda mark: mark[0] <= resident, self._marks(req, hints, seen))]
        state.marks_seen = seen + len(reached)
        if not (is_first or reached):
            return  # a chunk between two marks; a key of the whole prompt for each is quadratic
        space, key = _space(req), _key(req)
        if is_first:
            if hints.is_demoted:
                self._release_own(hints, self.pins.prefixes_of(space, key), "demoted")
            for pin in self.pins.hit(space, key, self.now_s, req.cached_tokens):
                pin.label.is_shared |= pin.session != hints.session
                self._count("pins_read")
                self._note(pin.prefix, pin)
        for end, ttl_s in reached:
            if hints.is_reusable and not hints.is_last and end > 0:
                self._pin(req, hints, space, key, end, ttl_s)

    def _marks(self, req: Req, hints: Hints, seen: int) -> Iterator[tuple[int, float]]:
        """The marks after the first `seen`: the tokens that can be pinned up to each, and its
        TTL."""
        for tokens, ttl_s in hints.pins[seen:]:
            end = len(req.origin_input_ids) if tokens == WHOLE_PROMPT else tokens
            end -= self._lookahead
            yield end - end % self._page, ttl_s

    def _pin(
        self, req: Req, hints: Hints, space: Any, key: bytes, tokens: int, ttl_s: float
    ) -> None:
        node: Any = None
        if self.pins.pinned(space, key, tokens) is None:
            # A model that also caches states may be able to use less than what is in the tree.
            tokens, node = self._cache.match_until(req, tokens)
            if not tokens:
                self._count("pins_rejected", "nothing to lock")
                return
        grant = self.pins.grant(
            space,
            key,
            ttl_s,
            self.now_s,
            owner=hints.owner,
            session=hints.session,
            priority=hints.priority,
            tokens=tokens,
        )
        self._drop(grant.released, "displaced")
        if grant.pin is None:
            self._count("pins_rejected", grant.reason)
            return
        if grant.is_new:
            segment = _segment_before(hints, tokens, len(req.origin_input_ids))
            grant.pin.label = PinLock(node, self._cache.lock(node), segment)
        elif grant.pin.session != hints.session:
            grant.pin.label.is_shared = True
        self._count("pins_granted" if grant.is_new else "pins_renewed")
        self._note(grant.pin.prefix, grant.pin)

    def end_session(self, hints: Hints) -> None:
        """A client ended its session: gives up the pins that no other session has used."""
        if hints.session:
            self._release_own(hints, self.pins.of_session(hints.session), "ended")

    def _release_own(self, hints: Hints, pins: Iterable[Pin], why: str) -> None:
        """Gives up those of these pins that no other session, and no other tenant, has used."""
        ours = (hints.owner, hints.session)
        own = [p for p in pins if (p.owner, p.session) == ours and not p.label.is_shared]
        self.release(own, why)

    def change_limits(
        self, budget_tokens: int, owner_share: float, owner_shares: Mapping[str, float]
    ) -> None:
        """Changes the limits of all pins and of each tenant's, and gives up what exceeds them."""
        self._drop(self.pins.change_limits(budget_tokens, owner_share, owner_shares), "reduced")

    def release(self, pins: Iterable[Pin], why: str) -> None:
        """Gives up pins."""
        self._drop([pin for pin in pins if self.pins.release(pin)], why)

    def release_named(self, prefixes: Iterable[str]) -> None:
        """Gives up the pins with these names, if they exist."""
        named = frozenset(prefixes)
        self.release([pin for pin in self.pins if pin.prefix in named], "deleted")

    def admit(self, req: Req, fits: Callable[[], bool]) -> bool:
        """Whether `fits` becomes true with fewer pins. If it does, those pins are given up; if it
        does not, all pins stay, except for those that `fits` evicted."""
        own = self.pins.prefixes_of(_space(req), _key(req))
        others = [pin for pin in self.pins.in_turns() if pin not in own]
        unlocked: list[Pin] = []
        for freed in self._unlock_in_turn(others):
            unlocked += freed
            self._is_admitting = True
            try:
                is_admitted = fits()
            finally:
                self._is_admitting = False
            if is_admitted:
                self.release(unlocked, "pressure")
                return True
        evicted = [pin for pin in unlocked if self._cache.is_evicted(pin.label.node)]
        self.release(evicted, "pressure")
        self._lock(pin for pin in unlocked if pin not in evicted)
        return False

    def make_room(self, is_enough: Callable[[], bool]) -> None:
        """Gives up pins, as `admit` does, until there is enough or none frees memory. It does
        nothing within `admit`, which gives them up itself."""
        if is_enough() or self._is_admitting:
            return
        for freed in self._unlock_in_turn(self.pins.in_turns()):
            self.release(freed, "pressure")
            if is_enough():
                return

    def _unlock_in_turn(self, pins: list[Pin]) -> Iterator[list[Pin]]:
        """Unlocks, in this order, the pins that free memory when they are unlocked.

        A pin frees nothing if a longer pin or a request holds the same tokens; once the longer
        one is unlocked, it may. Groups that share a prefix may each have a pin on its node: these
        are unlocked together. Last come the pins that free no tokens, but the state that a model
        caches at their end.
        """
        nodes = _by_node(pins)
        for evictable in (self._cache.full_evictable_size, self._states_evictable_size):
            has_freed = True
            while has_freed:
                has_freed, useless = False, []
                for of_node in nodes:
                    before = evictable()
                    self._unlock(of_node)
                    if evictable() > before:
                        has_freed = True
                        yield of_node
                    else:
                        self._lock(of_node)
                        useless.append(of_node)
                nodes = useless

    def _states_evictable_size(self) -> int:
        return self._cache.swa_evictable_size() + self._cache.mamba_evictable_size()

    def forget_all(self) -> None:
        """The tree was emptied, and with it every lock."""
        self._note_ended(self.pins.clear(), "flushed")

    def _lock(self, pins: Iterable[Pin]) -> None:
        for pin in pins:
            pin.label.lock = self._cache.lock(pin.label.node)

    def _unlock(self, pins: Iterable[Pin]) -> None:
        for pin in pins:
            self._cache.unlock(pin.label.lock)
            pin.label.lock = None

    def _drop(self, pins: list[Pin], why: str) -> None:
        self._unlock(pins)
        self._note_ended(pins, why)

    def _note_ended(self, pins: Iterable[Pin], why: str) -> None:
        for pin in pins:
            self._count("pins_ended", why)
            self._note(pin.prefix, None)

    def _note(self, prefix: str, pin: Pin | None) -> None:
        compare("pin %s: %s", prefix, pin is not None)
        if self._is_entry_rank:
            self.changed[prefix] = pin

    def _count(self, name: str, *labels: str) -> None:
        if self._is_entry_rank:
            made = counter(name)
            (made.labels(*labels) if labels else made).inc()


def _by_node(pins: list[Pin]) -> list[list[Pin]]:
    """Pins grouped by their node; a group stands where its last pin stood."""
    groups: dict[Any, list[Pin]] = {}
    for pin in reversed(pins):
        groups.setdefault(pin.label.node, []).append(pin)
    return list(reversed(groups.values()))


def _space(req: Req) -> tuple[str, ...]:
    """The name space of a request in the tree; two name spaces share nothing. Of a prefix that all
    groups share, each group still has its own pins."""
    salt = req.cache_salt or ""
    group = group_salt(salt)
    return (req.extra_key or "", *((salt,) if group is None else (group, "shared")))


def _key(req: Req) -> bytes:
    ids = req.origin_input_ids
    return (ids if isinstance(ids, array) and ids.itemsize == 8 else array("q", ids)).tobytes()


def _segment_before(hints: Hints, tokens: int, prompt_tokens: int) -> int | None:
    """The deepest segment that ends at or before so many tokens, estimated by bytes."""
    if not hints.ends:
        return None
    reached = hints.ends[-1] * tokens / prompt_tokens
    index = bisect_right(hints.ends, reached) - 1
    return hints.hashes[index] if index >= 0 else None
