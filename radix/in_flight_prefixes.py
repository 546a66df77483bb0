"""In-flight prefixes: what workers will hold soon, because requests were sent to them.

A worker reports what it holds only after it has computed it. Until then the balancer goes by its
own decisions: an in-flight prefix belongs to one request and covers the segments that its worker
does not hold yet. It lasts while the request runs. After that the worker has some seconds to report
the segments, and then the prefix is forgotten. So a worker that never reports is believed for one
request at a time only.

Beyond `limit_segments` the prefixes that would expire first are dropped early, and while the rest
still fills the table, a further request covers no segment.

Invariants: a prefix is listed under those of its segments that are not confirmed, and under none
after it was dropped; every listed segment has a prefix.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count


@dataclass(slots=True, eq=False)
class InFlightPrefix:
    """The segments that one request will make a worker hold.

    computed: whether its prefill is done.
    """

    worker: int
    segments: tuple[int, ...]
    computed: bool = False


class InFlightPrefixes:
    """All in-flight prefixes, found by segment."""

    def __init__(self, limit_segments: int = 1_000_000) -> None:
        self.limit_segments = limit_segments
        self._by_segment: dict[int, dict[int, InFlightPrefix]] = {}
        self._listed: dict[int, int] = {}  # how many segments each worker has in flight
        self._ended: list[tuple[float, int, InFlightPrefix]] = []  # a heap, by expiry
        self._order = count()

    def __len__(self) -> int:
        return len(self._by_segment)

    def expect(self, worker: int, segments: Sequence[int]) -> InFlightPrefix:
        """Records that `worker` will hold `segments`. It replaces an earlier prefix of the same
        worker and segment."""
        more = len(segments)
        while self._ended and len(self._by_segment) + more > self.limit_segments:
            self.drop(heapq.heappop(self._ended)[2])
        if len(self._by_segment) + more > self.limit_segments:
            segments = ()
        prefix = InFlightPrefix(worker, tuple(segments))
        for segment in prefix.segments:
            workers = self._by_segment.setdefault(segment, {})
            if worker not in workers:
                self._listed[worker] = self._listed.get(worker, 0) + 1
            workers[worker] = prefix
        return prefix

    def end(self, prefix: InFlightPrefix, until_s: float) -> None:
        """The request has succeeded. Its worker has until `until_s` to confirm."""
        prefix.computed = True
        heapq.heappush(self._ended, (until_s, next(self._order), prefix))

    def drop(self, prefix: InFlightPrefix) -> bool:
        """Drops a prefix, because its request failed or its time has passed.

        Returns whether any of its segments was not confirmed.
        """
        is_unconfirmed = False
        for segment in prefix.segments:
            workers = self._by_segment.get(segment)
            if workers is not None and workers.get(prefix.worker) is prefix:
                is_unconfirmed = True
                self._unlist(segment, workers, prefix.worker)
        prefix.segments = ()
        return is_unconfirmed

    def expire(self, now_s: float) -> int:
        """Drops prefixes that were not confirmed in time; returns the number of their requests."""
        dropped = 0
        while self._ended and self._ended[0][0] <= now_s:
            _, _, prefix = heapq.heappop(self._ended)
            dropped += self.drop(prefix)
        return dropped

    def confirm_held(self, holds: Callable[[int, int], bool]) -> None:
        """Forgets the prefixes of ended requests that workers hold in full.

        holds: whether a worker holds a segment, and with it all those before it.
        """
        for _, _, prefix in self._ended:
            if prefix.segments and holds(prefix.worker, prefix.segments[-1]):
                self.drop(prefix)

    def expects(self, worker: int) -> bool:
        """Whether a worker has not confirmed a segment yet."""
        return worker in self._listed

    def confirm(self, worker: int, segment: int) -> None:
        """The worker reports that it holds the segment, so it is no longer in flight."""
        workers = self._by_segment.get(segment)
        if workers is not None and worker in workers:
            self._unlist(segment, workers, worker)

    def _unlist(self, segment: int, workers: dict[int, InFlightPrefix], worker: int) -> None:
        del workers[worker]
        if not workers:
            del self._by_segment[segment]
        self._listed[worker] -= 1
        if not self._listed[worker]:
            del self._listed[worker]

    def forget_worker(self, worker: int) -> None:
        """Drops a worker's prefixes, because it is gone or has restarted."""
        for prefix in self._of(worker):
            self.drop(prefix)

    def forget_computed(self, worker: int) -> None:
        """The worker has emptied its cache. It computes the prompts that still run after that."""
        for prefix in self._of(worker):
            if prefix.computed:
                self.drop(prefix)

    def _of(self, worker: int) -> set[InFlightPrefix]:
        found = (workers.get(worker) for workers in self._by_segment.values())
        return {prefix for prefix in found if prefix is not None}

    def forget_segment(self, worker: int, segment: int) -> None:
        """The worker no longer holds the segment: a computed prefix with it is dropped."""
        found = self._by_segment.get(segment, {}).get(worker)
        if found is not None and found.computed:
            self.drop(found)

    def deepest(self, hashes: Sequence[int]) -> dict[int, tuple[int, InFlightPrefix]]:
        """For each worker with an in-flight segment of the chain: the number of segments up to
        the deepest one, and its prefix. Changes nothing."""
        found: dict[int, tuple[int, InFlightPrefix]] = {}
        if not self._by_segment:
            return found
        find, missing = self._by_segment.get, len(self._listed)
        for depth in range(len(hashes), 0, -1):
            workers = find(hashes[depth - 1])
            if workers is not None:
                for worker, prefix in workers.items():
                    if worker not in found:
                        found[worker] = (depth, prefix)
                if len(found) == missing:
                    break
        return found

    def check(self) -> None:
        """Asserts the invariants."""
        assert len(self._by_segment) <= self.limit_segments
        listed = Counter(worker for workers in self._by_segment.values() for worker in workers)
        assert self._listed == listed
        for segment, workers in self._by_segment.items():
            assert workers, "a listed segment without a prefix"
            for worker, prefix in workers.items():
                assert prefix.worker == worker
                assert segment in prefix.segments
