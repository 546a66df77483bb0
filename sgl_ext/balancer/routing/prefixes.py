"""What workers hold of a prompt: the prefixes they reported, and those they will hold soon.

A balancer of one process writes its index and looks up in it. The processes of a group look up in
one index in shared memory, and one of them writes it.
"""

from collections import defaultdict
from typing import NamedTuple

from radix.in_flight_prefixes import InFlightPrefix, InFlightPrefixes
from radix.index import PrefixIndex
from radix.index_memory import IndexMemory
from radix.index_view import IndexView
from radix.shared_index import SharedIndex
from sgl_ext.balancer.metrics.instruments import Tables
from sgl_ext.requests.segments import Chain

_BYTES_PER_TOKEN = 4.0
_CALIBRATE_FROM_TOKENS = 256
_CALIBRATION = 0.05


class HeldPrefix(NamedTuple):
    """What one worker holds of a chain.

    tokens, segments: what it reported that it holds.
    expected_tokens, expected_segments: the same, with what it is about to hold because of
        `in_flight`.
    """

    tokens: int = 0
    segments: int = 0
    expected_tokens: int = 0
    expected_segments: int = 0
    in_flight: InFlightPrefix | None = None


_NOTHING = HeldPrefix()


HeldBySlot = defaultdict[int, HeldPrefix]
"""What workers hold of a chain, by their slots; a missing worker holds nothing."""


class Prefixes:
    """The prefix index and the in-flight prefixes of all workers.

    index: for lookups.
    written: the index that this process writes; None if another process does.
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
        self.in_flight = InFlightPrefixes()
        self._bytes_per_token = _BYTES_PER_TOKEN
        self._calibrations = 0

    def add_tables(self, tables: Tables) -> None:
        """Shows the sizes of the index and of the in-flight prefixes."""
        tables.add("prefix_index", lambda: len(self.index), lambda: self._limit_segments)
        in_flight = self.in_flight
        tables.add("in_flight_prefixes", in_flight.__len__, lambda: in_flight.limit_segments)

    def lookup(self, chain: Chain) -> HeldBySlot:
        """What each worker holds of a chain."""
        found = HeldBySlot(lambda: _NOTHING)
        for match in self.index.matches(chain.hashes):
            held = HeldPrefix(match.tokens, match.depth, match.tokens, match.depth)
            mask = match.workers
            while mask:
                low = mask & -mask
                found[low.bit_length() - 1] = held
                mask ^= low
            self._calibrate(chain.ends[match.depth - 1], match.tokens)
        for slot, (depth, in_flight) in self.in_flight.deepest(chain.hashes).items():
            held = found[slot]
            if depth > held.segments:
                begin = chain.ends[held.segments - 1] if held.segments else 0
                more_tokens = self.estimate_tokens(chain.ends[depth - 1] - begin)
                found[slot] = HeldPrefix(
                    held.tokens, held.segments, held.tokens + more_tokens, depth, in_flight
                )
        return found

    def touch(self, chain: Chain, segments: int) -> None:
        """Marks the first segments of a chain as used."""
        # Far from its limit the index forgets nothing, so recency does not matter.
        if 2 * len(self.index) > self._limit_segments:
            self.index.touch(chain.hashes, segments)

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
        """How often a group's index could not take a segment or all of its holders."""
        return self.written.unlisted if isinstance(self.written, SharedIndex) else 0

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

    def _calibrate(self, size_bytes: int, tokens: int) -> None:
        """Learns how many bytes of a request make a token of this model, quickly at first."""
        if tokens >= _CALIBRATE_FROM_TOKENS:
            ratio = min(max(size_bytes / tokens, 1.0), 16.0)
            self._calibrations += 1
            share = max(_CALIBRATION, 1 / self._calibrations)
            self._bytes_per_token += share * (ratio - self._bytes_per_token)
