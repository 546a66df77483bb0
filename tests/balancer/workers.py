"""A table of workers, and their models, for tests that start no balancer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.admission import AdmissionQueue, Trials
from sgl_ext.balancer.routing.models import ModelPool, Models
from sgl_ext.balancer.routing.prefixes import Prefixes
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.routing_request import RoutingRequest, read_prompt
from sgl_ext.balancer.routing.standby_prefill import StandbyPrefill
from sgl_ext.balancer.routing.workers import Slots, Workers, WorkerSet
from sgl_ext.membership.sources import STATIC, StaticList
from sgl_ext.protocols.registry import of_path


def workers_at(
    urls: Iterable[str],
    metrics: Metrics,
    clock: Callable[[], float] = time.monotonic,
    slots: Slots | None = None,
) -> Workers:
    """The workers at these URLs, from a static list. slots: of a group of processes."""
    workers = Workers(metrics, clock, slots=slots)
    workers.apply(STATIC, StaticList(urls).members)
    return workers


def routed(
    router: Router,
    path: str,
    headers: Mapping[str, str],
    body: Any,
    size_bytes: int = 0,
    *,
    sort_tools: bool = False,
) -> RoutingRequest:
    """How a parsed and stripped body is routed."""
    ceiling = router.tenants.of_headers(headers).max_priority
    prompt = read_prompt(of_path(path), headers, body, size_bytes, ceiling, sort_tools=sort_tools)
    return router.routing_of(prompt, headers)


def models_of(
    workers: Workers,
    metrics: Metrics,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> Models:
    """The models of these workers."""
    prefixes = Prefixes()

    def make(name: str) -> ModelPool:
        own = WorkerSet()
        router = Router(own, metrics, clock=clock, prefixes=prefixes.of_model())
        queue = AdmissionQueue(router, metrics, 16, 60.0, clock=clock)
        standby = StandbyPrefill(router, metrics, None)  # type: ignore[arg-type]
        trials = Trials(router, lambda: queue.timeout_s)
        return ModelPool(name, own, router, queue, trials, standby)

    return Models(workers, metrics, make, **options)
