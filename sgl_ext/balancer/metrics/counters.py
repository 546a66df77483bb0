"""Counters and histograms for what happens on every request.

prometheus_client's own take a lock and about a microsecond each. The balancer
counts in one thread, so plain numbers do, and become Prometheus' when asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

Labels = tuple[object, ...]


class Tally(Collector):
    """A counter, by labels: `tally.counts["/v1/messages", 200] += 1`."""

    def __init__(
        self, name: str, help_text: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self.counts: defaultdict[Labels, int] = defaultdict(int)
        self._about = (name, help_text, labels)
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """What was counted so far."""
        name, help_text, labels = self._about
        family = CounterMetricFamily(name, help_text, labels=labels)
        for values, count in self.counts.items():
            family.add_metric([str(value) for value in values], count)
        return [family]


class Spread(Collector):
    """A histogram by one label; `bounds` are the buckets' upper ends, ascending."""

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
        self._counts: dict[str, list[int]] = {}
        self._sums: defaultdict[str, float] = defaultdict(float)
        registry.register(self)

    def add(self, label: str, value: float) -> None:
        """Records a value."""
        counts = self._counts.get(label)
        if counts is None:
            counts = self._counts[label] = [0] * (len(self._bounds) + 1)
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[label] += value

    def collect(self) -> Iterable[Metric]:
        """What was recorded so far."""
        name, help_text, label = self._about
        family = HistogramMetricFamily(name, help_text, labels=[label])
        for value, counts in self._counts.items():
            buckets, total = [], 0
            for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
                total += count
                buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
            family.add_metric([value], buckets, self._sums[value])
        return [family]
