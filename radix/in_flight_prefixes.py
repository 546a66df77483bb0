"""What workers will hold soon: the prefixes of requests sent to them and not confirmed yet.

A worker says what it holds only after it has computed it, and a moment later
still. Until then the balancer goes by its own decisions: an expectation stands
for one request on its way and covers the segments its worker does not hold yet.
While the request runs it stands; when the request has ended, the worker has
`confirm_s` to say so itself, and then it is forgotten. So a worker that never
confirms is believed for one request at a time and no longer.

Invariants: an expectation is listed under those of its segments that are not
confirmed and, once dropped, under none; no segment is listed with nothing expected of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count


@dataclass(slots=True, eq=False)
class InFlightPrefix:
    """One request on its way to a worker; `segments` are those it will make the worker hold.

    `computed` is False until the first byte of its answer: its prefill still runs.
    """

    worker: int
    segments: tuple[int, ...]
    computed: bool = False


class InFlightPrefixes:
    """All expectations, found by segment. `confirm_s` is how long one outlives its request."""

    def __init__(self, confirm_s: float) -> None:
        self._confirm_s = confirm_s
        self._by_segment: dict[int, dict[int, InFlightPrefix]] = {}
        self._ended: list[tuple[float, int, InFlightPrefix]] = []  # a heap, by when it is over
        self._order = count()

    def __len__(self) -> int:
        return len(self._by_segment)

    def expect(self, worker: int, segments: Sequence[int]) -> InFlightPrefix:
        """Records that `worker` is about to hold `segments`; a later request takes over from
        an earlier one of the same worker."""
        expectation = InFlightPrefix(worker, tuple(segments))
        for segment in expectation.segments:
            self._by_segment.setdefault(segment, {})[worker] = expectation
        return expectation

    def end(
        self, expectation: InFlightPrefix, now_s: float, confirm_s: float | None = None
    ) -> None:
        """The request has ended well; its worker has `confirm_s` from now on to confirm."""
        expectation.computed = True
        until_s = now_s + (self._confirm_s if confirm_s is None else confirm_s)
        heapq.heappush(self._ended, (until_s, next(self._order), expectation))

    def drop(self, expectation: InFlightPrefix) -> None:
        """Nothing is expected of this request any more."""
        for segment in expectation.segments:
            workers = self._by_segment.get(segment)
            if workers is not None and workers.get(expectation.worker) is expectation:
                del workers[expectation.worker]
                if not workers:
                    del self._by_segment[segment]
        expectation.segments = ()

    def expire(self, now_s: float) -> int:
        """Drops what has not been confirmed in time; how many requests that were."""
        dropped = 0
        while self._ended and self._ended[0][0] <= now_s:
            _, _, expectation = heapq.heappop(self._ended)
            dropped += any(
                self._by_segment.get(segment, {}).get(expectation.worker) is expectation
                for segment in expectation.segments
            )
            self.drop(expectation)
        return dropped

    def confirm(self, worker: int, segment: int) -> None:
        """The worker says that it holds the segment: from now on its own word counts."""
        workers = self._by_segment.get(segment)
        if workers is not None and workers.pop(worker, None) is not None and not workers:
            del self._by_segment[segment]

    def forget_worker(self, worker: int) -> None:
        """Drops all that is expected of a worker: it restarted, or emptied its cache."""
        mine = {
            id(found): found
            for workers in self._by_segment.values()
            if (found := workers.get(worker)) is not None
        }
        for expectation in mine.values():
            self.drop(expectation)

    def forget_segment(self, worker: int, segment: int) -> None:
        """The worker says it no longer holds the segment: it is not expected of it either."""
        workers = self._by_segment.get(segment)
        if workers is not None and (found := workers.get(worker)) is not None and found.computed:
            self.drop(found)

    def deepest(self, hashes: Sequence[int]) -> dict[int, tuple[int, InFlightPrefix]]:
        """For each worker of which some segment of the chain is expected: how many segments
        that makes, and the expectation. Does not change anything."""
        found: dict[int, tuple[int, InFlightPrefix]] = {}
        if not self._by_segment:
            return found
        for depth in range(len(hashes), 0, -1):
            workers = self._by_segment.get(hashes[depth - 1])
            if workers is not None:
                for worker, expectation in workers.items():
                    if worker not in found:
                        found[worker] = (depth, expectation)
        return found

    def check(self) -> None:
        """Asserts the invariants."""
        for segment, workers in self._by_segment.items():
            assert workers, "a segment of which nothing is expected"
            for worker, expectation in workers.items():
                assert expectation.worker == worker
                assert segment in expectation.segments
