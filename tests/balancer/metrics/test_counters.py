"""Plain counts as Prometheus shows them: the same as its own objects would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from sgl_ext.balancer.metrics.counters import Spread, Tally

LABELS = st.sampled_from(["a", 'b"c', "d\ne"])
VALUES = st.sampled_from([0.0, 0.5, 0.75, 1.0, 2.0, 2.5, 9.0])
BOUNDS = (0.5, 1, 2.5)


def shown(registry: CollectorRegistry) -> list[str]:
    """The page, without when each series began."""
    return sorted(
        line for line in generate_latest(registry).decode().splitlines() if "_created" not in line
    )


@given(st.lists(st.tuples(LABELS, st.integers(200, 203)), min_size=1))
def test_a_tally_is_a_counter(counted: list[tuple[str, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("n", "help", ["path", "status"], ours)
    counter = Counter("n", "help", ["path", "status"], registry=theirs)
    for labels in counted:
        tally.counts[labels] += 1
        counter.labels(*labels).inc()
    assert shown(ours) == shown(theirs)


@given(st.lists(st.tuples(LABELS, VALUES), min_size=1))
def test_a_spread_is_a_histogram(values: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    spread = Spread("s", "help", "path", BOUNDS, ours)
    histogram = Histogram("s", "help", ["path"], buckets=BOUNDS, registry=theirs)
    for label, value in values:
        spread.add(label, value)
        histogram.labels(label).observe(value)
    assert shown(ours) == shown(theirs)
