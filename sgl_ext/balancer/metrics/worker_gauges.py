"""The gauges of each worker: what the balancer knows of it, and what it reports of itself."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol

from prometheus_client.core import GaugeMetricFamily, Metric

from scheduler.breaker import Breaker, State
from scheduler.placing.speeds import Weights


class Worker(Protocol):
    """What is shown of a worker."""

    ready: bool
    draining: bool
    refuses_secret: bool
    publishes: bool
    breaker: Breaker
    in_flight: int
    pinned_tokens: int
    weights: Weights
    report: Mapping[str, Any]

    @property
    def pins(self) -> Sized: ...
    @property
    def state(self) -> str: ...
    def total_pending_tokens(self, now_s: float) -> int: ...


# Each metric of a worker: its help text and its value at a time.
_GAUGES: dict[str, tuple[str, Callable[[Worker, float], float]]] = {
    "ready": ("Whether the worker is ready for requests.", lambda worker, now_s: worker.ready),
    "draining": (
        "Whether the worker drains: it gets no new requests and leaves after its last one.",
        lambda worker, now_s: worker.draining,
    ),
    "secret_refused": (
        "Whether the worker refuses the engine secret of this balancer.",
        lambda worker, now_s: worker.refuses_secret,
    ),
    "breaker_open": (
        "Whether the worker's circuit breaker is open.",
        lambda worker, now_s: worker.breaker.state is State.OPEN,
    ),
    "in_flight": (
        "Requests that the worker is answering for this balancer.",
        lambda worker, now_s: worker.in_flight,
    ),
    "pending_tokens": (
        "Estimate of the prompt tokens that the worker still has to compute.",
        lambda worker, now_s: worker.total_pending_tokens(now_s),
    ),
    "pinned_tokens": (
        "Tokens of the prefixes that are pinned in the worker's cache.",
        lambda worker, now_s: worker.pinned_tokens,
    ),
    "pins": (
        "Prefixes that are pinned in the worker's cache.",
        lambda worker, now_s: len(worker.pins),
    ),
    "prefill_weight": (
        "What a token of prefill costs there, 1 on the usual engine; learned from requests.",
        lambda worker, now_s: worker.weights.prefill,
    ),
    "decode_weight": (
        "What a decoded token costs there, 1 on the usual engine; learned from requests.",
        lambda worker, now_s: worker.weights.decode,
    ),
    "subscribed": (
        "Whether the worker publishes the prefixes that it holds. Without them it is routed to by "
        "what this balancer sent there.",
        lambda worker, now_s: worker.publishes,
    ),
}
# Each metric that an engine reports of itself: its help text, and its name in the report.
_REPORTED = {
    "running_requests": ("Requests that the worker's scheduler runs, of all balancers.", "running"),
    "queued_requests": ("Requests that wait in the worker's own queue.", "queued"),
    "used_tokens": (
        "Tokens in the worker's KV cache that cannot be evicted: of running requests, and pinned.",
        "used_tokens",
    ),
    "capacity_tokens": ("Tokens that fit into the worker's KV cache.", "capacity_tokens"),
}


def gauges(workers: Mapping[str, Worker], states: Sequence[str], now_s: float) -> Iterator[Metric]:
    """All gauges of these workers, by their ids. states: those that a worker can be in."""
    for gauge, (help_text, value) in _GAUGES.items():
        family = GaugeMetricFamily(f"sgl_ext_worker_{gauge}", help_text, labels=["worker"])
        for name, worker in workers.items():
            family.add_metric([name], value(worker, now_s))
        yield family
    for gauge, (help_text, field) in _REPORTED.items():
        family = GaugeMetricFamily(f"sgl_ext_worker_{gauge}", help_text, labels=["worker"])
        for name, worker in workers.items():
            if field in worker.report:
                family.add_metric([name], worker.report[field])
        yield family
    text = "Whether this is the worker's state; it gets new requests in the state ready alone."
    labels = ["worker", "state"]
    family = GaugeMetricFamily("sgl_ext_worker_state", text, labels=labels)
    for name, worker in workers.items():
        for state in states:
            family.add_metric([name, state], worker.state == state)
    yield family
