"""The pins of one scheduler, as locks in its radix cache. `radix.tiered_pins` decides.

All ranks of an engine must lock and unlock in the same iteration, or their memory differs and
their collectives hang. So nothing here reads a clock: time comes from the timestamps of requests
and from the entry rank's ticks (`sgl_ext.engine.scheduler.iteration`), and all other input is
equal on all ranks.

A pin holds against the cache pressure of other prefixes, never against a live request
(`sgl_ext.engine.scheduler.pin_pressure`). Where SGLang keeps host copies, a pin that gives way on
the device spills: its host copy is locked instead, and eviction takes its device memory alone. It
comes back to the device once a request has loaded it.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from radix.pin import BUDGET, Pin
from radix.tier import Tier
from radix.tiered_pins import Moves, TieredPins
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.hints import Hints
from sgl_ext.engine.core.request_context import WHOLE_PROMPT
from sgl_ext.engine.core.shared_prefixes import group_salt
from sgl_ext.engine.scheduler.state import compare, state_of
from sgl_ext.engine.sglang_types import Req
from sgl_ext.engine.tiers.pin_memory import PinLock, PinMemory

if TYPE_CHECKING:
    from sgl_ext.engine.scheduler.radix_cache import ExtendedRadixCache

_MOST_EXPIRED = 256  # at most about 3 ms
_NO_HOST_MEMORY = "host memory"


class PinKeeper:
    """Keeps `pins` locked in `cache`. Only the entry rank counts and publishes changes.

    memory: what the pins hold.
    cannot_spill: why they do not, though SGLang keeps host copies.
    changed: the pins that were made, renewed, read or moved since the last publication, by name;
        None for one that ended.
    lookahead: how many tokens must follow a prefix in the tree. It is 1 with a draft model, for
        which SGLang's tree has pairs of tokens.
    """

    def __init__(
        self,
        cache: "ExtendedRadixCache",
        pins: TieredPins,
        page: int,
        is_entry_rank: bool,
        lookahead: int = 0,
    ) -> None:
        self.pins = pins
        self.memory = PinMemory(cache)
        self.cannot_spill = ""
        self.now_s = 0.0
        self.changed: dict[str, Pin | None] = {}
        self._cache = cache
        self._page = page
        self._lookahead = lookahead
        self._is_entry_rank = is_entry_rank

    @property
    def tokens(self) -> int:
        """The tokens that pins hold on the device; a token of several pins counts once."""
        return self.pins.device.tokens

    def advance(self, now_s: float) -> None:
        """Sets the clock, on every rank alike, and ends the leases that expire, a bounded number in
        a call: a batch's output may wait for this."""
        if now_s > self.now_s:
            self.now_s = now_s
            self._drop(self.pins.expire(now_s, _MOST_EXPIRED), "expired")

    def prompt_stored(self, req: Req, hints: Hints, resident: int) -> None:
        """A request's prompt is in the tree up to `resident` tokens: counts the pins that it read,
        moves those that it loaded to the device, and pins the marked prefixes that are in the
        tree."""
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
        space, key = space_of(req), key_of(req)
        if is_first:
            if hints.is_demoted:
                self._release_own(hints, self.pins.prefixes_of(space, key), "demoted")
            for pin in self.pins.hit(space, key, self.now_s, req.cached_tokens):
                pin.label.is_shared |= pin.session != hints.session
                self._count("pins_read")
                self._note(pin.prefix, pin)
        for pin in self.pins.host.prefixes_of(space, key, resident):
            self._load(pin)
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

    def _load(self, pin: Pin) -> None:
        """Moves a pin from the host to the device, if its prefix is there and has room."""
        if pin not in self.pins.host or self.memory.is_evicted(pin):
            return
        moves = self.pins.load(pin)
        if moves is None:
            return
        self.memory.lock([pin])
        self.memory.unlock_copies([pin])
        self._count("pins_loaded")
        self._note(pin.prefix, pin)
        self._settle(moves, "displaced")

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
        named: dict[str, Any] = {"owner": hints.owner, "session": hints.session}
        named |= {"priority": hints.priority, "tokens": tokens}
        granted, moves = self.pins.grant(Tier.DEVICE, space, key, ttl_s, self.now_s, **named)
        reason = granted.reason
        if granted.pin is None and self.memory.copies is not None:
            granted, moves = self.pins.grant(Tier.HOST, space, key, ttl_s, self.now_s, **named)
        pin = granted.pin
        if pin is not None and granted.is_new:
            segment = _segment_before(hints, tokens, len(req.origin_input_ids))
            pin.label = PinLock(node, segment)
            if not self._hold(pin, moves):
                pin, reason = None, _NO_HOST_MEMORY
        elif pin is not None:
            pin.label.is_shared |= pin.session != hints.session
        if pin is None:
            self._count("pins_rejected", reason)
            return
        self._count("pins_granted" if granted.is_new else "pins_renewed")
        self._note(pin.prefix, pin)

    def _hold(self, pin: Pin, moves: Moves) -> bool:
        """Whether a new pin got its memory. moves: of the pins that moved for it."""
        if pin in self.pins.device:
            self.memory.lock([pin])
        self._settle(moves, "displaced")
        if pin in self.pins.host and not self.memory.copy(pin):
            self.pins.release(pin)
            return False
        return True

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
        self,
        budget_tokens: int,
        host_budget_tokens: int,
        owner_share: float,
        owner_shares: Mapping[str, float],
    ) -> None:
        """Changes the limits of all pins and of each tenant's. What exceeds those of the device
        spills, and what exceeds those of the host is given up."""
        moves = self.pins.change_limits(
            budget_tokens, host_budget_tokens, owner_share, owner_shares
        )
        self._settle(moves, "reduced")

    def release(self, pins: Iterable[Pin], why: str) -> None:
        """Gives up pins, wherever they are."""
        self._drop([pin for pin in pins if self.pins.release(pin)], why)

    def release_named(self, prefixes: Iterable[str]) -> None:
        """Gives up the pins with these names, if they exist."""
        named = frozenset(prefixes)
        self.release([pin for pin in self.pins if pin.prefix in named], "deleted")

    def copy_for_spill(self, pins: Iterable[Pin]) -> None:
        """Makes the host copies of pins that may spill, before anything of them is evicted."""
        for pin in pins:
            if pin.tokens <= self.pins.host.budget_tokens:
                self.memory.copy(pin)

    def give_way(self, pins: Iterable[Pin]) -> None:
        """Spills pins that are unlocked on the device, or ends them."""
        ready: list[Pin] = []
        lost: list[Pin] = []
        for pin in pins:
            is_ready = pin.label.copy is not None or not self.memory.is_evicted(pin)
            (ready if is_ready else lost).append(pin)
        budget_tokens = self.pins.host.budget_tokens
        reasons = [BUDGET if pin.tokens > budget_tokens else _NO_HOST_MEMORY for pin in lost]
        self._count_refused(reasons)
        self.release(lost, "pressure")
        self._settle(self.pins.spill(ready), "pressure")

    def forget_all(self) -> None:
        """The tree was emptied, and with it every lock."""
        self._note_ended(self.pins.clear(), "flushed")

    def _settle(self, moves: Moves, why: str) -> None:
        """Moves the memory of pins after the pins. why: the reason for which those end that end."""
        self._drop(moves.ended, why)
        self._count_refused(moves.refused)
        for pin in moves.spilled:
            if self.memory.copy(pin):
                self.memory.unlock([pin])
                self._count("pins_spilled")
                self._note(pin.prefix, pin)
            else:
                self._count_refused([_NO_HOST_MEMORY])
                self.release([pin], why)

    def _drop(self, pins: list[Pin], why: str) -> None:
        self.memory.unlock(pins)
        self.memory.unlock_copies(pins)
        self._note_ended(pins, why)

    def _note_ended(self, pins: Iterable[Pin], why: str) -> None:
        for pin in pins:
            self._count("pins_ended", why)
            self._note(pin.prefix, None)

    def _note(self, prefix: str, pin: Pin | None) -> None:
        compare("pin %s: %s", prefix, "ended" if pin is None else pin.label.tier)
        if self._is_entry_rank:
            self.changed[prefix] = pin

    def _count_refused(self, reasons: list[str]) -> None:
        """Counts pins that could not spill, where SGLang keeps host copies."""
        if self.memory.copies is not None or self.cannot_spill:
            for reason in reasons:
                self._count("spills_rejected", self.cannot_spill or reason)

    def _count(self, name: str, *labels: str) -> None:
        if self._is_entry_rank:
            made = counter(name)
            (made.labels(*labels) if labels else made).inc()


def space_of(req: Req) -> tuple[str, ...]:
    """The name space of a request in the tree; two name spaces share nothing. Of a prefix that all
    groups share, each group still has its own pins."""
    salt = req.cache_salt or ""
    group = group_salt(salt)
    return (req.extra_key or "", *((salt,) if group is None else (group, "shared")))


def key_of(req: Req) -> bytes:
    ids = req.origin_input_ids
    return (ids if isinstance(ids, array) and ids.itemsize == 8 else array("q", ids)).tobytes()


def _segment_before(hints: Hints, tokens: int, prompt_tokens: int) -> int | None:
    """The deepest segment that ends at or before so many tokens, estimated by bytes."""
    if not hints.ends:
        return None
    reached = hints.ends[-1] * tokens / prompt_tokens
    index = bisect_right(hints.ends, reached) - 1
    return hints.hashes[index] if index >= 0 else None
