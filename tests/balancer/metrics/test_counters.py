"""The counters and histograms appear as prometheus_client's own would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as TheirCounter
from prometheus_client import Histogram as TheirHistogram

from sgl_ext.balancer.metrics.instruments import Counter, Histogram

LABELS = st.sampled_from(["a", 'b"c', "d\ne"])
VALUES = st.sampled_from([0.0, 0.5, 0.75, 1.0, 2.0, 2.5, 9.0])
BOUNDS = (0.5, 1, 2.5)


def page_of(registry: CollectorRegistry) -> list[str]:
    """The page without the series that say when another one began."""
    return sorted(
        line for line in generate_latest(registry).decode().splitlines() if "_created" not in line
    )


@given(st.lists(st.tuples(LABELS, st.integers(200, 203)), min_size=1))
def test_counters_are_equal(counted: list[tuple[str, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counter = Counter("n", "help", ["path", "status"], ours)
    their_counter = TheirCounter("n", "help", ["path", "status"], registry=theirs)
    for labels in counted:
        counter.counts[labels] += 1
        their_counter.labels(*labels).inc()
    assert page_of(ours) == page_of(theirs)


def test_a_counter_without_labels_begins_at_zero() -> None:
    registry = CollectorRegistry()
    counter = Counter("n", "help", [], registry)
    assert "n_total 0.0" in page_of(registry)
    counter.inc()
    counter.inc(2)
    assert "n_total 3.0" in page_of(registry)


@given(st.lists(st.tuples(LABELS, VALUES), min_size=1))
def test_histograms_are_equal(values: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("s", "help", "path", BOUNDS, ours)
    their_histogram = TheirHistogram("s", "help", ["path"], buckets=BOUNDS, registry=theirs)
    for label, value in values:
        histogram.observe(label, value)
        their_histogram.labels(label).observe(value)
    assert page_of(ours) == page_of(theirs)
