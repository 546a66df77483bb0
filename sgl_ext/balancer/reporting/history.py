"""The requests of the last hour, summed by interval: hit rate, TTFT, requests and tokens a second.

Intervals are numbered by the wall clock, so those of several processes are the same, and their
sums add up. An interval without requests takes no memory. TTFTs are counted in buckets whose
bounds grow by GROWTH, so a quantile is off by about 5% at most.
"""

from collections.abc import Iterable, Mapping
from math import ceil, log
from typing import Any

INTERVAL_S = 10
LENGTH = 360
_RECENT = 6
GROWTH = 1.1
_SHORTEST_S = 0.0001
_PER_LOG = 1 / log(GROWTH)

# Requests; tokens of the prompts whose answers reported a usage, cached ones, output tokens.
_Sums = list[int]
_Counts = dict[float, int]
_Interval = tuple[_Sums, _Counts]


class History:
    """One process's sums, by interval. Times are wall-clock seconds."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._intervals: dict[float, _Interval] = {}
        self._latest: float | None = None
        self._interval = _nothing()

    def add(
        self, now_s: float, ttft_s: float | None, prompt: int, cached: int, output: int
    ) -> None:
        """Adds an answered request. ttft_s: None if it does not count. The tokens are 0 if the
        answer reported no usage."""
        number = now_s // INTERVAL_S
        if number != self._latest:
            self._latest, self._interval = (
                number,
                self._intervals.get(number) or self._begin(number),
            )
        sums, counts = self._interval
        sums[0] += 1
        if prompt:
            sums[1] += prompt
            sums[2] += cached
            sums[3] += output
        if ttft_s is not None:
            bucket = log(ttft_s if ttft_s > _SHORTEST_S else _SHORTEST_S) * _PER_LOG // 1
            counts[bucket] = counts.get(bucket, 0) + 1

    def _begin(self, number: float) -> _Interval:
        for old in [each for each in self._intervals if not number - LENGTH <= each <= number]:
            del self._intervals[old]
        interval = self._intervals[number] = ([0, 0, 0, 0], {})
        return interval

    def as_json(self) -> dict[str, Any]:
        """What `series` adds up."""
        rows = [
            [int(number), sums, [*counts.items()]]
            for number, (sums, counts) in self._intervals.items()
        ]
        return {"started_s": self._started_s, "intervals": rows}


def series(documents: Iterable[Mapping[str, Any]], now_s: float) -> dict[str, Any]:
    """The history of all processes, from their `as_json`: one value for each interval that is
    complete, the oldest first, since the first process began, for an hour at most.

    `recent` has the values of the last minute together. A rate is null where no prompt, and a TTFT
    where no answer, is known.
    """
    documents = list(documents)
    end = int(now_s) // INTERVAL_S
    began = min((document["started_s"] for document in documents), default=now_s)
    first = max(end - LENGTH, int(began) // INTERVAL_S)
    found: dict[int, _Interval] = {}
    for document in documents:
        for number, sums, counts in document["intervals"]:
            if first <= number < end:
                _add(found.setdefault(number, _nothing()), sums, counts)
    intervals = [found.get(number) or _nothing() for number in range(first, end)]
    last_minute = _nothing()
    for sums, buckets in intervals[-_RECENT:]:
        _add(last_minute, sums, buckets.items())
    span_s = INTERVAL_S * len(intervals[-_RECENT:])
    values = [_values(interval, INTERVAL_S) for interval in intervals]
    names = _values(_nothing(), INTERVAL_S)
    return {
        "interval_s": INTERVAL_S,
        "end_s": end * INTERVAL_S,
        **{name: [each[name] for each in values] for name in names},
        "recent": {"span_s": span_s, **_values(last_minute, span_s)},
    }


def _nothing() -> _Interval:
    return [0, 0, 0, 0], {}


def _add(to: _Interval, sums: _Sums, counts: Iterable[tuple[float, int]]) -> None:
    to[0][:] = map(sum, zip(to[0], sums, strict=True))
    for bucket, count in counts:
        to[1][bucket] = to[1].get(bucket, 0) + count


def _values(interval: _Interval, span_s: int) -> dict[str, float | None]:
    (requests, prompt, cached, output), counts = interval
    return {
        "hit_rate": round(cached / prompt, 4) if prompt else None,
        "ttft_p50_s": _quantile(counts, 0.5),
        "ttft_p99_s": _quantile(counts, 0.99),
        "requests_per_s": round(requests / span_s, 2) if span_s else None,
        "output_tokens_per_s": round(output / span_s, 1) if span_s else None,
    }


def _quantile(counts: _Counts, share: float) -> float | None:
    """The geometric middle of the bucket with the quantile; None without counts."""
    rank = ceil(sum(counts.values()) * share)
    for bucket in sorted(counts):
        rank -= counts[bucket]
        if rank <= 0:
            return float(f"{GROWTH ** (bucket + 0.5):.3g}")
    return None
