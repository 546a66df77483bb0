"""What workers hold of a prompt: the prefixes they reported, and those they will hold soon.

A balancer of one process writes its index and looks up in it. The processes of a group look up in
one index in shared memory, and one of them writes it.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import takewhile

import msgspec

from radix.in_flight_prefixes import InFlightPrefix, InFlightPrefixes
from radix.index import PrefixIndex, SharedIndex
from radix.index_memory import IndexMemory, IndexView
from scheduler.shortlist import bits_of
from sgl_ext.balancer.metrics.instruments import Tables
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.reading.segments import Chain

_BYTES_PER_TOKEN = 4.0
_CALIBRATE_FROM_TOKENS = 256
_CALIBRATION = 0.05


class HeldPrefix(msgspec.Struct, frozen=True, gc=False):
    """What one worker holds of a chain.

    tokens, segments: what it reported that it holds.
    expected_tokens, expected_segments: the same, with what it is about to hold because of
        `in_flight`.
    host_tokens, shared_tokens: those after `expected_tokens` that it can load from its host, and
        those after both that it can load from the shared tier of its machine.
    """

    tokens: int = 0
    segments: int = 0
    expected_tokens: int = 0
    expected_segments: int = 0
    in_flight: InFlightPrefix | None = None
    host_tokens: int = 0
    shared_tokens: int = 0

    @property
    def slower_tokens(self) -> int:
        """What it can load from slower tiers."""
        return self.host_tokens + self.shared_tokens


_NOTHING = HeldPrefix()


def slower_tokens(worker: Worker, device: int, find: Callable[[int], int]) -> tuple[int, int]:
    """The tokens after those on the `device` that a worker can load from its host, and those after
    both that it can load from the shared tier. find: the tokens that are held under a slot."""
    host = shared = 0
    if worker.host_slot is not None:
        host = max(find(worker.host_slot) - device, 0)
    if worker.shared_slot is not None:
        shared = max(find(worker.shared_slot) - device - host, 0)
    return host, shared


class HeldBySlot:
    """What workers hold of a chain, by their slots. Workers that hold the same stay one bitmask, so
    that a prefix that all of them share costs no more than one of a few.

    groups: what workers reported, the deepest first: their bitmask, and what each holds.
    expecting: those that are about to hold more, and what.
    """

    __slots__ = ("expecting", "groups")

    def __init__(self) -> None:
        self.groups: list[tuple[int, HeldPrefix]] = []
        self.expecting: dict[int, HeldPrefix] = {}

    def __getitem__(self, slot: int) -> HeldPrefix:
        """What a worker holds."""
        if (found := self.expecting.get(slot)) is not None:
            return found
        for mask, held in self.groups:
            if mask >> slot & 1:
                return held
        return _NOTHING

    def tokens(self, slot: int) -> int:
        """The tokens that a worker holds or is about to hold."""
        return self[slot].expected_tokens

    def of(self, worker: Worker) -> HeldPrefix:
        """What a worker holds in all tiers."""
        held = self[worker.slot]
        if not worker.has_tiers:
            return held
        host, shared = slower_tokens(worker, held.expected_tokens, self.tokens)
        return msgspec.structs.replace(held, host_tokens=host, shared_tokens=shared)

    def holders(self, least_segments: int = 1) -> Iterator[tuple[int, int]]:
        """The slots of the workers that hold, or are about to hold, so many segments or more, and
        their tokens; those that are about to come first, then the deepest."""
        for slot, held in self.expecting.items():
            if held.expected_segments >= least_segments:
                yield slot, held.expected_tokens
        for mask, held in self.groups:
            if held.segments < least_segments:
                break
            for slot in bits_of(mask):
                if slot not in self.expecting:
                    yield slot, held.tokens

    def by_tokens(self) -> list[int]:
        """Bitmasks of the slots that hold, or are about to hold, as many tokens; the most first."""
        masks: dict[int, int] = {}
        expecting = 0
        for slot, held in self.expecting.items():
            expecting |= 1 << slot
            masks[held.expected_tokens] = masks.get(held.expected_tokens, 0) | 1 << slot
        for mask, held in self.groups:
            masks[held.tokens] = masks.get(held.tokens, 0) | mask & ~expecting
        return [masks[tokens] for tokens in sorted(masks, reverse=True)]

    @property
    def most(self) -> HeldPrefix:
        """The most that is held, or is about to be held, under one slot."""
        reported = [self.groups[0][1]] if self.groups else []
        found = (*reported, *self.expecting.values())
        return max(found, key=lambda held: held.expected_tokens, default=_NOTHING)

    def most_tokens(self, besides: int, counts: Callable[[int], bool]) -> int:
        """The most tokens that a worker holds or is about to hold, of the slots that count, besides
        one."""
        most = 0
        for slot, held in self.expecting.items():
            if held.expected_tokens > most and slot != besides and counts(slot):
                most = held.expected_tokens
        for mask, held in self.groups:
            others = mask & ~(1 << besides)
            if others and held.tokens > most and any(map(counts, bits_of(others))):
                most = held.tokens
        return most


class Prefixes:
    """The prefix index and the in-flight prefixes of all workers.

    Those of one model's workers share the index with others, and have in-flight prefixes and a size
    of a token of their own.

    index: for lookups.
    written: the index that this process writes; None if another process does.
    slots: a bitmask of the slots that count in a lookup.
    """

    def __init__(
        self,
        memory: IndexMemory | None = None,
        *,
        writes: bool = True,
        limit_segments: int = 1_000_000,
    ) -> None:
        """memory: the index of a group of processes. writes: whether this process writes it.
        limit_segments: of an index of this process alone.
        """
        self._memory = memory
        self._limit_segments = limit_segments if memory is None else memory.limit_segments
        self.index: PrefixIndex | IndexView
        self.written: PrefixIndex | SharedIndex | None
        if memory is None:
            self.index = self.written = PrefixIndex(limit_segments)
        else:
            self.index = IndexView(memory)
            self.written = SharedIndex(memory) if writes else None
        self._begin()

    def _begin(self) -> None:
        self.slots = -1
        self.in_flight = InFlightPrefixes()
        self._bytes_per_token = _BYTES_PER_TOKEN
        self._calibrations = 0

    def of_model(self) -> "Prefixes":
        """Those of the workers of one model."""
        found = copy(self)
        found._begin()
        return found

    def add_tables(self, tables: Tables) -> None:
        """Shows the sizes of the index and of the in-flight prefixes."""
        tables.put("prefix_index", lambda: len(self.index), lambda: self._limit_segments)
        in_flight = self.in_flight
        tables.add("in_flight_prefixes", in_flight.__len__, lambda: in_flight.limit_segments)

    def lookup(self, chain: Chain, others: Sequence[Chain] = ()) -> HeldBySlot:
        """What each worker holds of a chain. others: those of the other prompts of a batch, whose
        tokens are expected in addition."""
        found = HeldBySlot()
        for match in self.index.matches(chain.hashes):
            if workers := match.workers & self.slots:
                held = HeldPrefix(match.tokens, match.depth, match.tokens, match.depth)
                found.groups.append((workers, held))
        for slot, (depth, in_flight) in self.in_flight.deepest(chain.hashes).items():
            held = found[slot]
            segments = held.segments
            if depth > segments:
                begin = chain.ends[segments - 1] if segments else 0
                expected_tokens = held.tokens + self.estimate_tokens(chain.ends[depth - 1] - begin)
                found.expecting[slot] = HeldPrefix(
                    held.tokens, segments, expected_tokens, depth, in_flight
                )
        if others:
            self._add_others(found, chain, others)
        return found

    def _add_others(self, found: HeldBySlot, chain: Chain, others: Sequence[Chain]) -> None:
        """Adds what each worker holds of a batch's other prompts; what they share counts once."""
        seen = {*chain.hashes}
        for other in others:
            shared = sum(1 for _ in takewhile(seen.__contains__, other.hashes))
            seen.update(other.hashes)
            begin = other.ends[shared - 1] if shared else 0
            for match in self.index.matches(other.hashes):
                if match.depth <= shared:
                    break
                end = other.ends[match.depth - 1]
                tokens = match.tokens * (end - begin) // end
                for slot in bits_of(match.workers & self.slots):
                    held = found[slot]
                    more = held.expected_tokens + tokens
                    found.expecting[slot] = msgspec.structs.replace(held, expected_tokens=more)

    def begin(
        self, chain: Chain, slot: int, held: HeldPrefix, *, expects: bool
    ) -> InFlightPrefix | None:
        """A request begins on a worker: what it holds of the chain is used, and if the worker
        computes the rest now, that is expected there. None if there is no rest."""
        # Far from its limit the index forgets nothing, so recency does not matter.
        if 2 * len(self.index) > self._limit_segments:
            self.index.touch(chain.hashes, held.segments)
        missing = chain.hashes[held.expected_segments :] if expects else ()
        return self.in_flight.expect(slot, missing) if missing else None

    @property
    def is_complete(self) -> bool:
        """Whether the index is that of a group, and once had all that the workers hold."""
        return self._memory is not None and self._memory.is_complete

    def completed(self) -> None:
        """The workers have sent all that they hold: a group looks up here from now on."""
        if isinstance(self.written, SharedIndex):
            self.written.publish()

    @property
    def unlisted(self) -> int:
        """How often the index could not take a segment or its holders."""
        return 0 if self.written is None else self.written.unlisted

    def sweep(self) -> None:
        """Call it periodically: where another process writes the index, no event confirms what is
        in flight, so the index does."""
        if self.written is None:
            self.in_flight.confirm_held(self.index.holds)

    def forget_worker(self, slot: int) -> None:
        """Forgets everything that a worker holds or will hold."""
        if self.written is not None:
            self.written.clear(slot)
        self.in_flight.forget_worker(slot)

    def estimate_tokens(self, size_bytes: int) -> int:
        """The tokens of a part of a request."""
        return int(size_bytes / self._bytes_per_token)

    def prompt_tokens(self, chain: Chain, held: HeldPrefix, estimated_tokens: int) -> int:
        """The tokens of a prompt: those that a worker has of it, which it counted, and an estimate
        of the rest."""
        if not held.segments:
            return estimated_tokens
        rest_bytes = chain.ends[-1] - chain.ends[held.segments - 1]
        return held.tokens + self.estimate_tokens(rest_bytes)

    def learn_size(self, chain: Chain, held: HeldBySlot) -> None:
        """Learns from a request that is placed how many bytes its tokens have."""
        for _, prefix in held.groups:
            self._calibrate(chain.ends[prefix.segments - 1], prefix.tokens)

    def _calibrate(self, size_bytes: int, tokens: int) -> None:
        """Learns how many bytes of a request make a token of this model, quickly at first."""
        if tokens >= _CALIBRATE_FROM_TOKENS:
            ratio = min(max(size_bytes / tokens, 1.0), 16.0)
            self._calibrations += 1
            share = max(_CALIBRATION, 1 / self._calibrations)
            self._bytes_per_token += share * (ratio - self._bytes_per_token)
