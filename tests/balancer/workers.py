"""A table of workers for tests that start no balancer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.workers import Workers
from sgl_ext.membership.sources import STATIC, StaticList


def workers_at(
    urls: Iterable[str], metrics: Metrics, clock: Callable[[], float] = time.monotonic
) -> Workers:
    """The workers at these URLs, from a static list."""
    workers = Workers(metrics, clock)
    workers.apply(STATIC, StaticList(urls).members)
    return workers
