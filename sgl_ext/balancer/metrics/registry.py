"""What the balancer counts, for Prometheus."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sgl_ext.balancer.metrics.counters import Spread, Tally

_TOKENS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)


# Priorities have one label for each of these and what is up to the next one.
_BANDS = (0, 1, 10)


def band(priority: int) -> str:
    """The band of a priority: its least one, or "-1" for all below 0."""
    return str((-1, *_BANDS)[bisect_right(_BANDS, priority)])


class Metrics:
    """The balancer's own metrics; one registry each, so that tests do not share counts."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Tally("sgl_ext_requests", "Requests answered", ["path", "status"], registry)
        self.first_byte_s = Spread(
            "sgl_ext_first_byte_seconds",
            "From a request's arrival to the first byte of its answer",
            "path",
            _SECONDS,
            registry,
        )
        self.retries = Counter(
            "sgl_ext_retries", "Requests sent again to another worker", registry=registry
        )
        self.cut_streams = Counter(
            "sgl_ext_cut_streams",
            "Streams that a worker cut after the first byte",
            registry=registry,
        )
        self.client_gone = Counter(
            "sgl_ext_client_gone", "Requests whose client left before the end", registry=registry
        )
        self.headers_read = Counter(
            "sgl_ext_headers_read",
            "Session headers seen at the head of a prompt",
            registry=registry,
        )
        self.placements = Tally(
            "sgl_ext_placements", "Requests placed, by what decided", ["reason"], registry
        )
        self.spares = Tally(
            "sgl_ext_spares_warmed",
            "Prompts sent to a second worker as their session's own was about to be too busy",
            ["result"],
            registry,
        )
        self.store_events = Tally(
            "sgl_ext_store_events",
            "Responses and contexts kept, found and let go, and what failed",
            ["event"],
            registry,
        )
        self.queue_s = Spread(
            "sgl_ext_queue_seconds",
            "How long a request waited for room, or for a shared prefix to be computed",
            "reason",
            _SECONDS,
            registry,
        )
        self.priority_queue_s = Spread(
            "sgl_ext_priority_queue_seconds",
            "How long a request waited for room, by the least priority of its band",
            "priority",
            _SECONDS,
            registry,
        )
        self.priority_first_byte_s = Spread(
            "sgl_ext_priority_first_byte_seconds",
            "From a request's arrival to the first byte of its answer, likewise",
            "priority",
            _SECONDS,
            registry,
        )
        self.door_waiting = Gauge(
            "sgl_ext_door_waiting", "Requests that wait for room", registry=registry
        )
        self.promotions = Counter(
            "sgl_ext_promotions",
            "Requests let in at a higher step than their priority, as they had waited",
            registry=registry,
        )
        self.predicted_tokens = Tally(
            "sgl_ext_predicted_cached_tokens",
            "Prompt tokens that a worker was thought to hold, where it told its own count",
            ["worker"],
            registry,
        )
        self.reported_tokens = Tally(
            "sgl_ext_reported_cached_tokens", "What it told", ["worker"], registry
        )
        self.prompt_tokens = Tally(
            "sgl_ext_prompt_tokens",
            "Prompt tokens of the requests for which a worker told its own count of cached ones",
            ["worker"],
            registry,
        )
        self.diverged_prompts = Tally(
            "sgl_ext_diverged_prompts",
            "Prompts that did not begin as an earlier one of their session or fleet",
            ["harness", "kind"],
            registry,
        )
        self.diverged_tokens = Tally(
            "sgl_ext_diverged_tokens",
            "Prompt tokens to compute again because of that, an estimate",
            ["harness", "kind"],
            registry,
        )
        self.prompts_not_compared = Tally(
            "sgl_ext_prompts_not_compared",
            "Prompts not compared with those before them: too long, no time for more, an error",
            ["why"],
            registry,
        )
        self.prediction_error_tokens = Spread(
            "sgl_ext_prediction_error_tokens",
            "Difference between the tokens a worker was thought to hold and those it found",
            "worker",
            _TOKENS,
            registry,
        )
        self.retries_refused = Counter(
            "sgl_ext_retries_refused",
            "Requests not sent again because the budget for retries was spent",
            registry=registry,
        )
        self.turned_away = Counter(
            "sgl_ext_turned_away",
            "Requests refused because too many waited, or for too long",
            registry=registry,
        )
        self.events = Tally(
            "sgl_ext_prefix_events", "Lines of an engine's prefix events", ["worker"], registry
        )
        self.event_faults = Tally(
            "sgl_ext_prefix_event_faults",
            "Prefix events that were not applied",
            ["worker", "fault"],
            registry,
        )
        self.sibling_faults = Tally(
            "sgl_ext_sibling_message_faults",
            "Messages between the processes of this balancer that were lost or not understood",
            ["fault"],
            registry,
        )
        self.unconfirmed = Counter(
            "sgl_ext_unconfirmed_prefixes",
            "Requests after which the engine never said that it holds their prefix",
            registry=registry,
        )

    def watch_workers(self, series: Callable[[], dict[str, WorkerSeries]]) -> None:
        """Shows each worker's state, as `series` gives it by URL when it is asked for."""
        self.registry.register(_WorkerGauges(series))

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class WorkerSeries(NamedTuple):
    """A worker's state at one moment, a gauge each."""

    ready: bool
    draining: bool
    breaker_open: bool
    in_flight: int
    pending_tokens: int
    pinned_tokens: int


class _WorkerGauges(Collector):
    def __init__(self, series: Callable[[], dict[str, WorkerSeries]]) -> None:
        self._series = series

    def collect(self) -> Iterable[Metric]:
        for number, name in enumerate(WorkerSeries._fields):
            about = name.replace("_", " ").capitalize()
            family = GaugeMetricFamily(f"sgl_ext_worker_{name}", about, labels=["worker"])
            for url, values in self._series().items():
                family.add_metric([url], float(values[number]))
            yield family
