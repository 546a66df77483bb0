"""What workers hold of a prompt: the prefixes they reported, and those they will hold soon."""

from collections import defaultdict
from typing import NamedTuple

from radix.in_flight_prefixes import InFlightPrefix, InFlightPrefixes
from radix.index import PrefixIndex
from sgl_ext.requests.segments import Chain

LIMIT_SEGMENTS = 1_000_000
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
    """The prefix index and the in-flight prefixes of all workers."""

    def __init__(self) -> None:
        self.index = PrefixIndex(LIMIT_SEGMENTS)
        self.in_flight = InFlightPrefixes()
        self._bytes_per_token = _BYTES_PER_TOKEN
        self._calibrations = 0

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
        if 2 * len(self.index) > LIMIT_SEGMENTS:
            self.index.touch(chain.hashes, segments)

    def forget_worker(self, slot: int) -> None:
        """Forgets everything that a worker holds or will hold."""
        self.index.clear(slot)
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
