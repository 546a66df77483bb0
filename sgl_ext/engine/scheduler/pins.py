"""The pins of one scheduler, as locks in its radix cache. `radix.tiered_pins` decides.

All ranks of an engine must lock and unlock in the same iteration, or their memory differs and
their collectives hang. So nothing here reads a clock: time comes from the timestamps of requests
and from the entry rank's ticks (`iteration.py`), and all other input is
equal on all ranks.

A pin holds against the cache pressure of other prefixes, never against a live request. Where SGLang
keeps host copies, a pin that gives way on the device spills: its host copy is locked instead, and
eviction takes its device memory alone. It comes back to the device once a request has loaded it.

Pins give way to live requests on the device, in the order of `radix.pins`:

    admission    `admit`: a request that does not fit is tried again with one pin less each time,
                 from the owner that has most its least valuable, until it fits. If it never
                 fits, all pins stay.
    allocation   `make_room`: before decoding requests are retracted or an allocation fails, pins
                 give way until there is enough memory.

A pin that gives way spills to the host if it finds room there, and ends if it does not. Only what
gives way is copied, and before anything is evicted.
"""

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from cachetools import FIFOCache

from radix.pins import BUDGET, Pin
from radix.residency import Tier
from radix.tiered_pins import Moves, TieredPins
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import WHOLE_PROMPT
from sgl_ext.engine.core.shared_prefixes import group_salt
from sgl_ext.engine.scheduler.state import compare, state_of
from sgl_ext.engine.sglang_types import Req
from sgl_ext.engine.tiers.host_tier import HostCopies, HostLock
from sgl_ext.reading.client import COMPACTION
from sgl_ext.wire.hints import Hints


class Tree(Protocol):
    """What is needed of the extension's radix cache."""

    def lock(self, node: Any) -> Any: ...
    def unlock(self, lock: Any) -> None: ...
    def is_evicted(self, node: Any) -> bool: ...
    def match_until(self, req: Req, tokens: int) -> tuple[int, Any]: ...
    def inc_host_lock_ref(self, node: Any) -> Any: ...
    def dec_host_lock_ref(self, node: Any, receipt: Any) -> None: ...
    def full_evictable_size(self) -> int: ...
    def swa_evictable_size(self) -> int: ...
    def mamba_evictable_size(self) -> int: ...


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
    """The memory of pins in one cache. copies: of its prefixes; None where pins have none. lease:
    has the tier that engines share keep the prefix of a node for so many seconds."""

    def __init__(self, tree: Tree) -> None:
        self.copies: HostCopies | None = None
        self.lease: Callable[[Any, float], None] = lambda node, ttl_s: None
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


_MOST_EXPIRED = 256  # at most about 3 ms
_MOST_SUMMED_UP = 256
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
        cache: Tree,
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
        self.declined: Counter[str] = Counter()  # marks, by the reason
        self._cache = cache
        self._page = page
        self._lookahead = lookahead
        # The pins on prompts of summaries, by conversation.
        self._summed_up: FIFOCache[str, list[Pin]] = FIFOCache(_MOST_SUMMED_UP)
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
            if hints.turn != COMPACTION:
                self._leave_behind(hints, space, key)
            for pin in self.pins.hit(space, key, self.now_s, req.cached_tokens):
                pin.label.is_shared |= pin.session != hints.session
                self._count("pins_read")
                self._note(pin.prefix, pin)
        for pin in self.pins.host.prefixes_of(space, key, resident):
            self._load(pin)
        for end, ttl_s in reached:
            if hints.is_reusable and not hints.is_last and end > 0:
                self._pin(req, hints, space, key, end, ttl_s)
        if hints.turn == COMPACTION and hints.conversation:
            self._summed_up[hints.conversation] = self.pins.prefixes_of(space, key)

    def _leave_behind(self, hints: Hints, space: Any, key: bytes) -> None:
        """Gives up the pins of a conversation that was summed up and goes on from its summary. One
        that goes on from before it reads them all but the summary's own."""
        before = self._summed_up.pop(hints.conversation, None)
        if before:
            read = {pin.id for pin in self.pins.prefixes_of(space, key)}
            self._release_own(hints, (pin for pin in before if pin.id not in read), "compacted")

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
                self._decline("nothing to lock")
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
            self._decline(reason)
            return
        self.memory.lease(pin.label.node, ttl_s)
        self._count("pins_granted" if granted.is_new else "pins_renewed")
        self._note(pin.prefix, pin)

    def _decline(self, reason: str) -> None:
        """A mark gets no pin."""
        self.declined[reason] += 1
        self._count("pins_rejected", reason)

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


class PinPressure:
    """What memory pressure takes of the pins of `keeper` in `cache`."""

    def __init__(self, cache: Tree, keeper: PinKeeper) -> None:
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
