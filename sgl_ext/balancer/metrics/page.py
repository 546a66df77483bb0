"""A page of metrics: its registry, and how a counter, a histogram or a gauge comes into it."""

import re
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from sgl_ext.balancer.metrics.instruments import Counter, Histogram, ProcessMetrics, Tables

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)


class Page:
    """The metrics of one process, in a registry of their own.

    A name is NAME or NAME{LABEL,LABEL}.
    """

    def __init__(self, process: int) -> None:
        self.registry = CollectorRegistry()
        ProcessMetrics(process, self.registry)
        self.tables = Tables(self.registry)
        self._by_label: list[Counter | Histogram] = []

    def forget_worker(self, worker: str) -> None:
        """Drops the counts of a worker that is gone: engines that come and go add up."""
        for metric in self._by_label:
            metric.forget("worker", worker)

    def _counter(self, name: str, help_text: str) -> Counter:
        """The counter `sgl_ext_NAME_total`."""
        name, *labels = re.findall(r"\w+", name)
        counter = Counter(f"sgl_ext_{name}", help_text, labels, self.registry)
        self._by_label.append(counter)
        return counter

    def _gauge(self, name: str, help_text: str) -> Gauge:
        name, *labels = re.findall(r"\w+", name)
        return Gauge(f"sgl_ext_{name}", help_text, labels, registry=self.registry)

    def _histogram(
        self, name: str, help_text: str, bounds: Sequence[float] = _SECONDS
    ) -> Histogram:
        name, label = re.findall(r"\w+", name)
        histogram = Histogram(f"sgl_ext_{name}", help_text, label, bounds, self.registry)
        self._by_label.append(histogram)
        return histogram

    def render(self) -> bytes:
        """The metrics in Prometheus' text format, version 0.0.4."""
        return generate_latest(self.registry)
