"""Counters and histograms without locks, for the balancer's event loop.

A request updates about ten of them. With prometheus_client's own that takes 18 us
(1.6 us for a labelled counter, 1.9 us for a histogram), with these 1 us.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

Labels = tuple[object, ...]


class Counter(Collector):
    """A counter by labels: `counter.counts["/v1/messages", 200] += 1`, or `inc` without labels."""

    def __init__(
        self, name: str, help_text: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self.counts: defaultdict[Labels, int] = defaultdict(int)
        if not labels:
            self.counts[()] = 0  # the page shows it from the start
        self._about = (name, help_text, labels)
        registry.register(self)

    def inc(self, amount: int = 1) -> None:
        """Counts where there are no labels."""
        self.counts[()] += amount

    def collect(self) -> Iterable[Metric]:
        name, help_text, labels = self._about
        family = CounterMetricFamily(name, help_text, labels=labels)
        for values, count in self.counts.items():
            family.add_metric([str(value) for value in values], count)
        return [family]


class Histogram(Collector):
    """A histogram by one label; `bounds` are the buckets' upper bounds, ascending."""

    def __init__(
        self,
        name: str,
        help_text: str,
        label: str,
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._about = (name, help_text, label)
        self._bounds = tuple(float(bound) for bound in bounds)
        self._names = (*map(str, self._bounds), "+Inf")
        self._counts: dict[str, list[int]] = {}
        self._sums: defaultdict[str, float] = defaultdict(float)
        registry.register(self)

    def observe(self, label: str, value: float) -> None:
        counts = self._counts.get(label)
        if counts is None:
            counts = self._counts[label] = [0] * len(self._names)
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[label] += value

    def collect(self) -> Iterable[Metric]:
        name, help_text, label = self._about
        family = HistogramMetricFamily(name, help_text, labels=[label])
        for value, counts in self._counts.items():
            buckets = [*zip(self._names, map(float, accumulate(counts)), strict=True)]
            family.add_metric([value], buckets, self._sums[value])
        return [family]
